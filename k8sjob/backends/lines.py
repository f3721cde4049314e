"""Pieces of output put together to lines, in time linear in their length."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

__all__ = ["MAX_LINE", "Line", "lines"]

MAX_LINE: Final = 16 * 2**20
"""Bytes of one line that are kept. No object of a cluster is that large, and no log line that
anybody reads; a progress bar that never ends its line is."""


class Line:
    """A line that comes in pieces; of a longer one than MAX_LINE only the beginning is kept."""

    def __init__(self) -> None:
        self._kept = bytearray()
        self._left_out = 0

    def add(self, piece: bytes) -> None:
        """Append a piece without a newline."""
        room = MAX_LINE - len(self._kept)
        self._kept += piece[:room]
        self._left_out += max(len(piece) - room, 0)

    def take(self) -> bytes:
        """The line so far, with a note if part of it was left out; the next line begins."""
        if self._left_out:
            self._kept += b" [k8sjob: %d more bytes of this line are left out]" % self._left_out
        taken = bytes(self._kept)
        self._kept.clear()
        self._left_out = 0
        return taken


def lines(chunks: Iterable[bytes]) -> Iterator[bytes]:
    """Pieces of an answer as whole lines, each with its newline; a last one may lack it."""
    line = Line()
    for chunk in chunks:
        first, *others = chunk.split(b"\n")
        line.add(first)
        for other in others:
            yield line.take() + b"\n"
            line.add(other)
    if rest := line.take():
        yield rest

"""The last lines of a terminal, replaced in place while others scroll by above them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from rich.cells import cell_len

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import Console
    from rich.text import Text

__all__ = ["Region"]

# A terminal that knows synchronised output shows all between the two at once; others pass it over.
_BEGIN, _END = "\x1b[?2026h", "\x1b[?2026l"
_HIDE_CURSOR, _SHOW_CURSOR = "\x1b[?25l", "\x1b[?25h"
_ERASE_BELOW: Final = "\x1b[J"
_ERASE_REST_OF_LINE: Final = "\x1b[K"


class Region:
    """Draws lines at the bottom of a terminal; one write each time, none where nothing changed."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._lines: list[Text] = []
        self._frame = ""
        self._width = console.width
        self._open = True
        self._write(_HIDE_CURSOR)

    def draw(self, lines: Sequence[Text], above: Text | None = None) -> None:
        """Replace the region, and print what stands above it from now on.

        Args:
            lines: none wider than the terminal less one column: a character in the last one makes
                terminals disagree about where the cursor is.
            above: may be of any width and number of lines.
        """
        frame = self._rendered(lines)
        width = self._console.width
        if above is None and frame == self._frame and width == self._width:
            return
        back = self._back(width)
        if above is None and width == self._width:
            # Written over, not erased first: there is nothing to flicker.
            body = frame.replace("\n", f"{_ERASE_REST_OF_LINE}\n") + _ERASE_BELOW
        else:
            body = _ERASE_BELOW + (self._rendered([above]) if above is not None else "") + frame
        self._lines, self._frame, self._width = list(lines), frame, width
        self._write(f"{_BEGIN}{back}{body}{_END}")

    def close(self) -> None:
        """Erase the region and show the cursor again; once."""
        if self._open:
            self._write(f"{self._back(self._console.width)}{_ERASE_BELOW}{_SHOW_CURSOR}")
            self._open = False

    def _back(self, width: int) -> str:
        """Moves the cursor to the region's first column and line, as the terminal holds it now."""
        # A terminal that became narrower has wrapped the lines that it showed.
        rows = sum(max(-(-cell_len(line.plain) // max(width, 1)), 1) for line in self._lines)
        return f"\r\x1b[{rows}A" if rows else "\r"

    def _rendered(self, lines: Sequence[Text]) -> str:
        with self._console.capture() as captured:
            for line in lines:
                self._console.print(line, soft_wrap=True)
        return captured.get()

    def _write(self, text: str) -> None:
        self._console.file.write(text)
        self._console.file.flush()

"""A replica's output in files: one per start of its container, in the form that a kubelet writes.

A line is `TIMESTAMP stdout F TEXT`; P instead of F marks a part of a line that is not whole. What
the job wrote stays as it was, byte for byte, except lines of code in the copy of the user's
folder: these are named as in that folder. Whoever shows it strips control sequences.
"""

from __future__ import annotations

import os
import re
import time
from collections import deque
from contextlib import closing
from typing import TYPE_CHECKING, BinaryIO, Final

from k8sjob.backends.api import LogLine
from k8sjob.backends.local.state_folder import open_file
from k8sjob.kube.client.transport import PartialLine

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

_END: Final = 1 << 18
"""Bytes at the end of a file in which its last lines are looked for."""
_FIRST_LOOK: Final = 1 << 16
"""Bytes at the end of a file that hold some hundred lines of most jobs."""
_ROW: Final = re.compile(rb"([\w:.+-]+) stdout ([FP]) (.*)", re.DOTALL)
LONGEST_LINE: Final = 16 * 1024
"""A longer line is written in parts, as container runtimes do it."""


class LogWriter:
    """Takes the output of one start of a container and writes it down, line by line.

    The code runs in `copy`, a copy of the user's folder `source`; both are empty if it runs in that
    folder itself.
    """

    def __init__(self, path: Path, copy: str = "", source: str = "") -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file: BinaryIO = path.open("ab", buffering=0)
        self._rest = b""
        self._in_line = False
        self._source = os.fsencode(source)
        self._copies = {os.fsencode(one) for one in (copy, os.path.realpath(copy)) if copy}
        # The form of tracebacks, or of warnings and logs; paths of other files stay.
        places = b"|".join(map(re.escape, self._copies))
        self._code = re.compile(b"(?:%s)" % places + rb'(?=/[^\s":]+(?:", line |:)\d)')

    def feed(self, data: bytes) -> None:
        """Some output; whole lines are written at once, the rest waits for its newline."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        head = _timestamp().encode() + b" stdout "
        written = bytearray()
        for output in lines:
            line = output
            if any(copy in line for copy in self._copies):
                line = self._code.sub(lambda _: self._source, line)
            for start in range(0, max(len(line), 1), LONGEST_LINE):
                part = line[start : start + LONGEST_LINE]
                whole = start + LONGEST_LINE >= len(line)
                written += head + (b"F " if whole else b"P ") + part + b"\n"
        self._in_line = bool(self._rest) or (self._in_line and not lines)
        while len(self._rest) >= LONGEST_LINE:
            written += head + b"P " + self._rest[:LONGEST_LINE] + b"\n"
            self._rest = self._rest[LONGEST_LINE:]
        if written:
            self._file.write(written)

    def close(self) -> None:
        """The container has ended: what waits is the last line."""
        if self._in_line:
            self.feed(b"\n")
        self._file.close()


def attempts(folder: Path) -> list[int]:
    """The starts that have output, the oldest first."""
    return sorted(int(path.stem) for path in folder.glob("*.log") if path.stem.isdecimal())


def read(folder: Path, replica: str, attempt: int) -> Iterator[LogLine]:
    """All whole lines of one start; nothing if there is no file."""
    with closing(_Reader(folder, replica, attempt)) as reader:
        yield from reader.lines()


def read_last(folder: Path, replica: str, count: int) -> list[LogLine]:
    """The last lines over all starts, `count` at least where there are so many.

    Of a long file only the end is read.
    """
    found: list[LogLine] = []
    for attempt in reversed(attempts(folder)):
        found = [*_end_of(folder, replica, attempt, count - len(found)), *found]
        if len(found) >= count:
            break
    return found


def _end_of(folder: Path, replica: str, attempt: int, count: int) -> list[LogLine]:
    size, last = (folder / f"{attempt}.log").stat().st_size, _FIRST_LOOK
    while True:
        with closing(_Reader(folder, replica, attempt, last=last)) as reader:
            lines = list(reader.lines())
        if last >= size:
            return lines
        if len(lines) > count:
            return lines[1:]  # the first one may be cut
        last *= 4


def follow_lines(
    folder: Path, replica: str, *, ended: Callable[[], bool], stopped: Callable[[], bool]
) -> Iterator[LogLine]:
    """All lines of all starts, and what is written from now on.

    The folder need not be there yet. `ended` tells whether nothing more will be written, and is
    called before the last read; `stopped`, whether to end now.
    """
    reader = _Reader(folder, replica, 0)
    try:
        while not stopped():
            over, newer = ended(), (folder / f"{reader.attempt + 1}.log").exists()
            yield from reader.lines()
            if newer:
                reader.close()
                reader = _Reader(folder, replica, reader.attempt + 1)
            elif over:
                return
            else:
                time.sleep(0.05)
    finally:
        reader.close()


def last_lines(folder: Path, attempt: int, *, lines: int, size: int, without: str) -> str:
    """The end of one start's output, at most `lines` lines and `size` bytes of text.

    Lines that begin with `without` are left out, unless it is empty.
    """
    with closing(_Reader(folder, "", attempt, last=_END)) as reader:
        whole = (line.text for line in reader.lines())
        texts = deque((t for t in whole if not (without and t.startswith(without))), maxlen=lines)
    return "\n".join(texts).encode()[-size:].decode(errors="ignore")


class _Reader:
    """Reads one file from where it stopped the last time, or its `last` bytes; whole lines only.

    Rows that no LogWriter wrote, as after a loss of power, are left out.
    """

    def __init__(self, folder: Path, replica: str, attempt: int, *, last: int = 0) -> None:
        self.attempt, self._last = attempt, last
        self._path, self._replica = folder / f"{attempt}.log", replica
        self._file: BinaryIO | None = None
        self._cut = b""
        self._line = PartialLine()

    def lines(self) -> Iterator[LogLine]:
        if self._file is None:
            try:
                self._file = open_file(self._path)
            except OSError:
                return
            if self._last:
                self._file.seek(max(self._path.stat().st_size - self._last, 0))
        while data := self._file.read(1 << 16):
            *rows, self._cut = (self._cut + data).split(b"\n")
            for row in rows:
                found = _ROW.fullmatch(row)
                if not found:
                    continue
                timestamp, tag, text = found.groups()
                self._line.add(text)
                if tag != b"P":
                    whole = self._line.take() + b"\n"
                    yield LogLine.of(self._replica, self.attempt, timestamp.decode(), whole)

    def close(self) -> None:
        if self._file:
            self._file.close()


def _timestamp() -> str:
    now = time.time_ns()
    whole = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(now // 10**9))
    return f"{whole}.{now % 10**9:09d}Z"

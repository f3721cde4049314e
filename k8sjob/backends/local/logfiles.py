"""A replica's output in files: some per start of its container, in the form that a kubelet writes.

A line is `TIMESTAMP stdout F TEXT`; P instead of F marks a part of a line that is not whole, and
`k8sjob` instead of `stdout` a note on output that is missing. What the job wrote stays as it was,
byte for byte, except lines of code in the copy of the user's folder: these are named as in that
folder. Whoever shows it strips control sequences. Of each start the newest LOG_FILES files are
kept, 0.log, 0.1.log and so on, as a kubelet does with its defaults.
"""

from __future__ import annotations

import os
import re
import time
from contextlib import closing, suppress
from io import FileIO
from typing import TYPE_CHECKING, BinaryIO, Final

from k8sjob.backends.api import LogLine
from k8sjob.backends.local.state_folder import paths_in
from k8sjob.contract import counted
from k8sjob.kube.client.transport import PartialLine

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

_TAIL: Final = 1 << 16
"""Bytes of the output in which its last lines are looked for."""
_FIRST_LOOK: Final = 1 << 16
"""Bytes at the end of a file that hold some hundred lines of most jobs."""
_ROW: Final = re.compile(rb"([\w:.+-]+) (stdout|k8sjob) ([FP]) (.*)", re.DOTALL)
_NAME: Final = re.compile(r"([0-9]{1,9})(?:\.([0-9]{1,9}))?\.log")
LOG_BYTES: Final = 10 << 20
LOG_FILES: Final = 5
_ROTATED: Final = (
    f"earlier output is missing here: of each start the last {LOG_FILES * LOG_BYTES >> 20} MiB are"
    " kept"
)
LONGEST_LINE: Final = 16 * 1024
"""A longer line is written in parts, as container runtimes do it."""


class LogWriter:
    """Takes the output of one start of a container and writes it down, line by line.

    The code runs in `copy`, a copy of the user's folder `source`; both are empty if it runs in that
    folder itself. What a full or broken disk does not take is left out, and noted in its place as
    soon as that can be written.

    Attributes:
        missing: what is left out and not noted yet, in words; empty: nothing.
    """

    def __init__(self, path: Path, copy: str = "", source: str = "") -> None:
        self._path, self._number, self._size = path, 0, 0
        self._file: FileIO | None = None
        self._rest, self._tail = b"", bytearray()
        self._in_line = False
        self._source = os.fsencode(source)
        self._copies = {os.fsencode(path) for path in (copy, os.path.realpath(copy)) if copy}
        # A path that names a line of code. It may hold the folder many times, and is read once.
        # The runtime has its own rewriting (base/frames.py): the two share no module, and what it
        # writes into reasons does not come through here.
        copies = b"|".join(map(re.escape, self._copies))
        self._code = re.compile(b"(?:%s)" % copies + rb'(/[^\s":]*+)((?:", line |:)\d)?')
        self._lost_lines = self._lost_bytes = 0
        self.missing = ""
        self._write(b"")  # so that the start has a file, even if it writes nothing

    def feed(self, data: bytes) -> None:
        """Some output; whole lines are written at once, the rest waits for its newline."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        head = _timestamp().encode() + b" stdout "
        written = bytearray()
        for output in lines:
            line = output
            if any(copy in line for copy in self._copies):
                line = self._code.sub(self._with_own_path, line)
            for start in range(0, max(len(line), 1), LONGEST_LINE):
                part = line[start : start + LONGEST_LINE]
                whole = start + LONGEST_LINE >= len(line)
                written += head + (b"F " if whole else b"P ") + part + b"\n"
            self._tail += line + b"\n"
        # A long line whose last part was just written has no newline yet.
        self._in_line = bool(self._rest) or (self._in_line and not lines)
        # A line without an end must not grow in memory.
        while len(self._rest) >= LONGEST_LINE:
            written += head + b"P " + self._rest[:LONGEST_LINE] + b"\n"
            self._tail += self._rest[:LONGEST_LINE]
            self._rest = self._rest[LONGEST_LINE:]
        if written:
            del self._tail[:-_TAIL]
            self._write(bytes(written), len(lines), len(data))

    def tail(self, *, lines: int, size: int, without: str) -> str:
        """The end of the output, at most `lines` lines and `size` bytes of text.

        Lines that begin with `without` are left out, unless it is empty.
        """
        texts = self._tail.decode(errors="replace").removesuffix("\n").split("\n")
        texts = [text for text in texts if not (without and text.startswith(without))]
        return "\n".join(texts[-lines:]).encode()[-size:].decode(errors="ignore")

    def close(self) -> None:
        """The container has ended: what waits is the last line."""
        if self._in_line:
            self.feed(b"\n")
        if self.missing:
            self._write(b"")
        if self._file:
            self._file.close()

    def _with_own_path(self, path: re.Match[bytes]) -> bytes:
        return self._source + path[1] + path[2] if path[2] else path[0]

    def _write(self, rows: bytes, lines: int = 0, size: int = 0) -> None:
        """Append whole rows, of so many lines and bytes of output, or none of them."""
        try:
            if self._file is None or self._size >= LOG_BYTES:
                self._open_next()
            if self.missing:
                rows = f"{_timestamp()} k8sjob F {self.missing}\n".encode() + rows
            done = 0
            while self._file and done < len(rows):  # a disk that becomes full takes a part
                done += self._file.write(rows[done:])
        except OSError as error:
            if self._file:
                with suppress(OSError):
                    # A part of a row would make the next row unreadable.
                    self._file.truncate(self._size)
            self._lost_lines += lines
            self._lost_bytes += size
            self.missing = (
                f"output is missing here: {counted(self._lost_lines, 'line')},"
                f" {self._lost_bytes:,} bytes ({error.strerror})"
            )
            return
        self._size += len(rows)
        self.missing, self._lost_lines, self._lost_bytes = "", 0, 0

    def _open_next(self) -> None:
        """The first file, or the next one; the oldest goes."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        number = self._number + bool(self._file)
        # Before the old one is closed: on a full disk that one continues.
        file = FileIO(_file_of(self._path, number), "ab")
        if self._file:
            self._file.close()
        self._file, self._number, self._size = file, number, os.fstat(file.fileno()).st_size
        if number >= LOG_FILES:
            _file_of(self._path, number - LOG_FILES).unlink(missing_ok=True)


def _file_of(path: Path, number: int) -> Path:
    """A file of a start, by that of its beginning."""
    return path.with_suffix(f".{number}.log") if number else path


def _files(folder: Path) -> dict[int, list[int]]:
    """The numbers of the files of each start, the oldest first."""
    numbers: dict[int, list[int]] = {}
    names = (_NAME.fullmatch(path.name) for path in paths_in(folder, "*.log"))
    for name in filter(None, names):
        numbers.setdefault(int(name[1]), []).append(int(name[2] or 0))
    return {attempt: sorted(numbers[attempt]) for attempt in sorted(numbers)}


def attempts(folder: Path) -> list[int]:
    """The starts that have output, the oldest first."""
    return list(_files(folder))


def read(folder: Path, replica: str, attempt: int) -> Iterator[LogLine]:
    """All whole lines of one start; nothing if there is no file."""
    with closing(_Reader(folder, replica, attempt)) as reader:
        yield from reader.lines()


def read_last(folder: Path, replica: str, count: int) -> list[LogLine]:
    """The last lines over all starts, `count` at least where there are so many.

    Of a long file only the end is read.
    """
    lines: list[LogLine] = []
    for attempt in reversed(attempts(folder)):
        lines = [*_end_of(folder, replica, attempt, count - len(lines)), *lines]
        if len(lines) >= count:
            break
    return lines


def _end_of(folder: Path, replica: str, attempt: int, count: int) -> list[LogLine]:
    lines, last = list[LogLine](), _FIRST_LOOK
    for number in reversed(_files(folder).get(attempt, ())):
        while True:
            with closing(_Reader(folder, replica, attempt, number=number, last=last)) as reader:
                lines, size = list(reader.lines()), reader.size
            if len(lines) > count:
                return lines[1:]  # the first one may be cut
            # The whole file was read, and an older one may have more.
            if last >= size:
                break
            last *= 4
    return lines


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
            # In this order: what is written before the end is read after it.
            over, every = ended(), attempts(folder)
            yield from reader.lines()
            if newer := [attempt for attempt in every if attempt > reader.attempt]:
                reader.close()
                reader = _Reader(folder, replica, newer[0])
            elif over:
                return
            else:
                time.sleep(0.05)
    finally:
        reader.close()


class _Reader:
    """Reads the files of a start from where it stopped the last time; whole lines only.

    With `number` it begins at that file, at its `last` bytes. Rows that no LogWriter wrote, as
    after a loss of power, are left out.
    """

    def __init__(
        self, folder: Path, replica: str, attempt: int, *, number: int = -1, last: int = 0
    ) -> None:
        self.attempt, self.size, self._last = attempt, 0, last
        self._folder, self._replica, self._number = folder, replica, number
        self._file: BinaryIO | None = None
        self._cut = b""
        self._gap = False
        self._line = PartialLine()

    def lines(self) -> Iterator[LogLine]:
        while True:
            # Before the last read: what is written into the file is written before there is a next.
            newer = [n for n in _files(self._folder).get(self.attempt, ()) if n > self._number]
            if self._file is None and self._number >= 0:
                with suppress(OSError):
                    first = self._folder / f"{self.attempt}.log"
                    self._file = _file_of(first, self._number).open("rb")
                    size = os.fstat(self._file.fileno()).st_size
                    self.size = self.size or size  # of the first file
                    self._file.seek(max(size - self._last, 0) if self._last else 0)
            yield from self._rows()
            if not newer:
                return
            # A file that was removed before it was read leaves a gap in the numbers.
            self._gap = self._gap or newer[0] > self._number + 1
            self.close()
            self._file, self._cut, self._number, self._last = None, b"", newer[0], 0

    def _rows(self) -> Iterator[LogLine]:
        while data := self._file.read(1 << 16) if self._file else b"":
            *rows, self._cut = (self._cut + data).split(b"\n")
            for row in filter(None, map(_ROW.fullmatch, rows)):
                timestamp, stream, tag, text = row[1].decode(), row[2], row[3], row[4]
                note = text.decode() if stream == b"k8sjob" else _ROTATED if self._gap else ""
                self._gap = False
                if note:
                    yield LogLine(self._replica, self.attempt, timestamp, note, gap=True)
                if stream == b"stdout":
                    self._line.add(text)
                    if tag != b"P":
                        whole = self._line.take() + b"\n"
                        yield LogLine.of(self._replica, self.attempt, timestamp, whole)

    def close(self) -> None:
        if self._file:
            self._file.close()


def _timestamp() -> str:
    now = time.time_ns()
    whole = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(now // 10**9))
    return f"{whole}.{now % 10**9:09d}Z"

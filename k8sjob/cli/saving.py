"""Output of replicas in files, one a replica and attempt.

A node forgets, so a file may be all that is left of an attempt. Nothing takes its place but what
begins with all of it, and what was taken is kept however the reading ends.
"""

from __future__ import annotations

import re
from collections import defaultdict
from itertools import chain, count
from typing import TYPE_CHECKING, Final, Self

from k8sjob.cli.failure import say

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from k8sjob.backends.api import LogLine

__all__ = ["Saver"]

_CHUNK: Final = 1 << 20


class Saver:
    """Writes lines of output into files of a folder, inside a `with`.

    Lines are written as the job wrote them, byte for byte. A file that is there
    grows by what was written since; one with other lines (of an earlier pod, of a job of the same
    name) stays, and "-2" is added to the new one's name. As long as more may come ".part" is at its
    end, and so it stays where the process is killed. What is missing before the first line of a
    file is told at once, and is not in it.

    Args:
        folder: made where it is not there.
        job: begins the names of the files.
        times: the time in front of each line.

    Attributes:
        saved: the files that have the lines.
    """

    def __init__(self, folder: Path, job: str, *, times: bool = False) -> None:
        self._folder, self._job, self._times = folder, job, times
        self._parts: dict[str, dict[int, Path]] = defaultdict(dict)
        self.saved: list[Path] = []

    def __enter__(self) -> Self:
        self._folder.mkdir(parents=True, exist_ok=True)
        return self

    def __exit__(self, *_: object) -> None:
        for replica, parts in self._parts.items():
            for attempt in sorted(parts):
                self._complete(replica, attempt)

    def show(self, lines: Sequence[LogLine]) -> None:
        """Take some lines; an attempt is complete when a line of the next one comes."""
        texts: dict[tuple[str, int], list[bytes]] = defaultdict(list)
        for line in lines:
            key = line.replica, line.attempt
            if line.gap and key not in texts and line.attempt not in self._parts[line.replica]:
                say(line.text)
                continue
            time = f"{line.timestamp} ".encode() if self._times else b""
            texts[key].append(time + line.written)
        for (replica, attempt), found in texts.items():
            parts = self._parts[replica]
            if attempt not in parts:
                parts[attempt] = self._begin(replica, attempt)
            with parts[attempt].open("ab") as file:
                file.writelines(found)
            for earlier in [number for number in parts if number < attempt]:
                self._complete(replica, earlier)

    def _begin(self, replica: str, attempt: int) -> Path:
        """A new file: one that is there may be another process's, or of one that was killed."""
        for path in self._names(replica, attempt):
            part = path.with_name(path.name + ".part")
            try:
                part.touch(exist_ok=False)
            except FileExistsError:
                continue
            return part
        raise AssertionError("there is always another name")

    def _complete(self, replica: str, attempt: int) -> None:
        part = self._parts[replica].pop(attempt)
        path = next(one for one in self._names(replica, attempt) if _may_become(one, part))
        if path.exists() and path.stat().st_size >= part.stat().st_size:
            part.unlink()
        else:
            part.replace(path)
        self.saved.append(path)

    def _names(self, replica: str, attempt: int) -> Iterator[Path]:
        """Where it may go, the best place first.

        The names are made of what a cluster said, so they must not lead anywhere else.
        """
        name = re.sub(r"[^A-Za-z0-9-]", "_", f"{self._job}-{replica}")
        for more in chain([""], (f"-{number}" for number in count(2))):
            yield self._folder / f"{name}.{attempt}{more}.log"


def _may_become(path: Path, part: Path) -> bool:
    """Whether nothing is lost where `part` takes this place."""
    if path.is_symlink() or (path.exists() and not path.is_file()):
        return False
    return not path.exists() or _begin_alike(path, part)


def _begin_alike(one: Path, other: Path) -> bool:
    """Whether the shorter of two files is the beginning of the longer one."""
    with one.open("rb") as left, other.open("rb") as right:
        while True:
            a, b = left.read(_CHUNK), right.read(_CHUNK)
            shared = min(len(a), len(b))
            if a[:shared] != b[:shared]:
                return False
            if shared < _CHUNK:
                return True

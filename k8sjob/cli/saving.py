"""Output of replicas in files: one a replica and attempt, each whole or not there at all.

A node forgets, so a file may be all that is left of an attempt. Nothing takes its place but what
begins with all of it.
"""

from __future__ import annotations

import re
import shutil
import tempfile
from collections import defaultdict
from itertools import chain, count
from pathlib import Path
from typing import TYPE_CHECKING, Final, Self

if TYPE_CHECKING:
    from collections.abc import Sequence

    from k8sjob.backends.api import LogLine

__all__ = ["Saver"]

_CHUNK: Final = 1 << 20


class Saver:
    """Writes lines of output into files of a folder, which appear when they are complete.

    Lines are written as the job wrote them: control sequences are left in. A file that is there
    grows by what was written since; one with other lines (of an earlier pod, of a job of the same
    name) stays, and "-2" is added to the new one's name.

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
        self._draft = Path(tempfile.mkdtemp(prefix=".k8sjob-", dir=self._folder))
        return self

    def __exit__(self, *_: object) -> None:
        shutil.rmtree(self._draft, ignore_errors=True)

    def show(self, lines: Sequence[LogLine]) -> None:
        """Take some lines; an attempt is complete when a line of the next one comes."""
        texts: dict[tuple[str, int], list[str]] = defaultdict(list)
        for line in lines:
            text = f"{line.timestamp} {line.text}" if self._times else line.text
            texts[line.replica, line.attempt].append(text + "\n")
        for (replica, attempt), found in texts.items():
            parts = self._parts[replica]
            part = parts.setdefault(attempt, self._draft / self._name(replica, attempt))
            with part.open("a", encoding="utf-8", newline="") as file:
                file.writelines(found)
            for earlier in [number for number in parts if number < attempt]:
                self._complete(parts.pop(earlier))

    def finish(self) -> None:
        """All lines were taken: what is there is whole."""
        for parts in self._parts.values():
            for part in parts.values():
                self._complete(part)
        self._parts.clear()

    def _complete(self, part: Path) -> None:
        names = chain([part.name], (f"{part.stem}-{number}.log" for number in count(2)))
        path = next(one for name in names if _may_become(one := self._folder / name, part))
        if not path.exists() or path.stat().st_size < part.stat().st_size:
            part.replace(path)
        self.saved.append(path)

    def _name(self, replica: str, attempt: int) -> str:
        """The name is made of what a cluster said, so it must not lead anywhere else."""
        return re.sub(r"[^A-Za-z0-9-]", "_", f"{self._job}-{replica}") + f".{attempt}.log"


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

"""Output of replicas in files: one a replica and attempt, each whole or not there at all."""

from __future__ import annotations

import re
import shutil
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from collections.abc import Sequence

    from k8sjob.backends.api import LogLine

__all__ = ["Saver"]


class Saver:
    """Writes lines of output into files of a folder, which appear when they are complete.

    Lines are written as the job wrote them: control sequences are left in.

    Args:
        folder: made where it is not there.
        job: begins the names of the files.
        times: the time in front of each line.
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
        self.saved.append(part.replace(self._folder / part.name))

    def _name(self, replica: str, attempt: int) -> str:
        """The name is made of what a cluster said, so it must not lead anywhere else."""
        return re.sub(r"[^A-Za-z0-9-]", "_", f"{self._job}-{replica}") + f".{attempt}.log"

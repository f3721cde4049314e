"""The files that a job's replicas wrote into folders of the job, which are deleted with it."""

from __future__ import annotations

import os
import shutil
import stat
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Final

from k8sjob.backends.local.state_folder import files_in
from k8sjob.sanitize import safe_line

if TYPE_CHECKING:
    from collections.abc import Sequence

    from k8sjob.backends.local.state_folder import JobFolder

_FOLDERS: Final = ("replicas/*/work", "replicas/*/volumes", "volumes")
_MOST_SHOWN: Final = 10


def written_files(folder: JobFolder) -> list[Path]:
    """New and changed files in the working folders and in the job's own volumes."""
    if not folder.launch.exists():
        return []
    # launch.json is written after the copies are made.
    copied = folder.launch.stat().st_mtime_ns
    files = files_in(chain.from_iterable(map(folder.path.glob, _FOLDERS)))
    # A FIFO or a socket has no content.
    kinds = {stat.S_IFREG, stat.S_IFLNK}
    return sorted(
        path
        for state, path in files
        # The change time, which a copy or an archive with old dates does not set.
        if state.st_ctime_ns > copied and stat.S_IFMT(state.st_mode) in kinds
    )


def listed(paths: Sequence[Path]) -> str:
    """Paths for a reader, a line each; of many the first ones."""
    lines = [safe_line(str(path)) for path in paths[:_MOST_SHOWN]]
    more = len(paths) - len(lines)
    return "\n".join([*lines, f"... and {more} more"] if more else lines)


def copy_written(folder: JobFolder, target: Path) -> tuple[int, list[Path]]:
    """Copy what the replicas wrote; how many files, and those that exist in `target` and stay.

    A file of a replica is in a subfolder of the replica's name, unless one replica wrote them all.
    """
    names = {}
    for path in written_files(folder):
        place, *below = path.relative_to(folder.path).parts
        if place == "replicas" and below[1] == "work":
            del below[1]
        names[path] = Path(*below) if place == "replicas" else Path("job", place, *below)
    single = len({name.parts[0] for name in names.values()}) == 1
    existing: list[Path] = []
    for path, name in names.items():
        copy = target.joinpath(*name.parts[single:])
        if os.path.lexists(copy) or any(parent.is_file() for parent in copy.parents):
            existing.append(copy)
            continue
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(path, copy, follow_symlinks=False)
    return len(names) - len(existing), existing

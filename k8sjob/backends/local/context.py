"""The working folder of a replica: a copy of the build context, as the image would hold it."""

from __future__ import annotations

import shutil
from collections import Counter
from typing import TYPE_CHECKING, Final

from k8sjob.errors import BackendError
from k8sjob.rendering import dockerignore
from k8sjob.rendering.dockerignore import Ignore, own_patterns

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

__all__ = ["copy_context"]

_NEVER: Final = "**/.git\n**/.venv\n**/__pycache__\n"
"""Left out even where a .dockerignore takes it in."""
_LARGE: Final = 200 * 1024**2
"""Bytes of one copy above which the user is told what makes it so large."""
_SPARE: Final = 512 * 1024**2
"""Bytes of disk that a copy must leave free."""


def copy_context(source: Path, targets: Sequence[Path], *, beside: Path) -> str:
    """Copy a context into the working folder of each replica, without what its .dockerignore names.

    Args:
        source: the context.
        targets: the working folders, which are made.
        beside: the state folder, which is left out should it lie inside the context.

    Returns:
        What is worth a warning; empty if nothing is.

    Raises:
        BackendError: the context is no folder, or the copies do not fit on the disk.
        ImageError: its .dockerignore cannot be read.
    """
    if not source.is_dir():
        raise BackendError(f"image.context: {source} is not a folder; name the one with your code")
    own = own_patterns(source / ".dockerignore")
    patterns = dockerignore() if own is None else own
    names = [
        name
        for name in Ignore(f"{patterns}\n{_NEVER}").walk(source)
        if not (source / name).is_relative_to(beside)
    ]
    sizes = Counter({name: (source / name).lstat().st_size for name in names})
    advice = _check_size(source, sizes, len(targets), shutil.disk_usage(beside).free)
    for target in targets:
        target.mkdir(parents=True)
        for name in names:
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source / name, target / name, follow_symlinks=False)
    return advice


def _check_size(source: Path, sizes: Counter[str], copies: int, free: int) -> str:
    total = sizes.total()
    if total < _LARGE:
        return ""
    tops: Counter[str] = Counter()
    for name, size in sizes.items():
        tops[name.partition("/")[0]] += size
    largest = ", ".join(f"{name} {_mebibytes(size)}" for name, size in tops.most_common(3))
    seen = (
        f"the context {source} has {_mebibytes(total)} ({largest}), and each of {copies} replicas"
        " gets a copy; name what the code does not need in .dockerignore, or mount it as a volume"
    )
    if total * copies > free - _SPARE:
        raise BackendError(f"{seen}; only {_mebibytes(free)} are free")
    return seen


def _mebibytes(size: int) -> str:
    return f"{size / 1024**2:,.0f} MiB"

"""The git checkout that the code of a job comes from."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path


def commit_of(folder: Path) -> str:
    """The commit that a folder was checked out from, with `-dirty` if tracked files have changed.

    Empty without git, or without a commit.
    """
    import subprocess  # noqa: PLC0415 - few need the commit

    # A setting of the repository could name a program that git asks for changes.
    options = ["--no-optional-locks", "-c", "core.fsmonitor=false", "-C", str(folder)]
    argv = ["git", *options, "describe", "--always", "--exclude=*", "--abbrev=40", "--dirty"]
    with suppress(OSError, subprocess.SubprocessError):
        git = subprocess.run(
            argv, stdin=subprocess.DEVNULL, capture_output=True, timeout=5, check=True
        )
        return git.stdout.decode(errors="replace").strip()
    return ""

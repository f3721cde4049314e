"""Temporary files and folders; the next process removes what a killed one has left.

Whoever makes one holds a lock until it is gone, and the kernel frees the locks of a dead process.
Over NFS a lock may hold on one machine alone, so the names of its files have that of the machine.
"""

from __future__ import annotations

import fcntl
import os
import stat
import zlib
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterator

DRAFT: Final = ".k8sjob-"
"""How the names of incomplete files and folders begin."""
_PREFIX: Final = "k8sjob-"
_LOCK: Final = ".lock"
"""A file in each temporary folder."""
_HOST: Final = f"{zlib.crc32(os.uname().nodename.encode()):08x}"


@contextmanager
def temporary_folder(purpose: str, parent: str | None = None) -> Iterator[Path]:
    """A new folder for this user alone, removed at the end.

    Args:
        purpose: part of its name, for a person who looks for what fills the disk.
        parent: the folder that it is made in; None: that of the module tempfile.

    Raises:
        OSError: it cannot be made.
    """
    import shutil  # noqa: PLC0415 - drafts need neither
    import tempfile  # noqa: PLC0415

    place = Path(parent or tempfile.gettempdir())
    # Not held while they are removed: NFS would keep the lock under another name.
    for lock in list(_abandoned(place, f"{_PREFIX}*-{_HOST}-*/{_LOCK}")):
        shutil.rmtree(lock.parent, ignore_errors=True)
    prefix = f"{_PREFIX}{purpose}-{_HOST}-"
    with tempfile.TemporaryDirectory("", prefix, place, ignore_cleanup_errors=True) as name:
        new = Path(name, "new")
        with os.fdopen(_create_locked(new)):
            new.rename(new.with_name(_LOCK))  # by this name others try it
            yield Path(name)


def create_draft(path: Path, mode: int) -> tuple[Path, int]:
    """A new file beside a path, which may be renamed to it, and its descriptor.

    It is this process's until the descriptor is closed. Drafts that nobody holds are removed.

    Raises:
        OSError: it cannot be made.
    """
    for draft in _abandoned(path.parent, f"{DRAFT}{_HOST}-*"):
        draft.unlink(missing_ok=True)
    draft = path.with_name(f"{DRAFT}{_HOST}-{os.urandom(6).hex()}")
    return draft, _create_locked(draft, mode)


def _create_locked(path: Path, mode: int = 0o600) -> int:
    """A new file that this process holds while the descriptor is open."""
    while True:
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
        with suppress(OSError):  # a file system without locks: nobody takes it for abandoned either
            fcntl.flock(file, fcntl.LOCK_EX)
        if os.fstat(file).st_nlink:
            return file
        os.close(file)  # another process took it for abandoned before it was locked


def _abandoned(folder: Path, pattern: str) -> Iterator[Path]:
    """The files of this user that nobody holds, each held here until the next."""
    for path in folder.glob(pattern):
        with suppress(OSError):  # it is held, or somebody else's, or gone
            file = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
            try:
                state = os.fstat(file)
                if stat.S_ISREG(state.st_mode) and state.st_uid == os.getuid():
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    if os.path.samestat(path.lstat(), state):
                        yield path
            finally:
                os.close(file)

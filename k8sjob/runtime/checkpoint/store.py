"""Storage of checkpoints: a folder of which the newest whole one counts.

One is a file that rank 0 wrote, or a folder in which each rank wrote its part. It appears under its
name only when all of it is on the disk, so a crash, a full disk or a killed pod leaves the older
ones as they were. Only tensors and plain values are stored, never code.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import shutil
from collections import Counter, OrderedDict
from contextlib import contextmanager, suppress
from typing import IO, TYPE_CHECKING, Any, Final, NamedTuple

import torch

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping
    from io import BufferedReader
    from pathlib import Path

FROM_SCRATCH: Final = (
    "start from scratch (`k8sjob run --fresh` on this machine; in a cluster,"
    " an empty checkpoint.dir)"
)
"""How to ignore the checkpoints that are there."""
DIGESTS: Final = "digests.json"
_PLAIN: Final = type(None), bool, int, float, str, bytes, torch.Size, torch.dtype, torch.device


class Checkpoints:
    """The checkpoints of one job, in one folder; for one process at a time, which is rank 0.

    Attributes:
        folder: where they are; made when it is first needed.
        keep: how many stay; the oldest go first.
    """

    def __init__(self, folder: Path, keep: int = 3) -> None:
        self.folder, self.keep = folder, max(keep, 1)

    def draft(self, step: int, *, folder: bool) -> Path:
        """Begin a checkpoint of this step: an empty file or folder that does not count yet."""
        # Two pods may have the same pid, and for a moment both be rank 0.
        path = self.folder / f".step-{step:08d}.{os.getpid()}.{os.urandom(4).hex()}.tmp"
        self.folder.mkdir(parents=True, exist_ok=True)
        if folder:
            path.mkdir()
        else:
            path.touch()
        return path

    def publish(self, draft: Path, step: int) -> Path:
        """Make a draft, which is all on the disk, a checkpoint; then remove the oldest."""
        target = self.folder / f"step-{step:08d}"
        old = target.with_suffix(".old")
        if not draft.is_dir():
            target = target.with_suffix(".pt")
        elif os.path.lexists(target):
            # A folder cannot replace another one at once; meanwhile that one counts still.
            self._move_away(old)
            target.replace(old)
        # First the content, then the name: after a power cut there must be no name without a
        # content. The files in a folder were synced as they were written.
        _sync(draft)
        draft.replace(target)
        _sync(self.folder)
        self._move_away(old)
        # Checkpoints of later steps are torn, or this run would have begun with them. They must not
        # push out the whole ones.
        older = [path for path in self.newest_first() if step_of(path) <= step]
        for path in older[self.keep :]:
            self._move_away(path)
        return target

    def refusal(self) -> str | None:
        """Why nothing can ever be saved here; None if it can, or could with room on the disk.

        Called before there is work that would be lost; makes the folder.
        """
        try:
            remove(self.draft(0, folder=False))
        except OSError as error:
            # A disk that is full now may have room by the first save; a save that fails ends no
            # training.
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                return None
            return (
                f"checkpoint.dir {self.folder} cannot be written by user {os.getuid()} "
                f"({error.strerror}): make it writable for that user (fsGroup does this for claims,"
                " not for a host_path), or choose another folder"
            )
        return None

    def newest_first(self) -> list[Path]:
        """All checkpoints by their names, whole or not; of one step, its .old last."""
        if not self.folder.is_dir():
            return []
        named = [path for path in self.folder.iterdir() if step_of(path) >= 0]
        return sorted(named, key=lambda path: (step_of(path), path.suffix != ".old"), reverse=True)

    def remove_partial(self) -> None:
        """Remove what a killed process left half written. Call it before the first save."""
        for draft in self.folder.glob(".step-*.tmp"):
            remove(draft)

    def _move_away(self, path: Path) -> None:
        """Remove a checkpoint; a folder is renamed first, so that no partial one is seen."""
        # What cannot be removed takes up room, and that is all.
        with suppress(OSError):
            if path.is_dir():
                path = path.replace(path.with_name(f".{path.name}.{os.getpid()}.old.tmp"))
            remove(path)


def step_of(path: Path) -> int:
    """The step in a checkpoint's name; -1 for another file."""
    match = re.fullmatch(r"step-(\d+)(\.pt|\.old)?", path.name)
    return int(match[1]) if match else -1


def content_of(file: Path) -> bytes:
    """The content of a file of a checkpoint; for errors see opened()."""
    with opened(file) as stream:
        return stream.read()


def opened(file: Path) -> BufferedReader:
    """A file of a checkpoint, to read; ValueError if it is missing."""
    try:
        return file.open("rb")
    except FileNotFoundError:
        raise ValueError(f"it is incomplete or damaged: {file.name} is missing") from None


def write(path: Path, state: Any) -> None:
    """Write tensors and plain values into one file, which may not be on the disk yet."""
    with as_oserror(path), path.open("wb") as file:
        torch.save(state, file)


@contextmanager
def as_oserror(path: Path) -> Iterator[None]:
    """Raise the file system's error instead of the one that torch's archive writer makes of it."""
    try:
        yield
    except RuntimeError as error:
        # torch's archive writer raises its RuntimeError while it handles the stream's OSError.
        cause = error.__context__ if isinstance(error.__context__, OSError) else error
        raise OSError(f"{path}: {str(cause).splitlines()[0]}") from error


@contextmanager
def lasting(file: Path) -> Iterator[IO[bytes]]:
    """A file to write, which is synced to the disk afterwards."""
    with as_oserror(file), file.open("wb") as stream:
        yield stream
        stream.flush()
        os.fsync(stream.fileno())


def remove(path: Path) -> None:
    """Remove a file, a link or a folder with its content, if it exists."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def _sync(path: Path) -> None:
    """Make a file's content, or a rename in a folder, survive a power cut."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # some mounts have none of folders
            raise
    finally:
        os.close(handle)


def check_state(value: Any, where: str = "state") -> None:
    """Refuse at once what weights_only would refuse when the checkpoint is loaded."""
    if isinstance(value, dict):
        # By the exact type, here and below: weights_only loads no subclass, not even of int or str.
        if type(value) not in (dict, Counter, OrderedDict):
            raise TypeError(f"{where} is a {type(value).__name__}; make it a dict")
        for key, item in value.items():
            check_state(key, f"the key {key!r:.99} of {where}")
            check_state(item, f"{where}[{key!r}]")
    elif type(value) in (list, tuple):
        for index, item in enumerate(value):
            check_state(item, f"{where}[{index}]")
    # Torch writes bytes as a text that it encodes, except for none: those it would not load.
    elif not isinstance(value, torch.Tensor) and (type(value) not in _PLAIN or value == b""):
        raise TypeError(
            f"{where} is a {type(value).__module__}.{type(value).__qualname__}, which cannot be "
            "loaded again without running code; make it a tensor, a number, a string, or a list "
            "or dict of them"
        )


# --- digests of the files of a folder ------------------------------------------------------------
# They show what disks and copies damage; anyone who can change a file can change its digest, too.


class Digest(NamedTuple):
    """The size of a file in bytes, and its SHA-256 in hexadecimal."""

    size: int
    sha256: str


def measure(file: Path) -> Digest:
    """The digest of a file now; the interpreter's lock is released meanwhile."""
    with opened(file) as stream:
        digest = hashlib.file_digest(stream, "sha256")
        return Digest(stream.tell(), digest.hexdigest())


def write_digests(folder: Path, digests: Mapping[str, Digest]) -> None:
    """Write the digests of a folder's files into it, and wait until they are on the disk."""
    body = {"files": {name: digest._asdict() for name, digest in sorted(digests.items())}}
    with lasting(folder / DIGESTS) as stream:
        stream.write(json.dumps(body, indent=1).encode())


def read_digests(folder: Path) -> dict[str, Digest]:
    """The digests by file name, as write_digests() wrote them.

    Raises:
        ValueError: the list is missing or torn, or names a file elsewhere.
        OSError: it cannot be read.
    """
    content = content_of(folder / DIGESTS)
    try:
        digests = {
            str(name): Digest(int(digest["size"]), str(digest["sha256"]))
            for name, digest in json.loads(content)["files"].items()
        }
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise ValueError(
            f"it is incomplete or damaged: {DIGESTS} is not a list of digests"
        ) from None
    for name in digests:
        if "/" in name or name in {"", ".", ".."}:
            raise ValueError(f"{DIGESTS} names {name!r:.300}, which is not a file of the folder")
    return digests


def check_digests(folder: Path, digests: Mapping[str, Digest], names: Iterable[str]) -> None:
    """Compare the named files of a folder with their digests.

    Raises:
        ValueError: the first file that is missing, too short or changed, and how.
        OSError: one cannot be read.
    """
    for name in names:
        digest = measure(folder / name)
        if digest.size != digests[name].size:
            raise ValueError(
                f"it is incomplete or damaged: {name} has {digest.size} bytes, not"
                f" {digests[name].size}"
            )
        if digest != digests[name]:
            raise ValueError(f"it is incomplete or damaged: {name} does not match its digest")

"""A folder of checkpoints of which the newest whole one counts.

A file appears under its name only when all of it is on the disk, so a crash, a full disk or a
killed pod leaves the older ones as they were. What is loaded may come from elsewhere: tensors and
plain values alone are accepted, never code.
"""

from __future__ import annotations

import errno
import io
import os
import re
import zipfile
from collections import Counter
from typing import TYPE_CHECKING, Any, Final

import torch

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

__all__ = ["Checkpoints", "decode"]

_NAME: Final = re.compile(r"step-(\d+)\.pt")
_PLAIN: Final = (type(None), bool, int, float, str, bytes, torch.Tensor, torch.Size, torch.dtype)


class Checkpoints:
    """The checkpoints of one job, in one folder; for one process at a time, which is rank 0.

    Attributes:
        folder: where they are; made when it is first needed.
        keep: how many stay; the oldest go first.
    """

    def __init__(self, folder: Path, keep: int = 3) -> None:
        self.folder, self.keep = folder, max(keep, 1)

    def save(self, step: int, state: dict[str, Any]) -> Path:
        """Write a checkpoint whole or not at all, then remove what is older than the last `keep`.

        Args:
            step: optimizer steps done; the file's name, and what "newest" goes by.
            state: nested dicts, lists and tuples of tensors and plain values.

        Returns:
            The file.

        Raises:
            TypeError: the state holds something that could not be loaded again safely.
            OSError: it could not be written (a full disk, no permission); the older ones are as
                they were.
        """
        _check(state, "state")
        target = self.folder / f"step-{step:08d}.pt"
        draft = self.folder / f".step-{step:08d}.{os.getpid()}.tmp"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            _write(draft, state)
            draft.replace(target)
            _sync(self.folder)
        except OSError:
            draft.unlink(missing_ok=True)
            raise
        self._prune(step)
        return target

    def refusal(self) -> str | None:
        """Why nothing can ever be saved here; None where it can, or when the disk has room again.

        To be asked before there is work that would be lost; makes the folder.
        """
        probe = self.folder / f".step-probe.{os.getpid()}.tmp"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            probe.touch()
            probe.unlink()
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                return None
            return (
                f"checkpoint.dir {self.folder} cannot be written by user {os.getuid()} "
                f"({error.strerror}): let that user write there (claims are made writable by "
                "fsGroup, a host_path is not), or choose another folder"
            )
        return None

    def newest(self, warn: Callable[[str], None]) -> tuple[Path, bytes] | None:
        """The newest checkpoint that is whole, as (file, content); None where there is none.

        Args:
            warn: told of each one that is passed over, and why.
        """
        for _, path in reversed(self._files()):
            try:
                content = path.read_bytes()
                decode(content)
            except (OSError, ValueError) as error:
                warn(f"checkpoint {path} is passed over: {error}")
                continue
            return path, content
        return None

    def tidy(self) -> None:
        """Remove what a killed process left half written. Call it before the first save."""
        for draft in self.folder.glob(".step-*.tmp"):
            draft.unlink(missing_ok=True)

    def _files(self) -> list[tuple[int, Path]]:
        """(step, file), the oldest first."""
        if not self.folder.is_dir():
            return []
        found = [(_NAME.fullmatch(path.name), path) for path in self.folder.iterdir()]
        return sorted((int(match[1]), path) for match, path in found if match)

    def _prune(self, step: int) -> None:
        # Newer ones than this step were torn, or this run would have begun with them. They must
        # not push out the whole ones.
        done = [path for number, path in self._files() if number <= step]
        for path in done[: -self.keep]:
            path.unlink(missing_ok=True)


def decode(content: bytes) -> dict[str, Any]:
    """The state in a checkpoint's bytes, its tensors on the CPU.

    Raises:
        ValueError: the bytes are torn, or hold anything but tensors and plain values.
    """
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            torn = archive.testzip()
    except zipfile.BadZipFile as error:
        raise ValueError(f"it is torn: {error} ({len(content)} bytes)") from None
    if torn:
        raise ValueError(f"it is torn: {torn} does not match its checksum")
    try:
        state = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    except Exception as error:
        # torch raises whatever it meets: pickle.UnpicklingError, RuntimeError, EOFError, ...
        raise ValueError(f"it cannot be loaded: {str(error).splitlines()[0]}") from error
    if not isinstance(state, dict):
        raise ValueError(f"it holds a {type(state).__name__}, not a dict: another program's file")  # noqa: TRY004 - of a file's content, not of an argument
    return state


def _write(path: Path, state: dict[str, Any]) -> None:
    try:
        with path.open("wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
    except RuntimeError as error:
        # torch's archive writer trips over what the file system said.
        cause = error.__context__ if isinstance(error.__context__, OSError) else error
        raise OSError(f"{path}: {str(cause).splitlines()[0]}") from error


def _sync(folder: Path) -> None:
    """Make a rename in a folder last beyond a power cut."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _check(value: Any, where: str) -> None:
    """Refuse now what weights_only would refuse when it is needed most."""
    if isinstance(value, dict):
        if type(value) not in (dict, Counter) and type(value).__name__ != "OrderedDict":
            raise TypeError(f"{where} is a {type(value).__name__}; make it a dict")
        for key, item in value.items():
            _check(item, f"{where}[{key!r}]")
    elif isinstance(value, list | tuple) and type(value) in (list, tuple):
        for index, item in enumerate(value):
            _check(item, f"{where}[{index}]")
    elif not isinstance(value, _PLAIN) or type(value).__module__ == "numpy":
        raise TypeError(
            f"{where} is a {type(value).__module__}.{type(value).__qualname__}, which cannot be "
            "loaded again without running code; make it a tensor, a number, a string, or a list "
            "or dict of them"
        )

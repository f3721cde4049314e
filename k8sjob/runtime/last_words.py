"""What a rank leaves to the agent of its node: a Reason, written once, whole; and its stacks.

The stacks of a fatal error go to a file of the rank's own, and from there to the log: faulthandler
writes in small pieces, and those of several ranks on one stderr would mix within a line.
"""

from __future__ import annotations

import errno
import faulthandler
import hashlib
import os
import stat
import sys
from contextlib import suppress
from typing import TYPE_CHECKING, Final, TextIO

from k8sjob.contract import Reason

if TYPE_CHECKING:
    from pathlib import Path

__all__ = [
    "by_rank",
    "in_a_line",
    "is_first",
    "keep_stacks",
    "leave_reason",
    "read_reason",
    "read_stacks",
    "seen_file",
]

_MOST_BYTES: Final = 1 << 20


def leave_reason(reason: Reason, file: Path | None) -> None:
    """Write a reason, unless this process has given one already: the first is the cause.

    Args:
        reason: why the process is about to end.
        file: where the agent looks; None: nobody asked.
    """
    if file is None:
        return
    draft = file.with_suffix(f".{os.getpid()}")
    with suppress(OSError):
        draft.write_text(reason.encode())
        # A hard link, unlike a rename, does not replace what is there.
        with suppress(FileExistsError):
            os.link(draft, file)
        draft.unlink()


def read_reason(file: Path | None) -> Reason | None:
    """The reason in a file; None where there is none."""
    try:
        return Reason.decode(_read(file).decode()) if file else None
    except (OSError, ValueError):
        return None


def keep_stacks(file: Path | None) -> None:
    """Have a fatal error of this process write all threads' Python stacks.

    Args:
        file: the same as for the reason; the stacks lie beside it. None, or a folder that takes
            no more files: they go to stderr.
    """
    place: TextIO | int = sys.stderr
    if file:
        with suppress(OSError):
            # Never closed: the fatal error is the process's last moment.
            place = os.open(_stacks(file), os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
    faulthandler.enable(place)


def read_stacks(file: Path | None) -> str:
    """What keep_stacks's process wrote before it ended; empty: it met no fatal error."""
    with suppress(OSError):
        return _read(_stacks(file)).decode(errors="replace") if file else ""
    return ""


def is_first(file: Path | None, text: str) -> bool:
    """Whether no other process of this start has shown the same text; it counts as shown then.

    Args:
        file: the same as for the reason; a folder that takes no more files makes each the first.
        text: what is about to be shown.
    """
    if file is None:
        return True
    name = hashlib.sha256(text.encode(errors="replace")).hexdigest()
    try:
        (file.parent / f"shown-{name}").touch(exist_ok=False)
    except FileExistsError:
        return False
    except OSError:
        return True
    return True


def _read(file: Path) -> bytes:
    """The beginning of a file; OSError where a rank put a FIFO, a device or a symlink there."""
    opened = os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        if not stat.S_ISREG(os.fstat(opened).st_mode):
            raise OSError(errno.EINVAL, "not a regular file", str(file))
        return os.read(opened, _MOST_BYTES)
    finally:
        os.close(opened)


def in_a_line(error: BaseException) -> str:
    """An exception's class and the first line of what it says."""
    text = str(error).splitlines()
    return f"{type(error).__name__}: {text[0]}" if text else type(error).__name__


def by_rank(rank: int, text: str) -> str:
    """A text of several lines for a log that ranks share: each line says whose it is."""
    return "".join(f"[rank {rank}] {line}\n" for line in text.splitlines())


def seen_file(file: Path | None) -> Path | None:
    """Where an observer writes, beside the reason; see k8sjob.runtime.observer."""
    return file.with_suffix(".seen") if file else None


def _stacks(file: Path) -> Path:
    return file.with_suffix(".stacks")

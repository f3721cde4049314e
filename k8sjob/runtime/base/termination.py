"""Termination messages: the Reason and the stacks that a rank leaves, and the container's message.

A rank writes one Reason, once and whole, for the agent of its node. The stacks of a fatal error go
to a file of that rank, and from there to the log: faulthandler writes in small pieces, and those of
several ranks on one stderr would mix within a line.
"""

from __future__ import annotations

import ctypes
import faulthandler
import hashlib
import os
import sys
from contextlib import suppress
from typing import TYPE_CHECKING, TextIO

from k8sjob.contract import Reason

if TYPE_CHECKING:
    from pathlib import Path


def write_reason(reason: Reason, file: Path | None) -> None:
    """Write to config.error_file() why this process ends; its first reason counts."""
    if file is None:
        return
    # The agent may read at any moment, so the file appears whole.
    draft = file.with_suffix(f".{os.getpid()}")
    with suppress(OSError):
        draft.write_text(reason.encode())
        # A hard link, unlike a rename, does not replace what is there.
        with suppress(FileExistsError):
            os.link(draft, file)
        draft.unlink()


def read_reason(file: Path | None) -> Reason | None:
    """The reason in a file; None if there is none."""
    try:
        return Reason.decode(file.read_text()) if file else None
    except (OSError, ValueError):
        return None


def write_message(reason: Reason, file: Path | None) -> None:
    """The container's termination message, in config.termination_log()."""
    if file is not None:
        # The job may have put a FIFO there, which would block.
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_NONBLOCK
        with suppress(OSError), os.fdopen(os.open(file, flags, 0o644), "w") as out:
            out.write(reason.encode())


def describe(reason: Reason) -> str:
    """A reason as one line for people."""
    who = f"rank {reason.rank}: " if reason.rank >= 0 else ""
    message = " ".join("; ".join((reason.message, *reason.causes)).split())
    where = f" ({reason.where})" if reason.where and reason.where not in message else ""
    if reason.type == "Exit" and message.startswith(f"exited with code {reason.exit_code}"):
        return f"{who}{message}{where}"
    end = ": ".join(filter(None, (reason.type, message)))
    return f"{who}{end}{where}, exit code {reason.exit_code}"


def enable_stacks(file: Path | None) -> None:
    """Have a fatal error of this process write all threads' Python stacks beside its reason.

    Without a file, or in a folder where none can be created, they go to stderr.
    """
    target: TextIO | int = sys.stderr
    if file:
        with suppress(OSError):
            # Never closed: the fatal error is the process's last moment.
            target = os.open(_stacks(file), os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
    faulthandler.enable(target)


def read_stacks(file: Path | None) -> str:
    """The stacks that a process wrote; empty: it had no fatal error."""
    with suppress(OSError):
        return _stacks(file).read_text(errors="replace") if file else ""
    return ""


def is_first(file: Path | None, text: str) -> bool:
    """Whether no other process of this start has shown the same text; it counts as shown then.

    `file` is that of the reason. Where no file can be created beside it, each process is the first.
    """
    if file is None:
        return True
    name = hashlib.sha256(text.encode(errors="replace")).hexdigest()
    try:
        # Creating the file decides between ranks that fail at the same moment.
        (file.parent / f"shown-{name}").touch(exist_ok=False)
    except FileExistsError:
        return False
    except OSError:
        return True
    return True


def by_rank(rank: int, text: str) -> str:
    """A text for a log that ranks share: the rank is in front of each line."""
    return "".join(f"[rank {rank}] {line}\n" for line in text.splitlines())


def seen_file(file: Path | None) -> Path | None:
    """The file of an observer, beside the reason; see k8sjob.runtime.base.heartbeat."""
    return file.with_suffix(".seen") if file else None


def flush_output() -> None:
    """Write what is buffered, of Python and of C."""
    for stream in (sys.stdout, sys.stderr):
        # A script may have closed a stream, or have put None in its place.
        with suppress(OSError, ValueError, AttributeError):
            stream.flush()
    # C code has buffers of its own, which os._exit does not write.
    ctypes.CDLL(None).fflush(None)


def _stacks(file: Path) -> Path:
    return file.with_suffix(".stacks")

"""Processes that left their rank's group: a daemon, or one that was given a session of its own.

In a container they are PID 1's children once their parent has ended, and end with it. The agent is
PID 1 in a pod; elsewhere Linux lets it adopt them all the same.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Collection

__all__ = ["adopt", "end", "reap"]

_PR_SET_CHILD_SUBREAPER: Final = 36
_END_LIMIT: Final = 2.0
"""Seconds that the kernel has to take away what was killed; a process may be deep in a driver."""


def adopt() -> None:
    """From now on, become the parent of every descendant whose own parent ends (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)


def reap(known: Collection[int]) -> None:
    """Collect the adopted children that have ended; stops at the first one of `known`."""
    if not hasattr(os, "waitid"):
        return
    with suppress(ChildProcessError):
        while True:
            seen = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if seen is None or seen.si_pid in known:
                return
            os.waitpid(seen.si_pid, 0)


def end() -> None:
    """SIGKILL to all children, and to theirs, which become ours; none of them is to be kept.

    A child is signalled before it is reaped, so that its number belongs to nobody else.
    """
    limit = time.monotonic() + _END_LIMIT
    while (children := _children()) and time.monotonic() < limit:
        for pid in children:
            with suppress(PermissionError):  # another user's, by a setuid program
                os.kill(pid, signal.SIGKILL)
        reap(known=())
        time.sleep(0.005)


def _children() -> list[int]:
    """The children of this process, zombies too (Linux; elsewhere: none)."""
    me, found = str(os.getpid()).encode(), []
    for entry in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            if entry.read_bytes().rpartition(b")")[2].split()[1] == me:
                found.append(int(entry.parent.name))
    return found

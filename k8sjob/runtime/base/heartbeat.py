"""Heartbeats: each rank's observer renews a file, and the agent of its node watches the file's age.

A stopped process, or a C call that holds the interpreter's lock, cannot report itself. Ages are
measured on the reader's monotonic clock, from the moment at which a change was seen, so that a step
of the wall clock ends no job.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

__all__ = ["HeartbeatMonitor", "settle"]

_SETTLES: Final = 5
"""The agent waits for so many settling times: the rank's watchdog knows more and acts first."""


def settle(timeout: float) -> float:
    """Seconds that a group takes to see an alarm, and again to write about it."""
    return max(0.2, min(2.0, timeout / 5))


class HeartbeatMonitor:
    """Which of a node's processes stand still; one without a file counts from the first look."""

    def __init__(self, files: Sequence[Path | None], timeout: float) -> None:
        """A monitor.

        Args:
            files: what the observer of each process renews; None: it has none.
            timeout: seconds without progress after which the rank itself acts; 0: never.
        """
        self._files = files
        self._limit = timeout + _SETTLES * settle(timeout) if timeout else float("inf")
        self._seen: dict[int, tuple[int, float]] = {}

    def stale(self, watched: Iterable[int]) -> tuple[int, ...]:
        """The indices of those of the watched processes whose file has not changed for too long."""
        now = time.monotonic()
        held = {index: self._seen.get(index, (-1, now)) for index in watched}
        self._seen = {}
        for index, known in held.items():
            file = self._files[index]
            try:
                mtime = file.stat().st_mtime_ns if file else 0
            except OSError:
                mtime = 0
            self._seen[index] = known if known[0] == mtime else (mtime, now)
        return tuple(i for i, (_, since) in self._seen.items() if now - since > self._limit)

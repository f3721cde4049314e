"""Heartbeat files: a rank touches one at each beat, and the agent of its node watches its age.

A stopped process, or a C call that holds the interpreter's lock, cannot report itself. Ages are
measured on the reader's monotonic clock, from the moment at which a change was seen, so that a step
of the wall clock ends no job.
"""

from __future__ import annotations

import os
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from pathlib import Path

__all__ = ["Heartbeat", "HeartbeatMonitor", "settle"]

_SETTLES: Final = 5
"""The agent waits for so many settling times: the rank's watchdog knows more and acts first."""


def settle(timeout: float) -> float:
    """Seconds that a group takes to see an alarm, and again to write about it."""
    return max(0.2, min(2.0, timeout / 5))


class Heartbeat:
    """The rank's side: touches the file, at most ten times in a timeout and once a second."""

    def __init__(self, file: Path | None, timeout: float) -> None:
        self._file = file
        self._interval = min(1.0, timeout / 10)
        self._next = 0.0

    def beat(self, now: float) -> None:
        """Renew the file's time, unless that was done a moment ago; `now` is time.monotonic()."""
        if self._file is None or now < self._next:
            return
        self._next = now + self._interval
        with suppress(OSError):
            try:
                os.utime(self._file)
            except FileNotFoundError:
                self._file.touch()

    def close(self) -> None:
        """Remove the file: the agent does not watch until the next beat."""
        self._next = 0.0
        if self._file is not None:
            with suppress(OSError):
                self._file.unlink()


class HeartbeatMonitor:
    """The agent's side: which of its processes have stopped making progress.

    A process without a file has not begun to beat, or has finished; it counts only while it is
    stopped, as by SIGSTOP.
    """

    def __init__(
        self,
        files: Sequence[Path | None],
        timeout: float,
        *,
        stopped: Callable[[int], bool] = lambda _index: False,
    ) -> None:
        """A monitor.

        Args:
            files: the heartbeat file of each process.
            timeout: seconds without a beat after which the rank itself acts; 0: never.
            stopped: whether the process of an index is stopped.
        """
        self._files, self._stopped = files, stopped
        self._limit = timeout + _SETTLES * settle(timeout) if timeout else 0.0
        self._seen: dict[int, tuple[int | None, float]] = {}

    @property
    def interval(self) -> float:
        """Seconds between two looks; infinite when there is nothing to look at."""
        return min(1.0, self._limit / 15) if self._limit else float("inf")

    def stale(self, alive: Iterable[int]) -> tuple[int, ...]:
        """The indices of the living processes whose last beat is too old."""
        if not self._limit:
            return ()
        now = time.monotonic()
        return tuple(index for index in alive if now - self._changed(index, now) > self._limit)

    def _changed(self, index: int, now: float) -> float:
        """When the file was seen to change; now where there is nothing to watch."""
        file = self._files[index]
        try:
            mtime = file.stat().st_mtime_ns if file else None
        except OSError:
            mtime = None
        if mtime is None and not self._stopped(index):
            self._seen.pop(index, None)
            return now
        known = self._seen.get(index)
        if known is None or known[0] != mtime:
            known = self._seen[index] = (mtime, now)
        return known[1]

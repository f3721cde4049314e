"""A rank's sign of progress on its own node: a file, touched at each beat, read by the agent.

A stopped process, or a C call that holds the interpreter's lock, cannot report itself; the agent
sees it by the age of the file. Ages are measured on the reader's monotonic clock, from the moment
at which a change was seen, so that a step of the wall clock ends no job.
"""

from __future__ import annotations

import os
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from pathlib import Path

__all__ = ["Heartbeat", "Pulse", "settle"]

_PATIENCE: Final = 5
"""The agent lets so many settling times pass: the rank's own watchdog knows more and goes first."""


def settle(timeout: float) -> float:
    """Seconds that a group takes to hear an alarm, and again to write about it."""
    return max(0.2, min(2.0, timeout / 5))


class Heartbeat:
    """The rank's side: touches the file, at most ten times in a timeout and once a second."""

    def __init__(self, file: Path | None, timeout: float) -> None:
        self._file = file
        self._every = min(1.0, timeout / 10)
        self._next = 0.0

    def beat(self, now: float) -> None:
        """Renew the file's time, unless that was done a moment ago.

        Args:
            now: time.monotonic().
        """
        if self._file is None or now < self._next:
            return
        self._next = now + self._every
        with suppress(OSError):
            try:
                os.utime(self._file)
            except FileNotFoundError:
                self._file.touch()

    def close(self) -> None:
        """Take the file away: the agent watches no longer, until the next beat."""
        self._next = 0.0
        if self._file is not None:
            with suppress(OSError):
                self._file.unlink()


class Pulse:
    """The agent's side: which of its processes have stopped making progress.

    A process without a file has not begun to beat, or is done with it, and is watched for being
    stopped alone.
    """

    def __init__(
        self,
        files: Sequence[Path | None],
        timeout: float,
        *,
        stopped: Callable[[int], bool] = lambda _index: False,
    ) -> None:
        """A pulse.

        Args:
            files: the heartbeat file of each process.
            timeout: seconds without a beat after which the rank itself acts; 0: never.
            stopped: whether the process of an index is stopped.
        """
        self._files, self._stopped = files, stopped
        self._limit = timeout + _PATIENCE * settle(timeout) if timeout else 0.0
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

"""What a run costs: memory, and the time that ranks lose by waiting for the slowest."""

from __future__ import annotations

import os
import sys
import time
import weakref
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = ["Computing", "Waiting", "lost_time", "peak_memory"]

_SYNC: Final = "sync"


class Waiting:
    """How long a rank was held up by the others, by the phases that the watchdog is told, too.

    Where forward or backward send as they go, such a phase has computation in it, which is the
    rank's own: see Computing.
    """

    def __init__(self, computed: Callable[[], float] = lambda: 0.0) -> None:
        """Count nothing yet.

        Args:
            computed: a clock that goes on while this thread computes, in seconds.
        """
        self._computed = computed
        self._seconds = 0.0
        self._since: tuple[float, float] | None = None

    def phase(self, phase: str) -> None:
        """A phase begins, "sync" or another."""
        if phase == _SYNC:
            self._since = self._since or (time.monotonic(), self._computed())
        elif self._since is not None:
            (began, computed), self._since = self._since, None
            self._seconds += max(0.0, time.monotonic() - began - (self._computed() - computed))

    @property
    def seconds(self) -> float:
        """Of the phases that have ended since the last reset()."""
        return self._seconds

    def reset(self) -> None:
        """Count anew."""
        self._seconds = 0.0


class Computing:
    """A clock that goes on while the thread that made it has a core, or is kept from one.

    It is kept by whatever else runs on its node, or by its container's limit: then the others wait
    for this rank as for one that has more to compute. Only Linux tells of that time (the second
    number of proc's schedstat); elsewhere the clock stands still meanwhile. What is computed on a
    GPU is not in it.
    """

    def __init__(self) -> None:
        self._kept: int | None = None
        with suppress(OSError):
            self._kept = os.open("/proc/thread-self/schedstat", os.O_RDONLY | os.O_CLOEXEC)
            weakref.finalize(self, os.close, self._kept)

    def __call__(self) -> float:
        """Seconds, from any beginning."""
        kept = 0
        if self._kept is not None:
            with suppress(OSError):  # the thread has ended, and another one goes on
                kept = int(os.pread(self._kept, 80, 0).split()[1])
        return time.thread_time() + kept / 1e9


@dataclass(frozen=True, slots=True)
class Lost:
    """What ranks lost in the same stretch of time.

    Attributes:
        seconds: that a rank waited because another was slower, the mean over the ranks.
        slowest: the rank that was.
    """

    seconds: float
    slowest: int


def lost_time(own: Sequence[float]) -> Lost:
    """Who let the others wait, from the seconds that each rank needed for itself, by rank.

    All come together at every step, so whoever needs less waits for whoever needs most.
    """
    slowest = max(range(len(own)), key=lambda rank: own[rank])
    return Lost(own[slowest] - sum(own) / len(own), slowest)


def peak_memory(device: torch.device) -> int:
    """The most bytes that this process has held: on its GPU what torch has, else in memory."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    import resource  # Unix alone has it

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024

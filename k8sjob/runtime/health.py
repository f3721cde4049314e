"""What a run costs: memory, and the time that ranks lose by waiting for the slowest."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["Waiting", "lost_time", "peak_memory"]

_SYNC: Final = "sync"


class Waiting:
    """How long a rank was with the others, by the phases that the watchdog is told, too.

    Where forward or backward send as they go, such a phase has computation in it; what is left is a
    rank's own: reading data, the script, and under ddp the forward pass.
    """

    def __init__(self) -> None:
        self._seconds = 0.0
        self._since: float | None = None

    def phase(self, phase: str) -> None:
        """A phase begins, "sync" or another."""
        if phase == _SYNC:
            self._since = time.monotonic() if self._since is None else self._since
        elif self._since is not None:
            self._seconds += time.monotonic() - self._since
            self._since = None

    @property
    def seconds(self) -> float:
        """Of the phases that have ended since the last reset()."""
        return self._seconds

    def reset(self) -> None:
        """Count anew."""
        self._seconds = 0.0


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

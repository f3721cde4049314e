"""Trouble that stands: what `why` would say of a job that goes on and does not get on."""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING, Final

from k8sjob.contract import Event, EventKind
from k8sjob.lifecycle.diagnose import Cause, diagnose
from k8sjob.lifecycle.status import replica_names

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from k8sjob.backends.api import Snapshot
    from k8sjob.lifecycle.diagnose import Finding
    from k8sjob.lifecycle.status import JobStatus

__all__ = ["PATIENCE_SECONDS", "Standing"]

PATIENCE_SECONDS: Final = 10.0
"""What mends itself sooner is not worth a word."""
_RUNNING: Final = frozenset({"Running", "Succeeded"})
_TOLD_BY_STATE: Final = frozenset(
    {Cause.WAITING, Cause.SUSPENDED, Cause.QUEUED, Cause.DELETING, Cause.STOPPED}
)
"""Causes that are no trouble, or that the job's state says with as many words."""


class Standing:
    """The troubles of one job, each told once, when it has stood for some time.

    Args:
        patience: seconds for which a trouble must have been seen.
    """

    def __init__(self, patience: float = PATIENCE_SECONDS) -> None:
        self._patience = patience
        self._looked = -math.inf
        self._since: dict[tuple[str, str], float] = {}
        self._told: set[tuple[str, str]] = set()

    def look(
        self, snapshot: Snapshot, status: JobStatus, tails: Mapping[str, Sequence[str]], now: float
    ) -> Iterator[Event]:
        """A WARNING for what has stood for long enough; may be called at any time.

        Args:
            snapshot: the newest one.
            status: the same, read.
            tails: the last lines of each replica's output, by its name.
            now: seconds of a clock that never goes back.
        """
        if now - self._looked < self._patience / 5:
            return
        self._looked = now
        found = {(one.cause, one.replica): one for one in _troubles(snapshot, status, tails)}
        self._since = {key: self._since.get(key, now) for key in found}
        for key, one in found.items():
            if key not in self._told and now - self._since[key] >= self._patience:
                self._told.add(key)
                data = {
                    "message": f"{one.message}; next: {one.next_step}",
                    "reason": str(one.cause),
                }
                yield Event(EventKind.WARNING, data, time.time())


def _troubles(
    snapshot: Snapshot, status: JobStatus, tails: Mapping[str, Sequence[str]]
) -> list[Finding]:
    """What keeps the job from going on; of one whose replicas all run, only the past is known."""
    there = len(status.replicas) == len(replica_names(snapshot.job))
    run = there and all(replica.situation in _RUNNING for replica in status.replicas)
    if run or status.state.finished:
        return []
    return [one for one in diagnose(snapshot, tails) if one.cause not in _TOLD_BY_STATE]

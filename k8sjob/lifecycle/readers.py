"""Which replicas' output a watch reads: of a small job all, of a large one a choice.

A stream is a connection, or a kubectl. Rank 0 tells the progress, so the first replicas are
followed; of the others the last lines are read when they fail.
"""

from __future__ import annotations

import time
from functools import partial
from typing import TYPE_CHECKING, Final

from k8sjob.contract import Event, EventKind, ExitCode
from k8sjob.errors import BackendError
from k8sjob.lifecycle.logs import MOST_AT_ONCE
from k8sjob.lifecycle.status import replica_names

if TYPE_CHECKING:
    import threading
    from collections.abc import Iterator

    from k8sjob.backends.api import Backend, JobRef, Json, LogLine, Snapshot
    from k8sjob.lifecycle.funnel import Funnel
    from k8sjob.lifecycle.status import JobStatus, ReplicaStatus

__all__ = ["Readers"]

LAST_LINES: Final = 50
"""So many last lines of a replica that failed are read where it is not followed."""
_CONSEQUENCES: Final = frozenset({0, ExitCode.PEER_LOST, ExitCode.STOPPED})


class Readers:
    """Opens the sources of a job's output as its replicas come and fail.

    Attributes:
        heard: whether all is read that there was to read: nobody is missing among the replicas.
    """

    def __init__(self, backend: Backend, ref: JobRef, funnel: Funnel[Snapshot | LogLine]) -> None:
        self._backend, self._ref, self._funnel = backend, ref, funnel
        self._followed: set[str] = set()
        self._failed: set[tuple[str, int]] = set()
        self._told = False

    def look(self, job: Json, status: JobStatus) -> Iterator[Event]:
        """Read what is to be read by now; what is left out is told once."""
        names = replica_names(job)
        for name in names[:MOST_AT_ONCE]:
            if name not in self._followed:
                self._followed.add(name)
                self._funnel.add(name, partial(self._follow, name))
        if len(names) <= MOST_AT_ONCE:
            return
        for replica in status.replicas:
            self._look_at(replica)
        if not self._told:
            self._told = True
            yield Event(EventKind.WARNING, {"message": self._choice(names)}, time.time())

    def _choice(self, names: tuple[str, ...]) -> str:
        return (
            f"of {len(names)} replicas the output of {names[0]} and the next {MOST_AT_ONCE - 1}"
            f" is followed, and the last lines of those that fail are read; another's:"
            f" k8sjob logs -f {self._ref} -r {names[-1]}"
        )

    def _look_at(self, replica: ReplicaStatus) -> None:
        """Read the last lines of a replica that failed by itself, of the first that do."""
        key = replica.name, replica.restarts
        if (
            replica.name not in self._followed
            and (replica.exit_code or 0) not in _CONSEQUENCES
            and key not in self._failed
            and len(self._failed) < MOST_AT_ONCE
        ):
            self._failed.add(key)
            runs_again = replica.phase == "Running" and not replica.waiting and replica.restarts > 0
            source = partial(self._last, replica.name, previous=runs_again)
            self._funnel.add(f"{replica.name} {replica.restarts}", source)

    def _follow(self, name: str, stop: threading.Event) -> Iterator[LogLine]:
        return self._backend.logs(self._ref, name, follow=True, stop=stop)

    def _last(self, name: str, stop: threading.Event, *, previous: bool) -> Iterator[LogLine]:
        try:
            if previous:
                lines = self._backend.logs(self._ref, name, previous=True, stop=stop)
            else:
                lines = self._backend.logs(self._ref, name, tail=LAST_LINES, stop=stop)
            yield from lines
        except BackendError:
            return  # its pod may be gone by now

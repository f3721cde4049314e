"""The last time that a job was suspended, and whether it had run before. Pure.

Every kind resets its startTime on a resume and keeps one condition, so nothing in the status tells
of the runs before. What does: the generation, which counts the changes of the spec; the Events of
the Pods that the suspension deleted, for about an hour; and Kueue's Workload.
"""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Final, NamedTuple

from k8sjob.kube.kueue import workloads_of
from k8sjob.kube.objects import QUEUE, event_time, moment

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from k8sjob.backends.api import Backend, Snapshot
    from k8sjob.kube.objects import Json, Object

_SETTLING: Final = 2.0
"""Seconds after which a controller that runs has seen that a new job is suspended."""
_ADOPTING: Final = timedelta(seconds=60)
"""Time in which Kueue makes the first Workload of a job."""
_ROUNDING: Final = 1.0
"""Seconds by which whole seconds may be behind."""


class Suspension(NamedTuple):
    """When a job was suspended last; moments are seconds since the epoch.

    Attributes:
        begin: None: not known.
        end: when it was resumed; None: it is still suspended.
        first: whether it has never run before: it was created suspended.
        ran: seconds that it held its quota before `begin`, up to then; None: not known.
    """

    begin: float | None
    end: float | None
    first: bool = False
    ran: float | None = None


def last_suspension(snapshot: Snapshot, related: Iterable[Json] = ()) -> Suspension | None:
    """The last suspension; None for a job that was never suspended.

    Of `related` (see Backend.related) its Workload is read.
    """
    job = snapshot.job
    condition, created = job.condition("Suspended"), moment(job.created)
    if not condition.since or not created:
        return None
    begun, since = created.timestamp(), condition.since.timestamp()
    # The generation is 1 at first; each change of the spec, as a suspension or a resume, adds one.
    changes = job.metadata.get("generation", 0) - 1
    if condition.true:
        if changes == 0 or since <= begun + _SETTLING:
            return Suspension(begun, None, first=True)
        return Suspension(since, None)
    # Kueue replaces a Workload that no longer fits its job, and the new one knows nothing.
    workloads = workloads_of(job.uid, related)
    adopted = (w for w in workloads if (moment(w.created) or created) < created + _ADOPTING)
    workload = next(adopted, None)
    evicted = workload.condition("Evicted") if workload else None
    if changes == 1 or (evicted is not None and not evicted):
        return Suspension(begun, since, first=True)
    # "SuccessfulDelete" and "SuccessfulDeletePod": what controllers say when they stop its Pods.
    stopped = [
        at
        for event in snapshot.events
        if str(event.get("reason")).startswith("SuccessfulDelete")
        and (at := event_time(event).timestamp()) <= since + _ROUNDING
    ]
    if stopped:
        return Suspension(min(max(stopped), since), since)
    return _evicted_once(workload, since) if workload else Suspension(None, since)


def read_related(backend: Backend, snapshot: Snapshot) -> Sequence[Json]:
    """What last_suspension takes: many requests, so only where Kueue may know more."""
    paused = last_suspension(snapshot)
    unknown = paused and not paused.first and paused.begin is None
    return backend.related(snapshot) if unknown and QUEUE in snapshot.job.labels else ()


def _evicted_once(workload: Object, end: float) -> Suspension:
    """By the condition Requeued, whose time is that of the first eviction."""
    evictions = workload.part("status", "schedulingStats").get("evictions") or ()
    requeued = workload.condition("Requeued").since
    if sum(eviction.get("count") or 0 for eviction in evictions) != 1 or requeued is None:
        return Suspension(None, end)
    ran = workload.status.get("accumulatedPastExecutionTimeSeconds")
    return Suspension(requeued.timestamp(), end, ran=ran)

"""When a replica held its devices, as its Pods tell, and when it surely held none. Pure.

What neither shows is not known: the times of a Pod are gone when another replaces it.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final, NamedTuple

from k8sjob.kube.objects import event_time, moment
from k8sjob.targets.api import JobState

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from datetime import datetime

    from k8sjob.backends.api import Snapshot
    from k8sjob.kube.objects import Pod
    from k8sjob.observe.status import JobStatus
    from k8sjob.observe.suspension import Suspension

Interval = tuple[float, float]
"""Begin and end, in seconds since the epoch."""
_LONGEST_END: Final = 60.0
"""Seconds from the last line of output to the end of a suspended Pod, which are not worth a use."""
_RESOLUTION: Final = 1.0
"""Seconds by which two times of a cluster may differ though nothing lay between: they are whole."""
_PROMPT: Final = 30.0
"""Seconds in which a controller that runs has created the Pods of a new job."""


class JobTimes(NamedTuple):
    """What holds for all replicas; moments are seconds since the epoch.

    Attributes:
        since: when the first Pod of those that are there may have been made.
        empty: when no replica held anything.
        refused: when the apiserver first refused a Pod; infinite: never.
        sessions: the starts of the group, as its output shows them.
        finished: infinite for a job that has not ended.
    """

    since: float
    empty: Sequence[Interval]
    refused: float
    sessions: Sequence[Interval]
    present: float
    finished: float


class Holding(NamedTuple):
    """The times of one replica: with a node, before a start on it, surely without one; its end."""

    held: tuple[Interval, ...]
    unstarted: tuple[Interval, ...]
    empty: tuple[Interval, ...]
    end: float


def cut(
    begin: float, end: float, intervals: Iterable[Interval]
) -> Iterator[tuple[float, float, bool]]:
    """The pieces of a time, in order, and whether each is within the intervals."""
    for first, last in sorted(intervals):
        for until, within in ((min(first, end), False), (min(last, end), True)):
            if begin < until:
                yield begin, until, within
                begin = until
    if begin < end:
        yield begin, end, False


def job_times(
    snapshot: Snapshot,
    status: JobStatus,
    paused: Suspension | None,
    sessions: Sequence[Interval],
    present: float,
) -> JobTimes:
    """What holds for all replicas of a job, which was `paused` last."""
    refusals = {refusal for refusal, _, _ in snapshot.job.target.pods.creations}
    events = [event for event in snapshot.events if event.get("reason") in refusals]
    firsts = (moment(event.get("firstTimestamp")) or event_time(event) for event in events)
    refused = min((first.timestamp() for first in firsts), default=math.inf)
    finished = _seconds(status.finished, math.inf)
    since = created = _seconds(status.created, min(present, finished))
    if paused:
        since = present if paused.end is None else paused.end
        lost = since if paused.begin is None else paused.begin
        # A back end that keeps the output of earlier Pods has all of them.
        last = max((end for begin, end in sessions if begin < lost), default=created)
        quiet = last if 0 <= lost - last < _LONGEST_END and last > created else lost
        begun = created if paused.ran is None else max(lost - paused.ran, created)
        empty = [(created, begun), (quiet, since)]
    elif snapshot.pods or sessions:
        empty = []
    elif status.state in {JobState.CREATED, JobState.QUEUED}:
        empty = [(created, present)]
    else:
        empty = [(created, _seconds(status.started, created))] * status.state.finished
    return JobTimes(since, empty, refused, sessions, present, finished)


def holding(job: JobTimes, pods: Iterable[Pod]) -> Holding:
    """The times of the replica that these Pods are."""
    held, unstarted, empty = list[Interval](), list[Interval](), [*job.empty]
    at = first = job.since
    for pod in sorted(pods, key=lambda pod: pod.created):
        created = max(_seconds(moment(pod.created), at), job.since)
        # Of several Pods that are there none is missing between; a refused one cannot have been.
        if held or min(created, job.refused) - at <= _PROMPT:
            empty.append((at, created))
        empty.append((min(job.refused, created), created))
        at = job.present if pod.live else _end(pod, created)
        scheduled = pod.condition("PodScheduled")
        bound = _seconds(scheduled.since if scheduled.true else None, created) if pod.node else at
        empty.append((created, bound))
        bound = job.since if bound - job.since <= _RESOLUTION else bound
        first = first if held else created
        held.append((bound, at))
        unstarted += _unstarted(pod, bound, at, in_output=bool(job.sessions))
    if not held:
        empty.append((job.refused, job.present))
        first = math.inf
    # The Pods tell of the time since the first; before that, a group that trained had devices.
    held += [(begin, min(end, first)) for begin, end in job.sessions if begin < first]
    ends = [end for _, end in held] if first < math.inf or job.finished < math.inf else []
    end = max(ends, default=min(job.present, job.finished))
    return Holding(tuple(held), tuple(unstarted), tuple(empty), end)


def _seconds(time: datetime | None, default: float) -> float:
    return time.timestamp() if time else default


def _end(pod: Pod, created: float) -> float:
    """When a Pod that is over ended; one that was evicted may have no status of its container."""
    if ended := moment(pod.terminated.get("finishedAt")):
        return ended.timestamp()
    conditions = pod.status.get("conditions") or ()
    changes = (moment(condition.get("lastTransitionTime")) for condition in conditions)
    return max((_seconds(change, created) for change in changes), default=created)


def _unstarted(pod: Pod, bound: float, end: float, *, in_output: bool) -> Iterator[Interval]:
    """When its container waited for a start; `in_output`: whether its output shows the starts."""
    state, before = pod.container.part("state"), pod.terminated_before
    now = state.get("running") or state.get("terminated") or {}
    # A container that could not be started has "started" in 1970.
    starts = [_seconds(moment(run.get("startedAt")), 0.0) for run in (before, now)]
    stops = [_seconds(moment(run.get("finishedAt")), end) for run in (before, now)]
    first = next(filter(None, starts), end if pod.live and "running" not in state else bound)
    # A Pod has the times of its last two runs only; of more runs the output has the first start.
    if pod.restarts <= 1 or not in_output:
        yield bound, first
    if before:
        yield max(stops[0], first), starts[1] or end
    if pod.live and now.get("exitCode"):  # the kubelet will start it again
        yield max(stops[1], first), end

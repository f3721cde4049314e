"""When a replica held its devices, as its Pods tell, and when it surely held none. Pure.

What neither shows is not known: the times of a Pod are gone when another replaces it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from k8sjob.kube.objects import event_time, moment
from k8sjob.targets.api import JobState
from k8sjob.targets.jobs import target_of

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


@dataclass(frozen=True, slots=True)
class Holding:
    """The times of one replica.

    Attributes:
        held: in which its Pods had a node.
        unstarted: the parts of them in which its container waited for an image, or a restart.
        empty: in which it surely held nothing.
        end: when it ended; the present for one that has not.
    """

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


def held_nothing(
    snapshot: Snapshot,
    status: JobStatus,
    paused: Suspension | None,
    sessions: Sequence[Interval],
    present: float,
) -> tuple[float, list[Interval]]:
    """Since when the Pods that are there may exist, and when no replica held anything before.

    Of `sessions`, the starts of the group, the output tells.
    """
    created = status.created.timestamp() if status.created else present
    if paused is None:
        started = status.started.timestamp() if status.started else created
        never = status.state in {JobState.CREATED, JobState.QUEUED} and not sessions
        until = present if never else started if status.state.finished else created
        return created, [(created, until)] if not snapshot.pods else []
    end = present if paused.end is None else paused.end
    lost = paused.begin if paused.begin is not None else end
    begin = created if paused.ran is None else max(lost - paused.ran, created)
    # A back end that keeps the output of earlier Pods has all of them.
    before = [last for first, last in sessions if first < lost]
    last = max(before, default=-_LONGEST_END)
    empty = [(last if 0 <= lost - last < _LONGEST_END else lost, end)]
    return end, [*empty, (created, begin)]


def holding(
    snapshot: Snapshot,
    pods: Iterable[Pod],
    nothing: tuple[float, list[Interval]],
    sessions: Sequence[Interval],
    *,
    present: float,
    finished: float | None,
) -> Holding:
    """The times of the replica that these Pods are; for `nothing` see held_nothing()."""
    refusals = {refusal for refusal, _, _ in target_of(snapshot.job).creations}
    refused = [
        (moment(event.get("firstTimestamp")) or event_time(event)).timestamp()
        for event in snapshot.events
        if event.get("reason") in refusals
    ]
    since, empty = nothing[0], [*nothing[1]]
    ordered = sorted(pods, key=lambda pod: pod.created)
    held, unstarted, at, ends = list[Interval](), list[Interval](), since, list[float]()
    for pod in ordered:
        made = max(_seconds(moment(pod.created), at), since)
        # Of several Pods that are there none is missing between; a refused one cannot have been.
        if ends or min([made, *refused]) - at <= _PROMPT:
            empty.append((at, made))
        elif refused:
            empty.append((min(refused), made))
        end = present if pod.live else _end(pod, made)
        scheduled = pod.condition("PodScheduled")
        bound = _seconds(scheduled.since if scheduled.true else None, made) if pod.node else end
        empty.append((made, bound))
        bound = since if bound - since <= _RESOLUTION else bound
        held.append((bound, end))
        unstarted += _unstarted(pod, bound, end, known=bool(sessions))
        at = end
        ends.append(end)
    if not ordered and refused:
        empty.append((min(refused), present))
    # The Pods tell of the time since their creation; before that, a group that trained had devices.
    first = min((max(_seconds(moment(pod.created), since), since) for pod in ordered), default=None)
    earlier = [(begin, end if first is None else min(end, first)) for begin, end in sessions]
    held += [(begin, end) for begin, end in earlier if begin < end]
    over = bool(ordered) or finished is not None
    last = max((end for _, end in held), default=present if finished is None else finished)
    return Holding(tuple(held), tuple(unstarted), tuple(empty), last if over else present)


def _seconds(time: datetime | None, default: float) -> float:
    return time.timestamp() if time else default


def _end(pod: Pod, made: float) -> float:
    """When a Pod that is over ended; one that was evicted may have no status of its container."""
    if ended := moment(pod.terminated.get("finishedAt")):
        return ended.timestamp()
    changes = [moment(one.get("lastTransitionTime")) for one in pod.status.get("conditions") or ()]
    return max((_seconds(change, made) for change in changes), default=made)


def _unstarted(pod: Pod, bound: float, end: float, *, known: bool) -> Iterator[Interval]:
    """When its container waited, for its first start or another; `known`: its output tells."""
    state, before = pod.container.part("state"), pod.terminated_before
    now = state.get("running") or state.get("terminated") or {}
    # A container that could not be started has "started" in 1970.
    starts = [_seconds(moment(one.get("startedAt")), 0.0) for one in (before, now)]
    stops = [_seconds(moment(one.get("finishedAt")), end) for one in (before, now)]
    first = next(filter(None, starts), end if pod.live and "running" not in state else bound)
    if pod.restarts <= 1 or not known:
        yield bound, first
    if before:
        yield max(stops[0], first), starts[1] or end
    if pod.live and now.get("exitCode"):  # the kubelet will start it again
        yield max(stops[1], first), end

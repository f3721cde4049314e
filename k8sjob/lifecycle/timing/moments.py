"""When the replicas of a job were made and started, as its objects tell it. Pure.

Kubernetes keeps most times as whole seconds; those of the scheduler alone are exact. A Pod that is
gone lives on in its Events for about an hour.
"""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import dataclass, field
from datetime import datetime
from typing import TYPE_CHECKING, Final, NamedTuple

from k8sjob.contract import CONTAINER_NAME
from k8sjob.lifecycle.status import replica_names

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from k8sjob.backends.api import Json, Snapshot

__all__ = [
    "SLACK",
    "Heard",
    "Init",
    "Moment",
    "Start",
    "last_to_start",
    "resumed",
    "starts",
    "submitted",
]

_OF_TRAINING: Final = f"spec.containers{{{CONTAINER_NAME}}}"
_OF_INIT: Final = re.compile(r"spec\.initContainers\{(?P<name>[^}]+)\}")
_TOOK: Final = re.compile(r" in (?P<alone>[0-9.hmsµn]+)(?: \([0-9.hmsµn]+ including waiting\))?")
_UNITS: Final = {"h": 3600.0, "m": 60.0, "s": 1.0, "ms": 1e-3, "µs": 1e-6, "ns": 1e-9}
SLACK: Final = 1.0
"""Seconds by which whole seconds may be behind."""


class Moment(NamedTuple):
    """A point in time.

    Attributes:
        time: seconds since the epoch.
        exact: else it is the whole second in which it was.
    """

    time: float
    exact: bool = True

    @classmethod
    def of(cls, stamp: str | None) -> Moment | None:
        """The moment of an RFC 3339 timestamp."""
        return cls(datetime.fromisoformat(stamp).timestamp(), "." in stamp) if stamp else None


@dataclass(frozen=True, slots=True)
class Init:
    """An init container, once it was started.

    Attributes:
        name: "init-pytorch" is the operator's.
        began: its last start.
        ended: None while it runs, or where the Pod is gone.
    """

    name: str
    began: Moment | None
    ended: Moment | None


@dataclass(frozen=True, slots=True)
class Start:
    """How a replica came to run, in the Pod that it had at its first step; None: not known.

    Attributes:
        replica: "worker-2".
        node: the machine; may be empty.
        made: when its Pod was made.
        scheduled: when that was given to a node.
        inits: its init containers.
        pulling: when its node began to pull the image; None too where that was there.
        pulled: when the node had the image.
        pull: seconds that the pull took, as the node says it.
        started: when the training container was started.
        again: how many Pods of the replica there were before this one, as far as it is told.
        gone: whether the Pod is not there any more.
    """

    replica: str
    node: str = ""
    made: Moment | None = None
    scheduled: Moment | None = None
    inits: tuple[Init, ...] = ()
    pulling: Moment | None = None
    pulled: Moment | None = None
    pull: float | None = None
    started: Moment | None = None
    again: int = 0
    gone: bool = False


@dataclass(frozen=True, slots=True)
class Heard:
    """Moments that a replica's output tells, in seconds since the epoch; None: it does not.

    They are of the attempt that came to a training step, else of the last one.

    Attributes:
        first_line: when it wrote its first line.
        began: when the process of rank 0 was started.
        imported: when that had imported what it needs, and opened its session.
        met: when all processes had met.
        step: when the first training step was done.
        attempt: how often the container had been started before.
    """

    first_line: float | None = None
    began: float | None = None
    imported: float | None = None
    met: float | None = None
    step: float | None = None
    attempt: int = 0


@dataclass(slots=True)
class _Seen:
    """What there is about one Pod."""

    pod: Json = field(default_factory=dict)
    events: list[Json] = field(default_factory=list)

    @property
    def since(self) -> float:
        stamps = [self.pod.get("metadata", {}).get("creationTimestamp")]
        moments = [Moment.of(stamp) for stamp in stamps] + [_first(e) for e in self.events]
        return min((moment.time for moment in moments if moment), default=0.0)


def submitted(job: Json) -> Moment | None:
    """When the job was accepted."""
    return Moment.of((job.get("metadata") or {}).get("creationTimestamp"))


def resumed(job: Json) -> Moment | None:
    """When a job that was suspended, or waited in a queue, was let go on; None: never."""
    for condition in (job.get("status") or {}).get("conditions") or ():
        if condition.get("type") == "Suspended" and condition.get("status") == "False":
            return Moment.of(condition.get("lastTransitionTime"))
    return None


def last_to_start(snapshot: Snapshot) -> list[str]:
    """The names of the replicas, those whose container was started last first."""
    found = [start for start in starts(snapshot) if start.started]
    found.sort(key=lambda start: start.started or Moment(0.0), reverse=True)
    names = [start.replica for start in found]
    return names + [name for name in replica_names(snapshot.job) if name not in set(names)]


def starts(snapshot: Snapshot, before: float | None = None) -> list[Start]:
    """How each replica came to run, those without any Pod left out.

    Args:
        snapshot: the job.
        before: seconds since the epoch; what was made or started later is passed over where
            something earlier is known. None: the newest.
    """
    job = snapshot.job
    prefix = f"{(job.get('metadata') or {}).get('name', '')}-"
    seen: dict[str, dict[str, _Seen]] = defaultdict(lambda: defaultdict(_Seen))
    for pod in snapshot.pods:
        meta = pod["metadata"]
        seen[meta["name"]][meta.get("uid", "")].pod = pod
    made = {}
    for event in snapshot.events:
        about = event.get("involvedObject") or {}
        if about.get("kind") == "Pod":
            seen[about.get("name", "")][about.get("uid", "")].events.append(event)
        elif event.get("reason") == "SuccessfulCreatePod":
            made[event.get("message", "").removeprefix("Created pod: ")] = _first(event)
    found = []
    for name in replica_names(job):
        pods = sorted(seen[prefix + name].values(), key=lambda one: one.since)
        fitting = [one for one in pods if before is None or one.since <= before + SLACK]
        if chosen := (fitting or pods[:1])[-1:]:
            again = pods.index(chosen[0])
            first = None if again else made.get(prefix + name)
            found.append(_start(name, chosen[0], first, before, again))
    return found


def _start(name: str, seen: _Seen, made: Moment | None, before: float | None, again: int) -> Start:
    pod, status = seen.pod, seen.pod.get("status") or {}
    events = sorted(seen.events, key=lambda event: _first(event) or Moment(0.0))
    ours = [e for e in events if _field(e) in {"", _OF_TRAINING}]
    pulled = next((e for e in ours if e.get("reason") == "Pulled"), {})
    pulling = _of(ours, "Pulling")
    begun = list(_begun(status.get("containerStatuses") or (), ours))
    fitting = [m for m in begun if before is None or m.time <= before + SLACK]
    return Start(
        replica=name,
        node=(pod.get("spec") or {}).get("nodeName") or _node(ours),
        made=Moment.of(pod.get("metadata", {}).get("creationTimestamp")) or made,
        scheduled=_of(ours, "Scheduled") or _scheduled(status),
        inits=tuple(_inits(status, events, pulling or _first(pulled))),
        pulling=pulling,
        pulled=_first(pulled),
        pull=_took(pulled.get("message", "")),
        started=max(fitting) if fitting else min(begun, default=None),
        again=again,
        gone=not pod,
    )


def _begun(statuses: Sequence[Json], events: Iterable[Json]) -> Iterator[Moment]:
    """When the training container was started, each time that is told."""
    for status in statuses:
        if status.get("name") != CONTAINER_NAME:
            continue
        for state in (status.get("state") or {}, status.get("lastState") or {}):
            for kind in ("running", "terminated"):
                if moment := Moment.of((state.get(kind) or {}).get("startedAt")):
                    yield moment
    for event in events:
        if event.get("reason") == "Started" and (moment := _first(event)):
            yield moment


def _inits(status: Json, events: Sequence[Json], after: Moment | None) -> Iterator[Init]:
    """The init containers; of a Pod that is gone as its Events tell, in the order of their start.

    Args:
        status: of the Pod.
        events: of the Pod, oldest first.
        after: when the node began with the training container.
    """
    statuses = status.get("initContainerStatuses") or ()
    for one in statuses:
        state = one.get("state") or {}
        ended = state.get("terminated") or {}
        began = Moment.of((state.get("running") or ended).get("startedAt"))
        yield Init(one.get("name", ""), began, Moment.of(ended.get("finishedAt")))
    if statuses:
        return
    begun = {
        found["name"]: _first(event)
        for event in events
        if event.get("reason") == "Started" and (found := _OF_INIT.fullmatch(_field(event)))
    }
    following = [*begun.values(), after][1:]
    for (name, began), ended in zip(begun.items(), following, strict=False):
        yield Init(name, began, ended)


def _scheduled(status: Json) -> Moment | None:
    for condition in status.get("conditions") or ():
        if condition.get("type") == "PodScheduled" and condition.get("status") == "True":
            return Moment.of(condition.get("lastTransitionTime"))
    return None


def _of(events: Iterable[Json], reason: str) -> Moment | None:
    return next((_first(event) for event in events if event.get("reason") == reason), None)


def _node(events: Iterable[Json]) -> str:
    """Where a Pod was that is gone: `Successfully assigned ns/pod to node`."""
    said = [e.get("message", "") for e in events if e.get("reason") == "Scheduled"]
    return str(said[-1].rpartition(" to ")[2]) if said else ""


def _first(event: Json) -> Moment | None:
    """When an Event was first seen; the scheduler gives eventTime alone."""
    made = (event.get("metadata") or {}).get("creationTimestamp")
    return Moment.of(event.get("firstTimestamp") or event.get("eventTime") or made)


def _field(event: Json) -> str:
    return (event.get("involvedObject") or {}).get("fieldPath") or ""


def _took(message: str) -> float | None:
    """The seconds of `Successfully pulled image "x" in 1m2.5s (1m3s including waiting)`."""
    found = _TOOK.search(message)
    parts = re.findall(r"([0-9.]+)(h|ms|m|s|µs|ns)", found["alone"]) if found else []
    try:
        return sum(float(number) * _UNITS[unit] for number, unit in parts) if parts else None
    except ValueError:
        return None

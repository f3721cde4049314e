"""The time from a submission to the first training step, split into phases.

A group begins when its last replica has come, so the split follows the replica whose container was
started last, and rank 0 from where the processes have met. Nothing is guessed: a phase whose end is
not known is joined with the next one that has an end. Kubernetes keeps most times as whole seconds;
a Pod that is gone is known by its Events for about an hour.
"""

from __future__ import annotations

import re
from collections import defaultdict
from contextlib import closing
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime
from itertools import islice
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from k8sjob.backends.api import LOCAL, JobRef
from k8sjob.contract import CONTAINER_NAMES, Event, EventKind
from k8sjob.errors import BackendError
from k8sjob.observe.logs import MOST_AT_ONCE, in_parallel
from k8sjob.observe.status import job_status, speaker
from k8sjob.targets.api import created_pods
from k8sjob.targets.jobs import replica_names, replica_of, target_of

if TYPE_CHECKING:
    from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence

    from k8sjob.backends.api import Backend, Json, LogLine, Snapshot

__all__ = ["OutputTimes", "Phase", "Row", "Timing", "output_times", "read_output_times", "timing"]

_TRAINING_FIELDS: Final = {f"spec.containers{{{name}}}" for name in CONTAINER_NAMES}
_INIT_FIELD: Final = re.compile(r"spec\.initContainers\{(?P<name>[^}]+)\}")
_PULL_TIME: Final = re.compile(
    r" in (?P<alone>[0-9.hmsµn]+)(?: \([0-9.hmsµn]+ including waiting\))?"
)
_UNITS: Final = {"h": 3600.0, "m": 60.0, "s": 1.0, "ms": 1e-3, "µs": 1e-6, "ns": 1e-9}
_ROUNDING: Final = 1.0
"""Seconds by which whole seconds may be behind."""
_NOTABLE: Final = 0.5
"""Seconds that are worth a note."""
_MAX_LINES: Final = 20_000
"""Output that reports no step in so many lines reports none."""
_MAX_SECONDS: Final = 1e7
"""A longer time in an event is not believed."""


class _Moment(NamedTuple):
    time: float
    exact: bool = True  # else it is the whole second


@dataclass(frozen=True, slots=True)
class OutputTimes:
    """Moments in a replica's output, in seconds since the epoch; None: not in it.

    They are of the attempt that reached a training step, else of the last one.

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


@dataclass(frozen=True, slots=True)
class Phase:
    """A part of the time; docs/reference/json.md describes the fields."""

    phase: str
    seconds: float
    at: float
    exact: bool
    replica: str
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Row:
    """A replica's start: moments in seconds after the submission, None where not known."""

    name: str
    node: str
    pod: float | None
    scheduled: float | None
    init: float | None
    image: float | None
    container: float | None
    first_line: float | None
    imported: float | None
    met: float | None


@dataclass(frozen=True, slots=True)
class Timing:
    """How a job came to its first training step.

    Attributes:
        ref: the job.
        seconds: from its submission to its first step; None: none is known.
        phases: the phases in between, in order, as far as it has come.
        replicas: those that have, or had, a Pod.
        notes: remarks for the reader.
        missing: what is not known, and why.
    """

    ref: JobRef
    seconds: float | None
    phases: tuple[Phase, ...] = ()
    replicas: tuple[Row, ...] = ()
    notes: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """The same as JSON, in milliseconds; docs/reference/json.md describes each field."""
        data = _rounded(asdict(self))
        del data["ref"]
        return {"name": self.ref.name, "namespace": self.ref.namespace, **data}


class _Mark(NamedTuple):
    phase: str
    end: _Moment | None
    replica: str
    detail: str = ""


class _Init(NamedTuple):
    name: str
    began: _Moment | None
    ended: _Moment | None


@dataclass(slots=True)
class _Pod:
    """A Pod, of which the Events alone may be left, as it was at the job's first step."""

    replica: str
    object: Json = field(default_factory=dict)
    events: list[Json] = field(default_factory=list)
    number: int = 0
    created: _Moment | None = None
    inits: tuple[_Init, ...] = ()
    pulling: _Moment | None = None
    pulled: _Moment | None = None
    pull_message: str = ""
    started: _Moment | None = None

    @property
    def first_seen(self) -> float:
        stamp = _moment((self.object.get("metadata") or {}).get("creationTimestamp"))
        moments = [stamp, *map(_first_seen, self.events)]
        return min((moment.time for moment in moments if moment), default=0.0)

    @property
    def scheduled(self) -> _Moment | None:
        if seen := _first_seen(_find(self.events, "Scheduled")):
            return seen
        for condition in (self.object.get("status") or {}).get("conditions") or ():
            if condition.get("type") == "PodScheduled" and condition.get("status") == "True":
                return _moment(condition.get("lastTransitionTime"))
        return None

    @property
    def node(self) -> str:
        """From the spec, or from `Successfully assigned ns/pod to node`."""
        message = _find(self.events, "Scheduled").get("message", "")
        name = (self.object.get("spec") or {}).get("nodeName")
        return str(name or message.rpartition(" to ")[2])

    def read(self, created: _Moment | None, before: float | None) -> None:
        """Take the moments from the object and its Events; see _pods."""
        self.events.sort(key=lambda event: _first_seen(event) or _Moment(0.0))
        status = self.object.get("status") or {}
        ours = [e for e in self.events if _subject_field(e) in {"", *_TRAINING_FIELDS}]
        pulled = _find(ours, "Pulled")
        self.pulling, self.pulled = _first_seen(_find(ours, "Pulling")), _first_seen(pulled)
        self.pull_message = pulled.get("message", "")
        stamp = (self.object.get("metadata") or {}).get("creationTimestamp")
        self.created = _moment(stamp) or created
        starts = list(_container_starts(status.get("containerStatuses") or (), ours))
        in_time = [m for m in starts if before is None or m.time <= before + _ROUNDING]
        self.started = max(in_time) if in_time else min(starts, default=None)
        self.inits = tuple(self._inits(status.get("initContainerStatuses") or ()))

    def _inits(self, statuses: Sequence[Json]) -> Iterator[_Init]:
        for one in statuses:
            state = one.get("state") or {}
            ended = state.get("terminated") or {}
            began = _moment((state.get("running") or ended).get("startedAt"))
            yield _Init(one.get("name", ""), began, _moment(ended.get("finishedAt")))
        if statuses:
            return
        # Of a Pod that is gone each one ended when the next container began.
        begun = {
            found["name"]: _first_seen(event)
            for event in self.events
            if event.get("reason") == "Started"
            and (found := _INIT_FIELD.fullmatch(_subject_field(event)))
        }
        following = [*begun.values(), self.pulling or self.pulled][1:]
        for (name, began), ended in zip(begun.items(), following, strict=False):
            yield _Init(name, began, ended)


def read_output_times(backend: Backend, snapshot: Snapshot) -> dict[str, OutputTimes]:
    """Read the beginnings of a job's output, by replica; without what cannot be read.

    Of the first rank that trains it is read up to its first step, of the others the first line
    alone, and of more than MOST_AT_ONCE replicas the output of those that started last.
    """
    job = snapshot.job
    names, first = replica_names(job), speaker(job)
    elastic = target_of(job).is_elastic(job)  # any may have rank 0 then
    started = {pod.replica: pod.started.time for pod in _pods(snapshot) if pod.started}
    chosen = sorted(names, key=lambda name: (name != first, -started.get(name, 0.0)))
    ref = JobRef.of(job)

    def read(name: str) -> OutputTimes | None:
        try:
            with closing(_lines(backend, ref, name)) as lines:
                return output_times(lines if elastic or name == first else islice(lines, 1))
        except BackendError:
            return None

    chosen = chosen[:MOST_AT_ONCE]
    found = dict(zip(chosen, in_parallel(read, chosen), strict=True))
    return {name: times for name in names if (times := found.get(name)) and times.first_line}


def _lines(backend: Backend, ref: JobRef, replica: str) -> Generator[LogLine, None, None]:
    for line in backend.logs(ref, replica):
        if not line.gap:
            yield line


def output_times(lines: Iterable[LogLine]) -> OutputTimes:
    """The moments in some lines; no more of them are taken than it needs."""
    times = OutputTimes()
    for line in islice(lines, _MAX_LINES):
        now = datetime.fromisoformat(line.timestamp).timestamp()
        if times.first_line is None or line.attempt != times.attempt:
            times = OutputTimes(first_line=now, attempt=line.attempt)
        event = Event.decode(line.text)
        if event and event.kind == EventKind.PROGRESS:
            return replace(times, step=now)
        if event and event.kind == EventKind.STARTED:  # the line says when, the event how long
            waited, imported = _seconds(event, "rendezvous_s"), _seconds(event, "import_s")
            opened = None if waited is None else now - waited
            began = None if opened is None or imported is None else opened - imported
            times = replace(times, met=now, imported=opened, began=began)
    return times


def _seconds(event: Event, key: str) -> float | None:
    value = event.data.get(key)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if 0 <= value < _MAX_SECONDS else None


def timing(snapshot: Snapshot, outputs: Mapping[str, OutputTimes]) -> Timing:
    """Split the time from the submission to the first step.

    Args:
        snapshot: the job; its Events may be gone.
        outputs: of the replicas, by name, see `read_output_times`.
    """
    job, ref = snapshot.job, JobRef.of(snapshot.job)
    begin = _moment((job.get("metadata") or {}).get("creationTimestamp"))
    # The replica of rank 0, as its output shows; else the first one that has any.
    first = min(
        outputs, key=lambda n: (outputs[n].step is None, outputs[n].met is None), default=""
    )
    rank_0 = outputs.get(first, OutputTimes())
    pods = _pods(snapshot, rank_0.step or rank_0.met)
    # The replica that all others had to wait for.
    last = max(
        pods,
        key=lambda p: (not p.started, p.started.time if p.started else 0.0, p.replica == first),
        default=None,
    )
    if begin is None or last is None:
        return Timing(ref, None, missing=("there is no pod of it, and no event about one",))
    own = outputs.get(last.replica, OutputTimes())
    marks = [
        *_marks_of_pod(job, last),
        _Mark("runtime", _exact(own.first_line), last.replica),
        _Mark("import", _exact(own.imported if last.replica == first else None), last.replica),
        _Mark("meeting", _exact(rank_0.met), first),
        _Mark("step", _exact(rank_0.step), first),
    ]
    if ref.namespace == LOCAL:  # this machine has none of these
        marks = [m for m in marks if m.end or m.phase not in {"scheduling", "setup", "image"}]
    phases, behind = _phases(marks, begin)
    notes = list(_notes(last, outputs, first))
    if behind > _NOTABLE:
        notes.append(f"the clocks of the cluster and its nodes differ by {behind:.1f} s or more")
    return Timing(
        ref,
        # Where a replica came last and the first step was before it, that is the end all the same.
        None if rank_0.step is None else phases[-1].at,
        phases,
        tuple(_row(pod, outputs.get(pod.replica, OutputTimes()), begin) for pod in pods),
        tuple(notes),
        tuple(_missing(snapshot, last, outputs, first)),
    )


def _pods(snapshot: Snapshot, before: float | None = None) -> list[_Pod]:
    """The Pod of each replica, those without any left out.

    Args:
        snapshot: the job.
        before: seconds since the epoch; what was created or started later is passed over where
            something earlier is known. None: the newest.
    """
    job, target = snapshot.job, target_of(snapshot.job)
    job_name = (job.get("metadata") or {}).get("name", "")
    seen: dict[str, dict[str, _Pod]] = defaultdict(lambda: defaultdict(lambda: _Pod("")))
    for one in snapshot.pods:
        meta = one["metadata"]
        seen[replica_of(one)][meta.get("uid", "")].object = one
    for event in snapshot.events:
        about = event.get("involvedObject") or {}
        if about.get("kind") == "Pod":
            replica = target.replica_named(job_name, about.get("name", ""))
            seen[replica][about.get("uid", "")].events.append(event)
    creations = reversed(list(created_pods(target, job, snapshot.events)))  # the first one counts
    created = {replica: _first_seen(event) for replica, event in creations}
    found = []
    for name in replica_names(job):
        pods = sorted(seen[name].values(), key=lambda pod: pod.first_seen)
        in_time = [pod for pod in pods if before is None or pod.first_seen <= before + _ROUNDING]
        for pod in (in_time or pods[:1])[-1:]:
            pod.replica, pod.number = name, pods.index(pod)
            pod.read(None if pod.number else created.get(name), before)
            found.append(pod)
    return found


def _marks_of_pod(job: Json, last: _Pod) -> Iterator[_Mark]:
    for condition in (job.get("status") or {}).get("conditions") or ():
        if condition.get("type") == "Suspended" and condition.get("status") == "False":
            resumed = _moment(condition.get("lastTransitionTime"))
            late = last.created and resumed and last.created.time + _ROUNDING < resumed.time
            if resumed and not late:
                yield _Mark("suspended", resumed, "")
            break
    yield _Mark("pod", last.created, last.replica)
    yield _Mark("scheduling", last.scheduled, last.replica, last.node and f"to {last.node}")
    first = last.inits[0].began if last.inits else last.pulling or last.pulled
    yield _Mark("setup", first, last.replica, "network, volumes")
    for init in last.inits:
        yield _Mark("init", init.ended, last.replica, init.name)
    detail = _pull_time(last.pull_message)
    if last.pulled and not last.pulling:
        detail = "was on the node"
    yield _Mark("image", last.pulled, last.replica, detail)
    yield _Mark("container", last.started, last.replica)


def _phases(marks: Sequence[_Mark], begin: _Moment) -> tuple[tuple[Phase, ...], float]:
    """The phases between the marks, and by how many seconds clocks seem to differ."""
    phases: list[Phase] = []
    joined: list[str] = []
    before, behind = begin, 0.0
    for mark in marks:
        joined.append(mark.phase)
        if mark.end is None:
            continue
        behind = max(behind, before.time - mark.end.time - (not mark.end.exact) * _ROUNDING)
        end = max(before, mark.end)
        seconds, at = end.time - before.time, end.time - begin.time
        name, exact = "+".join(dict.fromkeys(joined)), before.exact and end.exact
        phases.append(Phase(name, seconds, at, exact, mark.replica, mark.detail))
        before, joined = end, []
    return tuple(phases), behind


def _row(pod: _Pod, own: OutputTimes, begin: _Moment) -> Row:
    moments = (
        pod.created,
        pod.scheduled,
        pod.inits[-1].ended if pod.inits else None,
        pod.pulled,
        pod.started,
        _exact(own.first_line),
        _exact(own.imported),
        _exact(own.met),
    )
    after = (None if moment is None else max(moment.time - begin.time, 0.0) for moment in moments)
    return Row(pod.replica, pod.node, *after)


def _notes(last: _Pod, outputs: Mapping[str, OutputTimes], first: str) -> Iterator[str]:
    rank_0 = outputs.get(first, OutputTimes())
    if rank_0.met is not None and rank_0.imported is not None and rank_0.began is not None:
        waited = rank_0.met - rank_0.imported
        if last.replica != first and waited >= _NOTABLE:
            yield (
                f"{first} imported for {rank_0.imported - rank_0.began:.1f} s and then waited"
                f" {waited:.1f} s for the others; {last.replica} was started last"
            )
    if last.number:
        yield f"this is Pod number {last.number + 1} of {last.replica}"
    for name in dict.fromkeys([first, last.replica]):
        if name in outputs and outputs[name].attempt:
            yield f"this is start number {outputs[name].attempt + 1} of {name}'s container"


def _missing(
    snapshot: Snapshot, last: _Pod, outputs: Mapping[str, OutputTimes], first: str
) -> Iterator[str]:
    rank_0 = outputs.get(first, OutputTimes())
    yet = "" if job_status(snapshot).state.finished else " yet"
    if last.started is None and last.object:
        yield f"{last.replica} has not been started yet; k8sjob why says what it waits for"
    elif JobRef.of(snapshot.job).namespace != LOCAL and last.pulled is None:
        yield f"when {last.replica}'s image was there: a cluster keeps Events for about an hour"
    if last.started and last.replica not in outputs:
        kept = "has nothing, or cannot be read" if last.object else "is gone with its Pod"
        yield f"what {last.replica} did then: its output {kept}"
    if first and rank_0.met is None and (not yet or rank_0.step is None):
        yield (
            f"when the processes met: it is not in the output of {first}{yet}; a script with"
            " runtime.session() reports it"
        )
    elif rank_0.met is not None and rank_0.step is None:
        yield (
            f"the first step: there is none in the output of {first}{yet}; run.step(...) of a"
            " session reports it"
        )


def _container_starts(statuses: Sequence[Json], events: Iterable[Json]) -> Iterator[_Moment]:
    """When the training container was started, each time that is known."""
    stamps = [
        _moment((state.get(kind) or {}).get("startedAt"))
        for status in statuses
        if status.get("name") in CONTAINER_NAMES
        for state in (status.get("state") or {}, status.get("lastState") or {})
        for kind in ("running", "terminated")
    ]
    seen = (_first_seen(event) for event in events if event.get("reason") == "Started")
    yield from (moment for moment in (*stamps, *seen) if moment)


def _moment(stamp: str | None) -> _Moment | None:
    return _Moment(datetime.fromisoformat(stamp).timestamp(), "." in stamp) if stamp else None


def _exact(time: float | None) -> _Moment | None:
    return None if time is None else _Moment(time)


def _find(events: Iterable[Json], reason: str) -> Json:
    return next((event for event in events if event.get("reason") == reason), {})


def _first_seen(event: Json) -> _Moment | None:
    """When an Event was first seen; the scheduler gives eventTime alone."""
    created = (event.get("metadata") or {}).get("creationTimestamp")
    return _moment(event.get("firstTimestamp") or event.get("eventTime") or created)


def _subject_field(event: Json) -> str:
    return (event.get("involvedObject") or {}).get("fieldPath") or ""


def _pull_time(message: str) -> str:
    """From `Successfully pulled image "x" in 1m2.5s (1m3s including waiting)`; may be empty."""
    found = _PULL_TIME.search(message)
    parts = re.findall(r"([0-9.]+)(h|ms|m|s|µs|ns)", found["alone"]) if found else []
    try:
        seconds = sum(float(number) * _UNITS[unit] for number, unit in parts)
    except ValueError:
        return ""
    return f"pulled in {seconds:.1f} s" if parts else ""


def _rounded(value: Any) -> Any:
    """With floats to the millisecond."""
    if isinstance(value, dict):
        return {key: _rounded(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_rounded(part) for part in value]
    return round(value, 3) if isinstance(value, float) else value

"""The time from a submission to the first training step, split into phases.

A job that ran before it was suspended is split from the suspension on, or if that is not known from
its resume on.

A group begins when its last replica has come, so the split follows the replica whose container was
started last, and rank 0 from the rendezvous on. Nothing is guessed: a phase whose end is
not known is joined with the next one that has an end. Kubernetes keeps most times as whole seconds;
a Pod that is gone is known by its Events for about an hour.
"""

from __future__ import annotations

import json
import math
import re
from collections import defaultdict
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from itertools import islice, product
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from k8sjob.backends.api import LOCAL, JobRef
from k8sjob.contract import Event, EventKind
from k8sjob.errors import BackendError
from k8sjob.kube.objects import Object, Pod, moment
from k8sjob.observe.logs import MOST_AT_ONCE, in_parallel
from k8sjob.observe.status import job_status, reporting_replica, training_fields
from k8sjob.observe.suspension import last_suspension, read_related
from k8sjob.sanitize import real
from k8sjob.targets.jobs import replica_names

if TYPE_CHECKING:
    from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence

    from k8sjob.backends.api import Backend, LogLine, Snapshot
    from k8sjob.kube.objects import Json
    from k8sjob.observe.suspension import Suspension

_INIT_FIELD: Final = re.compile(r"spec\.initContainers\{(?P<name>[^}]+)\}")
_ROUNDING: Final = 1.0
"""Seconds by which whole seconds may be behind."""
_NOTABLE: Final = 0.5
"""Seconds that are worth a note."""
_MAX_LINES: Final = 20_000
"""Lines without a step after which output is taken to report none."""
_MAX_SECONDS: Final = 1e7
"""A longer time in an event is not believed."""


@dataclass(frozen=True, slots=True)
class OutputTimes:
    """Moments in a replica's output, in seconds since the epoch; None: not in it.

    They are of the attempt that reached a training step, else of the last one.

    Attributes:
        first_line: when it wrote its first line.
        began: when the process of rank 0 was started.
        imported: when that had imported what it needs, and opened its session.
        met: when all processes had joined.
        step: when the first training step was done.
        attempt: how often the container had been started before.
    """

    first_line: float | None = None
    began: float | None = None
    imported: float | None = None
    met: float | None = None
    step: float | None = None
    attempt: int = 0


_PHASE_ENDS: Final = {
    "suspended": "suspended or queued",
    "pod": "pod created",
    "scheduling": "scheduled",
    "setup": "pod set up",
    "init": "init container",
    "image": "image ready",
    "container": "container started",
    "runtime": "first line",
    "import": "imported",
    "meeting": "processes joined",
    "step": "first step",
}
"""The event that ends each phase."""


@dataclass(frozen=True, slots=True)
class Phase:
    """A part of the time; docs/reference/json.md describes the fields."""

    phase: str
    seconds: float
    at: float
    exact: bool
    replica: str
    detail: str = ""

    @property
    def ends(self) -> str:
        """The event at its end, for people."""
        return ", ".join(_PHASE_ENDS.get(part, part) for part in self.phase.split("+"))


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
    """The phases of a job up to its first training step.

    Attributes:
        seconds: from its submission, or see `since`, to its first step; None: none is known.
        since: what all moments count from: "submission", "suspension" or "resume".
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
    since: str = "submission"

    def as_dict(self) -> dict[str, Any]:
        """The same as JSON, in milliseconds; docs/reference/json.md describes each field."""
        data = json.loads(json.dumps(asdict(self)), parse_float=lambda text: round(float(text), 3))
        del data["ref"]
        return {"name": self.ref.name, "namespace": self.ref.namespace, **data}


# Moments are seconds since the epoch. One without a fraction is known only to the second.


class _Mark(NamedTuple):
    """The end of a phase."""

    phase: str
    end: float | None
    replica: str
    detail: str = ""


_Life = tuple[Pod, list["Json"]]
"""A Pod of a replica, empty if it is gone, and the Events about it, oldest first."""


class Start(NamedTuple):
    """The phases of a replica's Pod up to the start of its training container."""

    replica: str
    node: str
    exists: bool  # else only Events are left of it
    earlier: int  # Pods of the replica before this one
    marks: tuple[_Mark, ...]

    def end(self, phase: str) -> float | None:
        """The end of a phase, or of the last one of that name."""
        return next((mark.end for mark in reversed(self.marks) if mark.phase == phase), None)


def read_timing(backend: Backend, snapshot: Snapshot) -> Timing:
    """Split the time of a job, by its objects and its output."""
    related = read_related(backend, snapshot)
    return timing(snapshot, read_output_times(backend, snapshot, related), related)


def read_output_times(
    backend: Backend, snapshot: Snapshot, related: Iterable[Json] = ()
) -> dict[str, OutputTimes]:
    """Read the beginnings of a job's output, by replica; without what cannot be read.

    Of the first rank that trains it is read up to its first step, of the others the first line
    alone, and of more than MOST_AT_ONCE replicas the output of those that started last.
    """
    job, paused = snapshot.job, _ended_pause(snapshot, related)
    # All output before it is of a run before the suspension.
    since = paused.end if paused and paused.end and not paused.first else 0.0
    names, first = replica_names(job), reporting_replica(job)
    elastic = job.is_elastic  # any may have rank 0 then
    started = {start.replica: start.end("container") or 0.0 for start in starts_of(snapshot)}
    chosen = sorted(names, key=lambda name: (name != first, -started.get(name, 0.0)))

    def read(name: str) -> OutputTimes | None:
        try:
            with closing(_lines(backend, JobRef.of(job), name, since)) as lines:
                return output_times(lines if elastic or name == first else islice(lines, 1))
        except BackendError:
            return None

    chosen = chosen[:MOST_AT_ONCE]
    outputs = dict(zip(chosen, in_parallel(read, chosen), strict=True))
    return {name: times for name in names if (times := outputs.get(name)) and times.first_line}


def _lines(
    backend: Backend, ref: JobRef, replica: str, since: float
) -> Generator[LogLine, None, None]:
    from_then = datetime.fromtimestamp(since, UTC) if since else None
    lines = backend.logs(ref, replica, since=from_then)
    yield from (line for line in lines if not line.gap and line.time >= since)


def output_times(lines: Iterable[LogLine]) -> OutputTimes:
    """The moments in some lines, of which no more are read than needed."""
    # Not by the fold of a training: that keeps the last report, by the process's own clock, and
    # this needs the first one, by the clock of the node that stamps each line, of each attempt.
    times = OutputTimes()
    for line in islice(lines, _MAX_LINES):
        now = line.time
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
    value = real(event.data.get(key))
    return value if value is not None and 0 <= value < _MAX_SECONDS else None


def timing(
    snapshot: Snapshot, outputs: Mapping[str, OutputTimes], related: Iterable[Json] = ()
) -> Timing:
    """Split the time from the submission to the first step; `related`: see last_suspension."""
    job, ref = snapshot.job, JobRef.of(snapshot.job)
    begin, since = _moment(job.created), "submission"
    paused = _ended_pause(snapshot, related)
    if paused and not paused.first:
        begin, since = paused.begin or paused.end, "suspension" if paused.begin else "resume"
    # Of an elastic job any replica may have rank 0.
    # The replica of rank 0, as its output shows; else the first one that has any.
    reached = {name: (times.step is None, times.met is None) for name, times in outputs.items()}
    first = min(reached, key=reached.__getitem__, default="")
    rank_0 = outputs.get(first, OutputTimes())
    starts = starts_of(snapshot, rank_0.step or rank_0.met or math.inf)
    # The replica that all others had to wait for.
    last = max(
        starts, key=lambda s: (s.end("container") or math.inf, s.replica == first), default=None
    )
    if begin is None or last is None:
        return Timing(ref, None, missing=("there is no pod of it, and no event about one",))
    last_output = outputs.get(last.replica, OutputTimes())
    marks = [
        *([_Mark("suspended", paused.end, "")] if paused and since != "resume" else []),
        *last.marks,
        _Mark("runtime", last_output.first_line, last.replica),
        _Mark("import", last_output.imported if last.replica == first else None, last.replica),
        _Mark("meeting", rank_0.met, first),
        _Mark("step", rank_0.step, first),
    ]
    if ref.namespace == LOCAL:  # this machine has none of these
        marks = [m for m in marks if m.end or m.phase not in {"scheduling", "setup", "image"}]
    phases, behind = _phases(marks, begin)
    notes = list(_notes(last, outputs, first))
    if since == "suspension":
        notes.append("the job ran before it was suspended; all times are from the suspension on")
    if behind > _NOTABLE:
        notes.append(f"the clocks of the cluster and its nodes differ by {behind:.1f} s or more")
    return Timing(
        ref,
        # If a replica came last, after the first step, that step is the end all the same.
        None if rank_0.step is None else phases[-1].at,
        phases,
        tuple(_row(start, outputs.get(start.replica, OutputTimes()), begin) for start in starts),
        tuple(notes),
        tuple(_missing(snapshot, last, outputs, first, since)),
        since,
    )


def starts_of(snapshot: Snapshot, before: float = math.inf) -> list[Start]:
    """The start of each replica that has, or had, a Pod.

    What was created or started after `before` is passed over where something earlier is known.
    """
    job = snapshot.job
    fields = training_fields(job)
    lives: dict[str, dict[str, _Life]] = defaultdict(dict)  # of each replica, by the uid of its Pod
    for pod in map(Pod, snapshot.pods):
        lives[job.replica_of(pod.raw)][pod.uid] = pod, []
    for event in sorted(snapshot.events, key=lambda event: _first_seen(event) or 0.0):
        about = Object(event).part("involvedObject")
        if about.get("kind") == "Pod":
            replica = job.replica_named(about.get("name", ""))
            lives[replica].setdefault(about.get("uid", ""), (Pod({}), []))[1].append(event)
    creations = reversed(list(job.created_pods(snapshot.events)))  # the first one counts
    created = {replica: _first_seen(event) for replica, event in creations}
    starts = []
    for name in replica_names(job):
        if begun := sorted(lives[name].values(), key=_begun):
            number = max(sum(_begun(life) <= before + _ROUNDING for life in begun) - 1, 0)
            pod, events = begun[number]
            created_at = _moment(pod.created) or (None if number else created.get(name))
            # Without a Pod: `Successfully assigned ns/pod to node`.
            bound = _find(events, "Scheduled").get("message", "").rpartition(" to ")[2]
            node = pod.node or bound
            ours = [event for event in events if _subject_field(event) in fields]
            ends = _marks(pod, node, events, ours, created=created_at, before=before)
            marks = tuple(_Mark(phase, end, name, detail) for phase, end, detail in ends)
            starts.append(Start(name, node, bool(pod.raw), number, marks))
    return starts


def _begun(life: _Life) -> float:
    pod, events = life
    return min(filter(None, (_moment(pod.created), *map(_first_seen, events))), default=0.0)


def _marks(
    pod: Pod,
    node: str,
    events: Sequence[Json],
    ours: Sequence[Json],
    *,
    created: float | None,
    before: float,
) -> Iterator[tuple[str, float | None, str]]:
    """The phases of a Pod, up to the start of its training container, their ends and details.

    `ours` are the Events that are not about its other containers.
    """
    placed = pod.condition("PodScheduled")
    scheduled = _first_seen(_find(events, "Scheduled"))
    if not scheduled and placed.true and placed.since:
        scheduled = placed.since.timestamp()
    pulling, pulled = _first_seen(_find(ours, "Pulling")), _find(ours, "Pulled")
    image = pulling or _first_seen(pulled)
    took = re.search(r" in ([0-9.hmsµn]+)", pulled.get("message", ""))
    detail = "was on the node" if pulled and not pulling else f"pulled in {took[1]}" if took else ""
    inits = list(_inits(pod, events, image))
    states = product(("state", "lastState"), ("running", "terminated"))
    starts = [_moment(pod.container.part(*path).get("startedAt")) for path in states]
    starts += [_first_seen(event) for event in ours if event.get("reason") == "Started"]
    # A container that could not be started has "started" at 0, in 1970.
    begun = [at for at in starts if at]
    in_time = [at for at in begun if at <= before + _ROUNDING]
    started = max(in_time, default=min(begun, default=None))

    yield "pod", created, ""
    yield "scheduling", scheduled, node and f"to {node}"
    yield "setup", inits[0][1] if inits else image, "network, volumes"
    yield from (("init", ended, name) for name, _, ended in inits)
    yield "image", _first_seen(pulled), detail
    yield "container", started, ""


def _inits(
    pod: Pod, events: Sequence[Json], following: float | None
) -> Iterator[tuple[str, float | None, float | None]]:
    """The init containers, when each began, and when it ended."""
    statuses = pod.status.get("initContainerStatuses") or ()
    for status in map(Object, statuses):
        ended = status.part("state", "terminated")
        began = (status.part("state", "running") or ended).get("startedAt")
        yield status.raw.get("name", ""), _moment(began), _moment(ended.get("finishedAt"))
    if not statuses:  # of a Pod that is gone each one ended when the next container began
        begun = {
            container["name"]: _first_seen(event)
            for event in events
            if event.get("reason") == "Started"
            and (container := _INIT_FIELD.fullmatch(_subject_field(event)))
        }
        yield from zip(begun, begun.values(), [*begun.values(), following][1:], strict=True)


def _ended_pause(snapshot: Snapshot, related: Iterable[Json]) -> Suspension | None:
    """The last suspension, if Pods were created after its end, as they always are in a cluster."""
    paused = last_suspension(snapshot, related)
    creations = [at for pod in snapshot.pods if (at := _moment(Object(pod).created))]
    if paused is None or paused.end is None:
        return None
    return None if creations and max(creations) + _ROUNDING < paused.end else paused


def _phases(marks: Sequence[_Mark], begin: float) -> tuple[tuple[Phase, ...], float]:
    """The phases between the marks, and by how many seconds clocks seem to differ."""
    phases: list[Phase] = []
    joined: list[str] = []
    before, behind = begin, 0.0
    for mark in marks:
        joined.append(mark.phase)
        if mark.end is None:
            continue
        # An end before the one before it: the clocks differ, unless rounding explains it.
        behind = max(behind, before - mark.end - mark.end.is_integer() * _ROUNDING)
        end = max(before, mark.end)
        name, exact = "+".join(dict.fromkeys(joined)), not (before.is_integer() or end.is_integer())
        phases.append(Phase(name, end - before, end - begin, exact, mark.replica, mark.detail))
        before, joined = end, []
    return tuple(phases), behind


def _row(start: Start, output: OutputTimes, begin: float) -> Row:
    ends = [start.end(phase) for phase in ("pod", "scheduling", "init", "image", "container")]
    ends += output.first_line, output.imported, output.met
    after = (None if at is None else max(at - begin, 0.0) for at in ends)
    return Row(start.replica, start.node, *after)


def _notes(last: Start, outputs: Mapping[str, OutputTimes], first: str) -> Iterator[str]:
    rank_0 = outputs.get(first, OutputTimes())
    if rank_0.met is not None and rank_0.imported is not None and rank_0.began is not None:
        waited = rank_0.met - rank_0.imported
        if last.replica != first and waited >= _NOTABLE:
            yield (
                f"{first} imported for {rank_0.imported - rank_0.began:.1f} s and then waited"
                f" {waited:.1f} s for the others; {last.replica} was started last"
            )
    if last.earlier:
        yield f"this is Pod number {last.earlier + 1} of {last.replica}"
    for name in dict.fromkeys([first, last.replica]):
        if name in outputs and outputs[name].attempt:
            yield f"this is start number {outputs[name].attempt + 1} of {name}'s container"


def _missing(
    snapshot: Snapshot, last: Start, outputs: Mapping[str, OutputTimes], first: str, since: str
) -> Iterator[str]:
    rank_0 = outputs.get(first, OutputTimes())
    if since == "resume":
        yield "when it was suspended, and whether it ran before; all times are from its resume on"
    yet = "" if job_status(snapshot).state.finished else " yet"
    if last.end("container") is None and last.exists:
        yield f"{last.replica} has not been started yet; k8sjob why shows what it is waiting for"
    elif JobRef.of(snapshot.job).namespace != LOCAL and last.end("image") is None:
        yield f"when {last.replica}'s image was there: a cluster keeps Events for about an hour"
    if last.end("container") and last.replica not in outputs:
        remains = "has nothing, or cannot be read" if last.exists else "is gone with its Pod"
        yield f"what {last.replica} did then: its output {remains}"
    if first and rank_0.met is None and (not yet or rank_0.step is None):
        yield (
            f"when the processes joined: it is not in the output of {first}{yet}; a script with"
            " runtime.session() reports it"
        )
    elif rank_0.met is not None and rank_0.step is None:
        yield (
            f"the first step: there is none in the output of {first}{yet}; run.step(...) of a"
            " session reports it"
        )


def _moment(stamp: str | None) -> float | None:
    time = moment(stamp)
    return time.timestamp() if time else None


def _find(events: Iterable[Json], reason: str) -> Json:
    return next((event for event in events if event.get("reason") == reason), {})


def _first_seen(event: Json) -> float | None:
    """When an Event was first seen; the scheduler gives only eventTime."""
    first = event.get("firstTimestamp") or event.get("eventTime")
    return _moment(first or Object(event).created)


def _subject_field(event: Json) -> str:
    return Object(event).part("involvedObject").get("fieldPath") or ""

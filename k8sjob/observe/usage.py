"""The use of a job's GPU hours: the time of each replica's devices, split by what the job did.

Time is that of the job's objects and of the lines of its output. Of a job that trains, the reports
of the replica that trains first stand for all: they compute the same step. Every second from the
creation to a replica's end has exactly one use, so that the parts sum to the whole; what is not
known is one, too.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from contextlib import suppress
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cache
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final

from k8sjob.backends.api import TOO_FEW_GPUS, JobRef
from k8sjob.contract import Event, EventKind
from k8sjob.errors import BackendError
from k8sjob.kube.capacity import asked_by, counts_gpus
from k8sjob.kube.objects import Pod
from k8sjob.observe.diagnose.finding import load_data
from k8sjob.observe.holding import cut, holding, job_times
from k8sjob.observe.logs import replica_of_rank
from k8sjob.observe.status import job_status, reporting_replica
from k8sjob.observe.suspension import last_suspension, read_related
from k8sjob.observe.training import Progress, starts_processes

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
    from datetime import datetime

    from k8sjob.backends.api import Backend, LogLine, Snapshot
    from k8sjob.kube.objects import Json
    from k8sjob.observe.holding import Holding
    from k8sjob.targets.api import Job, RoleReplicas

_SILENT: Final = 10.0
"""A stall: this multiple of the usual time between reports, and at least this many seconds."""


class Use(StrEnum):
    """The uses of a device's time, waiting for it included."""

    QUEUED = "queued"
    """Nothing was held: the job was suspended, or the replica waited for a node."""
    STARTING = "starting"
    """From a node to the first step: image, init containers, imports, rendezvous; again after each
    failure."""
    TRAINING = "training"
    WAITING = "waiting"
    """In steps, lost to the slowest rank."""
    REPEATED = "repeated"
    """Training that a later start did again, from an older checkpoint."""
    STALLED = "stalled"
    """After the last report of a start that made no more progress."""
    IDLE = "idle"
    """After the training, until the replica ended."""
    RUNNING = "running"
    """The time of a script that reports no steps."""
    UNKNOWN = "unknown"
    """The job ran, or may have run before a suspension, and neither Pods nor output are left."""


NEXT_STEPS: Final = {Use(use): str(step) for use, step in load_data("usage").items()}
"""The next step for each use that could be less."""
_NOTABLE: Final = 0.05
"""A smaller part of the whole is not worth a note."""


@dataclass(frozen=True, slots=True)
class Usage:
    """The device seconds of a job.

    Attributes:
        device: "GPU", or "CPU" where no replica asks for GPUs.
        seconds: device seconds by use; uses without any are left out.
        nodes: the same of each node.
        slowed: device seconds that waited for the ranks on a node, by node.
        refused: why its preflight refused a node, by node.
    """

    ref: JobRef
    device: str
    seconds: Mapping[Use, float]
    nodes: Mapping[str, Mapping[Use, float]] = field(default_factory=dict)
    slowed: Mapping[str, float] = field(default_factory=dict)
    labels: Mapping[str, str] = field(default_factory=dict)
    refused: Mapping[str, str] = field(default_factory=dict)

    @property
    def total(self) -> float:
        """Device seconds of all uses."""
        return sum(self.seconds.values())

    @property
    def held(self) -> float:
        """Device seconds in which a device was held, as far as that is known."""
        return held_seconds(self.seconds)

    @property
    def avoidable(self) -> Use | None:
        """The largest use that could be less; None if none is notable."""
        reducible = {use: self.seconds.get(use, 0.0) for use in NEXT_STEPS}
        most = max(reducible, key=reducible.__getitem__)
        return most if reducible[most] > _NOTABLE * self.total else None

    @property
    def note(self) -> str:
        """The largest avoidable part in a sentence; empty without one."""
        if (use := self.avoidable) is None:
            return ""
        part = self.seconds[use] / self.total
        hours = shown_hours(self.seconds[use])
        return f"{hours} {self.device} hours ({part:.0%}) went to {use}; {NEXT_STEPS[use]}"

    def as_dict(self) -> dict[str, Any]:
        """The same as JSON; docs/reference/json.md describes each field."""
        return {
            "name": self.ref.name,
            "namespace": self.ref.namespace,
            "device": self.device,
            "seconds": _rounded({use: self.seconds[use] for use in Use if use in self.seconds}),
            "nodes": {name: _rounded(uses) for name, uses in self.nodes.items() if name},
            "slowed": _rounded(self.slowed),
            "refused": dict(self.refused),
            "avoidable": self.avoidable,
            "note": self.note,
        }


def held_seconds(seconds: Mapping[Use, float]) -> float:
    """The seconds of these in which a device was held, as far as that is known."""
    return sum(seconds.values()) - sum(seconds.get(use, 0.0) for use in (Use.QUEUED, Use.UNKNOWN))


def _rounded(seconds: Mapping[Any, float]) -> dict[str, float]:
    return {str(name): round(value, 3) for name, value in seconds.items()}


def shown_hours(seconds: float) -> str:
    """Hours in three digits, or as many as they have."""
    hours = seconds / 3600
    return f"{hours:.3g}" if hours < 1000 else f"{hours:.0f}"


def slow_nodes(usages: Iterable[Usage]) -> dict[str, list[Usage]]:
    """The nodes that were the slowest in two jobs or more, each with these jobs.

    A node counts in a job of several nodes whose ranks waited notably, most of all for that node.
    """
    slowed: dict[str, list[Usage]] = defaultdict(list)
    for job_usage in usages:
        waited = job_usage.seconds.get(Use.WAITING, 0.0)
        trained = waited + job_usage.seconds.get(Use.TRAINING, 0.0)
        several = len([name for name in job_usage.nodes if name]) > 1
        for name, seconds in job_usage.slowed.items():
            if several and waited > _NOTABLE * trained and seconds > waited / 2:
                slowed[name].append(job_usage)
    return {name: jobs for name, jobs in slowed.items() if len(jobs) > 1}


@dataclass(slots=True)
class Session:
    """One start of the group, as the output of the replica that reports shows it."""

    begin: float
    end: float
    attempt: int
    joined: float | None = None
    logs: bool = False
    finished: float | None = None
    reports: list[Progress] = field(default_factory=list)
    marks: list[tuple[float, Event]] = field(default_factory=list)

    def take(self, event: Event, at: float) -> None:
        """Take in an event of its output, by the time of its line."""
        if event.kind == EventKind.STARTED:
            self.joined = at
        elif event.kind == EventKind.FINISHED:
            self.finished = at
        elif event.kind == EventKind.METRICS:
            self.logs = True
        elif event.kind == EventKind.PROGRESS:
            report = Progress.of(event.data, at)
            self.reports += [report] if report.is_placed else []
        else:
            self.marks.append((at, event))


@dataclass(frozen=True, slots=True)
class Span:
    """A time with one use, except the part of it that waits for the slowest rank."""

    begin: float
    end: float
    use: Use
    waits: float = 0.0
    slowest: int | None = None


def read_usage(backend: Backend, snapshot: Snapshot, *, since: datetime | None = None) -> Usage:
    """The usage of a job, from its objects and the output of the replica that reports."""
    related = read_related(backend, snapshot)
    return usage(snapshot, reported_lines(backend, snapshot.job), since=since, related=related)


def reported_lines(backend: Backend, job: Job) -> Iterator[LogLine]:
    """The output of the replica that reports, as far as it can be read."""
    with suppress(BackendError):
        yield from (
            line for line in backend.logs(JobRef.of(job), reporting_replica(job)) if not line.gap
        )


def usage(
    snapshot: Snapshot,
    lines: Iterable[LogLine],
    *,
    since: datetime | None = None,
    related: Iterable[Json] = (),
) -> Usage:
    """Split the device seconds of a job, by the lines of the replica that reports.

    What was before `since` is left out; for `related` see last_suspension.
    """
    job, status = snapshot.job, job_status(snapshot)
    now = (status.finished or snapshot.now).timestamp()
    created = status.created.timestamp() if status.created else now
    begin = max(created, since.timestamp()) if since else created
    sessions = list(sessions_of(lines))
    spans = list(spans_of(sessions, now, ended=status.state.finished))
    present = max(snapshot.now.timestamp(), now)
    starts = [(session.begin, session.end) for session in sessions]
    times = job_times(snapshot, status, last_suspension(snapshot, related), starts, present)
    device, held_by = _devices(snapshot)
    seconds: dict[Use, float] = defaultdict(float)
    nodes: dict[str, dict[Use, float]] = defaultdict(lambda: defaultdict(float))
    waited: dict[int | None, float] = defaultdict(float)  # for a rank
    pods: defaultdict[str, list[Pod]] = defaultdict(list)
    for pod in map(Pod, snapshot.pods):
        pods[job.replica_of(pod.raw)].append(pod)
    node_of = {name: of_replica[-1].node for name, of_replica in pods.items()}

    @cache  # of large jobs most replicas are alike
    def one_device(replica: Holding) -> tuple[dict[Use, float], dict[int | None, float]]:
        uses: dict[Use, float] = defaultdict(float)
        slow: dict[int | None, float] = defaultdict(float)
        for span in _replica_spans(replica, spans, created, times.finished):
            duration = max(span.end - max(span.begin, begin), 0.0)
            uses[span.use] += duration * (1 - span.waits)
            uses[Use.WAITING] += duration * span.waits
            slow[span.slowest] += duration * span.waits
        return uses, slow

    for name, amount in _amounts(held_by, pods):
        uses, slow = one_device(holding(times, pods.get(name, [])))
        for use, duration in uses.items():
            if duration and amount:
                seconds[use] += duration * amount
                nodes[node_of.get(name, "")][use] += duration * amount
        for rank, duration in slow.items():
            waited[rank] += duration * amount
    slowed: dict[str, float] = defaultdict(float)
    for rank, duration in waited.items():
        with suppress(BackendError):  # the job has no such rank
            node = "" if rank is None else node_of.get(replica_of_rank(job, rank), "")
            if duration and node:
                slowed[node] += duration
    refused = {
        node: why for pod in snapshot.pods for node, why in Pod(pod).preflight_refusals.items()
    }
    return Usage(status.ref, device, seconds, nodes, slowed, job.labels, refused)


def _devices(snapshot: Snapshot) -> tuple[str, list[tuple[RoleReplicas, float]]]:
    """The kind of device, and how many each replica of a role asks for.

    On a machine that has too few GPUs the job runs on CPUs, and holds none.
    """
    gpus: list[tuple[RoleReplicas, float]] = []
    cpus: list[tuple[RoleReplicas, float]] = []
    for role in snapshot.job.replicas:
        asked = asked_by(role.main)
        gpus.append((role, sum(float(n) for name, n in asked.items() if counts_gpus(name))))
        cpus.append((role, float(asked.get("cpu", 1))))
    on_cpus = any(event.get("reason") == TOO_FEW_GPUS for event in snapshot.events)
    has_gpus = any(amount for role, amount in gpus if role.count > 0)
    return ("GPU", gpus) if has_gpus and not on_cpus else ("CPU", cpus)


def _amounts(
    held_by: Iterable[tuple[RoleReplicas, float]], pods: Collection[str]
) -> Iterator[tuple[str, float]]:
    """The devices of each replica that has Pods, and of all others of its role under no name."""
    for role, amount in held_by:
        present = [name for name in pods if name in role]
        yield from ((name, amount) for name in present)
        yield "", amount * max(role.count - len(present), 0)


# --- what the group did ---------------------------------------------------------------------------


def sessions_of(lines: Iterable[LogLine]) -> Iterator[Session]:
    """The starts of the group: a container's, and those within a container after a failure."""
    session: Session | None = None
    for line in lines:
        at = line.time
        event = Event.decode(line.text)
        # The group starts: its agent starts processes, or these join.
        starts = event is not None and (starts_processes(event) or event.kind == EventKind.STARTED)
        again = session is not None and session.joined is not None and starts
        if session is None or line.attempt != session.attempt or again:
            if session:
                yield session
            begin = session.end if session and again else at
            session = Session(begin, at, line.attempt)
        session.end = max(session.end, at)
        if event:
            session.take(event, at)
    if session:
        yield session


def spans_of(sessions: Sequence[Session], now: float, *, ended: bool) -> Iterator[Span]:
    """The activities of the group in order, without gaps from its first line on."""
    for number, session in enumerate(sessions):
        last = number == len(sessions) - 1
        until = sessions[number + 1].begin if not last else max(now, session.end)
        end = session.end if not last or ended else until
        if not session.reports:
            # A script that logs numbers, or never joins, runs; one whose other starts report steps,
            # or that joined and did not get to its first step, was still starting.
            starting = any(start.reports for start in sessions) or (
                session.joined and not session.logs
            )
            runs = until if starting else session.joined or session.begin
            yield Span(session.begin, runs, Use.STARTING)
            yield Span(runs, until, Use.RUNNING)
            continue
        # What a later start reports again was done in vain here.
        first = session.reports[0]
        resumed = (later.reports[0].position for later in sessions[number + 1 :] if later.reports)
        done_again = min(resumed, default=None)
        yield Span(session.begin, first.time, Use.STARTING)
        for before, report in pairwise(session.reports):
            lost = done_again is not None and report.position >= done_again
            use, waits = (Use.REPEATED, 0.0) if lost else (Use.TRAINING, report.waited or 0.0)
            yield Span(before.time, report.time, use, waits, report.slowest)
        # After the last report: the end of the script, a stall, or a last step that was lost.
        newest = session.reports[-1]
        if session.finished is not None:
            yield Span(newest.time, session.finished, Use.TRAINING)
            yield Span(session.finished, until, Use.IDLE)
            continue
        lost = done_again is not None and newest.position >= done_again
        stalled = end - newest.time > _patience(session.reports)
        tail = Use.STALLED if stalled else Use.REPEATED if lost else Use.TRAINING
        yield Span(newest.time, end, tail)
        yield Span(end, until, Use.IDLE if last else Use.STARTING)


def _patience(reports: Sequence[Progress]) -> float:
    """Seconds without a report that are a stall."""
    gaps = [after.time - before.time for before, after in pairwise(reports)]
    return _SILENT * max(statistics.median(gaps) if gaps else 0.0, 1.0) + _SILENT


# --- what a replica held --------------------------------------------------------------------------


def _replica_spans(
    times: Holding, spans: Sequence[Span], created: float, finished: float
) -> Iterator[Span]:
    """The uses of a replica's devices, from the job's creation to the replica's end."""
    for begin, end, held in cut(created, times.end, times.held):
        if not held:
            for first, last, empty in cut(begin, end, times.empty):
                yield Span(first, last, Use.QUEUED if empty else Use.UNKNOWN)
            continue
        for first, last, waits in cut(begin, min(end, finished), times.unstarted):
            yield from [Span(first, last, Use.STARTING)] if waits else _used(first, last, spans)
        if end > finished:
            yield Span(max(begin, finished), end, Use.IDLE)


def _used(begin: float, end: float, spans: Sequence[Span]) -> Iterator[Span]:
    """The spans of the group within a time; what is before them, or between, is a start."""
    at = begin
    for span in spans:
        start, stop = max(span.begin, at), min(span.end, end)
        if stop <= start:
            continue
        if start > at:
            yield Span(at, start, Use.STARTING)
        yield Span(start, stop, span.use, span.waits, span.slowest)
        at = stop
    if at < end:
        yield Span(at, end, Use.IDLE if spans else Use.RUNNING)

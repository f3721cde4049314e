"""Jobs while they run: one with its output, or what changes about many."""

from __future__ import annotations

import math
import re
import time
from collections import defaultdict, deque
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from k8sjob.backends.api import LogLine, Snapshot
from k8sjob.contract import LOG, Event, EventKind, ExitCode
from k8sjob.errors import BackendError, JobNotFound
from k8sjob.kube.client.listwatch import Kind
from k8sjob.kube.objects import Object, event_time
from k8sjob.observe.diagnose import Cause, as_data, diagnose
from k8sjob.observe.logs import MOST_AT_ONCE, TAIL_LINES, Excerpt
from k8sjob.observe.merge import Ended, Merge
from k8sjob.observe.status import JobStatus, job_status
from k8sjob.targets.api import JobState
from k8sjob.targets.jobs import TARGETS, job_of, replica_names

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from k8sjob.backends.api import Backend, JobRef
    from k8sjob.findings import Finding
    from k8sjob.kube.client.listwatch import CollectionChange
    from k8sjob.kube.objects import Json
    from k8sjob.observe.status import ReplicaStatus
    from k8sjob.targets.api import Job

SETTLE_SECONDS: Final = 0.5
"""How long an ended job must have been silent until its output counts as complete."""
CATCH_UP_SECONDS: Final = 15.0
"""The same while output is still to come: of a replica that has ended, or that was not read yet."""
PATIENCE_SECONDS: Final = 10.0
"""A problem that resolves itself sooner is not reported."""
LOOK_SECONDS: Final = 0.5
"""Seconds between checks of the jobs on this machine."""
LAST_LINES: Final = 50
"""Last lines that are read of a failed replica that is not followed."""
_UID: Final = re.compile(r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}")
_REASONS_IN_STATE: Final = frozenset(
    {
        "BackOff",
        "CrashLoopBackOff",
        "CreateContainerConfigError",
        "CreateContainerError",
        "ErrImagePull",
        "Error",
        "ImagePullBackOff",
        "InvalidImageName",
        "OOMKilled",
        "Unschedulable",
        *(f"{target.kind}{state}" for target in TARGETS for state in ("Failed", "Restarting")),
    }
)
"""Reasons of warnings that say no more than the JOB and REPLICA events of the same moment."""
_CAUSES_IN_STATE: Final = frozenset({Cause.WAITING, Cause.SUSPENDED, Cause.DELETING, Cause.STOPPED})
"""Causes that are no problem, or that the job's state names as well."""
_QUEUE: Final = frozenset({Cause.QUEUED, Cause.NO_QUEUE})
_LEAD: Final = re.compile(r'Error: |Failed to pull image "[^"]*": ')
"""What the kubelet puts before a message that the replica's own state has too."""
_ENDED: Final = frozenset({"Succeeded", "Failed"})
# Exit codes of replicas that end because another one failed, or that did what was asked of them.
_CONSEQUENCES: Final = frozenset({0, ExitCode.PEER_LOST, ExitCode.STOPPED})


def watch(
    backend: Backend,
    ref: JobRef,
    *,
    logs: bool = True,
    stop: threading.Event | None = None,
) -> Iterator[Event]:
    """Everything that happens to a job, from its beginning until it has ended or is gone.

    First come the lines of the replicas (LOG) and the runtime's own events, decoded from them, then
    the job's last JOB event, and what `why` would say of its end (FINDING). A suspended job has
    not ended. What `why` says of a job that is stalled for some seconds is a WARNING, once. Closing
    the iterator detaches from the job and changes nothing about it.

    Without `logs` there are no runtime events. `stop` is set from another thread to detach within a
    second.

    Raises:
        JobNotFound: there is no such job.
        BackendError: the back end could not be read any more.
    """
    watcher = _Watcher(Stalled(PATIENCE_SECONDS, backend.related), recorded=backend.recorded)
    with Merge[Snapshot | LogLine]() as merge:
        # Each source has a thread of its own, this generator is the only reader.
        # A snapshot says all that the ones before it do: a slow reader sees fewer of them.
        merge.add("", lambda stop: backend.watch(ref, stop=stop), ahead=1)
        readers = _Readers(backend, ref, merge) if logs else None
        item = None
        while not watcher.settled(merge.open, item):
            if stop and stop.is_set():
                return
            item = merge.get(0.1)
            if isinstance(item, Snapshot):
                yield from watcher.changed(item, readers)
            elif isinstance(item, Ended):
                yield from watcher.source_ended(item, ref)
            elif item is not None:
                yield watcher.line(item)
            yield from watcher.stalled()
    yield from watcher.end()


class _Watcher:
    """The state of a watch, so that each thing is reported once."""

    def __init__(self, stalled: Stalled, *, recorded: bool = False) -> None:
        self._stalled, self._recorded = stalled, recorded
        self._error: Exception | None = None
        self._newest: tuple[Snapshot, JobStatus] | None = None  # and the status that it shows
        self._pods: dict[str, Json] = {}  # the last of each replica that was not being deleted
        self._reported_job: object = None
        self._reported_replicas: dict[str, object] = {}
        self._reported_warnings: set[object] = set()
        self._tails: dict[str, deque[str]] = defaultdict(lambda: deque(maxlen=TAIL_LINES))
        self._ended_at: float | None = None
        self._last_line_at = 0.0
        self._end_stamp = ""  # by this machine's clock; lines with a later one are not waited for
        self._deleted = False

    def settled(self, sources: set[str], last: Snapshot | LogLine | Ended | None) -> bool:
        """Whether the job has ended and its output is complete, or was waited for long enough.

        The reader of the watch may be slow: as long as something waits to be read (`last`, None
        where nothing came), there may be more, however long ago the end was. What replicas write
        after the end of their job is not waited for; what they wrote before is, as a busy node or
        apiserver may take seconds to begin with it.
        """
        if self._ended_at is None:
            return False
        # All sources of lines are at their end; "" is that of the objects.
        if not sources - {""}:
            return True
        if last is None or (isinstance(last, LogLine) and last.timestamp > self._end_stamp):
            silent = time.monotonic() - max(self._ended_at, self._last_line_at)
            return silent > (CATCH_UP_SECONDS if self._is_behind(sources) else SETTLE_SECONDS)
        if isinstance(last, LogLine):
            self._last_line_at = time.monotonic()
        return False

    def _is_behind(self, sources: set[str]) -> bool:
        """Whether a source is open whose replica has ended, or runs and was not read yet.

        A job that has succeeded ran, whatever is known of its Pods. A replica that runs when its
        job is deleted may have written nothing at all.
        """
        if self._newest and self._newest[1].state is JobState.SUCCEEDED and not self._tails:
            return True
        names = {source.partition(" ")[0] for source in sources}
        behind = _ENDED if self._deleted else _ENDED | {"Running"}
        return any(
            replica.name in names
            and replica.phase in behind
            and (replica.phase in _ENDED or replica.name not in self._tails)
            for replica in self._newest_replicas
        )

    @property
    def _newest_replicas(self) -> Sequence[ReplicaStatus]:
        return self._newest[1].replicas if self._newest else ()

    def changed(self, snapshot: Snapshot, readers: _Readers | None) -> Iterator[Event]:
        """What is new in a snapshot; the terminal JOB event is kept for the end."""
        status = job_status(snapshot)
        self._newest = snapshot, status
        present = (pod for pod in snapshot.pods if not Object(pod).deleting)
        self._pods |= {snapshot.job.replica_of(pod): pod for pod in present}
        if readers:
            yield from readers.look(snapshot.job, status)
        yield from self._replicas(status)
        yield from self._warnings(snapshot)
        if not status.state.finished:
            yield from self._job(status)
        elif self._ended_at is None:
            self._ended_at = time.monotonic()
            self._end_stamp = datetime.now(UTC).isoformat()

    def source_ended(self, ended: Ended, ref: JobRef) -> Iterator[Event]:
        """A source of lines that fails is reported and left; a job that is gone has ended."""
        failed = ended.error and not isinstance(ended.error, JobNotFound)
        if not ended.source:
            if self._newest is None:
                raise ended.error or JobNotFound(
                    f"{ref} is gone; `k8sjob list` shows the existing ones"
                )
            if ended.error and failed:
                # A record that stops before the job's end still has the output up to then.
                if not self._recorded:
                    raise ended.error
                self._error = ended.error
                self._end_stamp = datetime.now(UTC).isoformat()
            self._deleted = self._ended_at is None and not failed
            self._ended_at = self._ended_at or time.monotonic()
        elif failed:
            message = f"the output of {ended.source} cannot be read any more: {ended.error}"
            alike = message.replace(ended.source, "")  # a permission is missing for all or none
            if alike not in self._reported_warnings:
                self._reported_warnings.add(alike)
                yield _warning(message, replica=ended.source)

    def stalled(self) -> Iterator[Event]:
        """What has held the job up for some time; nothing may have changed since."""
        if self._newest and self._ended_at is None:
            yield from self._stalled.look(*self._newest, self._tails, time.monotonic())

    def line(self, line: LogLine) -> Event:
        """A runtime event where the line carries one, else the line."""
        if not line.gap:
            self._tails[line.replica].append(Excerpt.of(line))
        event = Event.decode(line.text, line.replica)
        if event:
            return event
        _, attempt, timestamp, written, gap, _ = line
        data = {"text": written, "attempt": attempt, "timestamp": timestamp, "gap": gap}
        return Event(LOG, data, line.time, line.replica)

    def end(self) -> Iterator[Event]:
        """The job's last state, and why it failed."""
        if self._error:
            raise self._error
        if self._newest is None:
            return
        snapshot, status = self._newest
        yield from self._job(replace(_gone(status), finished=None) if self._deleted else status)
        if not self._deleted and status.state in (JobState.FAILED, JobState.SUCCEEDED):
            if status.state is JobState.FAILED and not snapshot.pods:
                # Under OnFailure the Job has deleted its Pods; as they were, they show the cause.
                pods = tuple(self._pods.values())
                snapshot = snapshot._replace(pods=pods, at=status.finished)
            for finding in diagnose(snapshot, self._tails):
                yield Event(EventKind.FINDING, as_data(finding), time.time(), finding.replica)

    def _job(self, status: JobStatus) -> Iterator[Event]:
        news = (status.state, status.reason, status.message)
        if news != self._reported_job:
            self._reported_job = news
            yield Event(EventKind.JOB, _job_data(status), self._now())

    def _now(self) -> float:
        """By the clock of the job's stamps, so that a reader can count from them to now."""
        return self._newest[0].now.timestamp() if self._newest else time.time()

    def _replicas(self, status: JobStatus) -> Iterator[Event]:
        fields = ("phase", "reason", "restarts", "node", "exit_code", "message", "waiting")
        for replica in status.replicas:
            if self._reported_replicas.get(replica.name) != replica:
                self._reported_replicas[replica.name] = replica
                data = {field: getattr(replica, field) for field in fields}
                yield Event(EventKind.REPLICA, data, self._now(), replica.name)

    def _warnings(self, snapshot: Snapshot) -> Iterator[Event]:
        """Each warning once, and only once one that many replicas have alike."""
        job = snapshot.job
        for event in snapshot.events:
            if event.get("type") != "Warning" or event.get("reason") in _REASONS_IN_STATE:
                continue
            # Pods of many replicas fail alike: without the Pod's name and UIDs their messages are
            # the same.
            about, message = Object(event).part("involvedObject"), event.get("message") or ""
            pod = about.get("name", "") if about.get("kind", "Pod") == "Pod" else ""
            replica = job.replica_named(pod)
            alike = _UID.sub("", message.replace(pod, "")) if replica else Object(event).uid
            if (event.get("reason"), alike) in self._reported_warnings:
                continue
            if replica and self._is_in_state(replica, message):
                continue
            self._reported_warnings.add((event.get("reason"), alike))
            last = event_time(event).timestamp()
            yield _warning(message, reason=event.get("reason", ""), replica=replica, at=last)

    def _is_in_state(self, replica: str, message: str) -> bool:
        """Whether the replica's own state says so already, or the message says nothing."""
        *_, last = _LEAD.sub("", message, count=1).strip().split("\n")  # as a state has it
        return last in _REASONS_IN_STATE or any(
            r.name == replica and last and last in r.message for r in self._newest_replicas
        )


class _Readers:
    """Opens the sources of a job's output: of a small job all, of a large one a choice.

    A stream is a connection, or a kubectl. Rank 0 reports the progress, so the first replicas are
    followed; of the others the last lines are read when they fail.
    """

    def __init__(self, backend: Backend, ref: JobRef, merge: Merge[Snapshot | LogLine]) -> None:
        self._backend, self._ref, self._merge = backend, ref, merge
        self._followed: set[str] = set()
        self._failed: set[tuple[str, int]] = set()
        self._warned = False

    def look(self, job: Job, status: JobStatus) -> Iterator[Event]:
        """Open the sources that there are by now; a warning, once, if others are left out."""
        names = replica_names(job)
        for name in names[:MOST_AT_ONCE]:
            if name not in self._followed:
                self._followed.add(name)
                self._merge.add(name, partial(self._follow, name))
        if len(names) <= MOST_AT_ONCE:
            return
        for replica in status.replicas:
            self._read_failure(replica)
        if not self._warned:
            self._warned = True
            yield _warning(
                f"of {len(names)} replicas the output of {names[0]} and the next"
                f" {MOST_AT_ONCE - 1} is followed, and the last lines of those that fail are read;"
                f" for another: k8sjob logs -f {self._ref} -r {names[-1]}"
            )

    def _read_failure(self, replica: ReplicaStatus) -> None:
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
            source = partial(self._last_lines, replica.name, previous=runs_again)
            self._merge.add(f"{replica.name} {replica.restarts}", source)

    def _follow(self, name: str, stop: threading.Event) -> Iterator[LogLine]:
        return self._backend.logs(self._ref, name, follow=True, stop=stop)

    def _last_lines(self, name: str, stop: threading.Event, *, previous: bool) -> Iterator[LogLine]:
        tail = None if previous else LAST_LINES
        with suppress(BackendError):  # its pod may be gone by now
            yield from self._backend.logs(self._ref, name, previous=previous, tail=tail, stop=stop)


class Stalled:
    """The problems that hold a job up, each reported once, when it has lasted for some time.

    `related` reads what tells why a job waits in a queue, see Backend.related; without it a queued
    job is no problem.
    """

    def __init__(
        self,
        patience: float,
        related: Callable[[Snapshot], Sequence[Json]] | None = None,
    ) -> None:
        self._patience, self._related = patience, related
        self._looked = -math.inf
        self._since: dict[tuple[str, str], float] = {}
        self._reported: set[tuple[str, str]] = set()

    def look(
        self, snapshot: Snapshot, status: JobStatus, tails: Mapping[str, Sequence[str]], now: float
    ) -> Iterator[Event]:
        """A WARNING for each problem that has lasted for long enough; may be called at any time."""
        if now - self._looked < self._patience / 5:
            return
        # A diagnosis of a large job takes a while, and this is called ten times a second.
        self._looked = now
        related: Sequence[Json] = ()
        patience = self._patience
        waits = {key for key in self._reported if key[0] in _QUEUE}
        if status.state is not JobState.QUEUED:
            self._reported -= waits  # it may be queued again, for another reason
        elif self._related:
            if waits:
                return  # it costs requests, and may take days
            related, patience = self._related(snapshot), patience / 2
        findings = _problems(snapshot, status, tails, related)
        problems = {(finding.id, finding.replica): finding for finding in findings}
        self._since = {key: self._since.get(key, now) for key in problems}
        for key, finding in problems.items():
            if key not in self._reported and now - self._since[key] >= patience:
                self._reported.add(key)
                message = f"{finding.message}; next: {finding.next_step}"
                yield _warning(message, reason=str(finding.id))


def _problems(
    snapshot: Snapshot,
    status: JobStatus,
    tails: Mapping[str, Sequence[str]],
    related: Sequence[Json],
) -> list[Finding]:
    """What holds the job up; nothing where all replicas run, since only the past is known then."""
    complete = len(status.replicas) == len(replica_names(snapshot.job))
    run = complete and all(r.situation in {"Running", "Succeeded"} for r in status.replicas)
    if run or status.state.finished:
        return []
    # Only the objects beside the job say why it waits in a queue; see Stalled.
    passed_over = _CAUSES_IN_STATE if related else _CAUSES_IN_STATE | _QUEUE
    return [f for f in diagnose(snapshot, tails, related) if f.id not in passed_over]


def watch_all(
    changes: Iterable[CollectionChange], skew: Callable[[], float] = lambda: 0.0
) -> Iterator[Event]:
    """The jobs that have not ended, and then whatever happens to any job.

    A JOB event's data has `namespace`, `name` and `counts` (replicas by phase) beside what that of
    a single job has. A connection that is lost, and is back, is a WARNING. For the changes see
    ClusterBackend.watch_jobs; `skew` is how far the server's clock is ahead now.

    Raises:
        BackendError: the jobs cannot be read any more.
    """
    reported: dict[str, int] = {}  # uid -> a hash of what was reported; of thousands of jobs
    synced = False  # whether the list that was there before the watch is complete
    lost_at = 0.0
    for change in changes:
        match change.kind:
            case Kind.ADDED | Kind.MODIFIED:
                status, now = job_status(Snapshot(job_of(change.object))), time.time() + skew()
                yield from _changed(reported, status, now, quiet=not synced)
            case Kind.DELETED:
                status = job_status(Snapshot(job_of(change.object)))
                yield from _deleted(reported, status, time.time() + skew())
            case Kind.SYNCED:
                synced = True
            case Kind.LOST:
                lost_at = time.monotonic()
                yield _warning(f"the connection to the cluster is lost, trying again: {change.why}")
            case Kind.RESTORED:
                away = time.monotonic() - lost_at
                yield _warning(f"the connection to the cluster is back after {away:.0f} s")


def poll_all(jobs: Callable[[], Iterable[Snapshot]], stop: threading.Event) -> Iterator[Event]:
    """What watch_all reports, by looking again and again, until `stop` is set."""
    reported: dict[str, int] = {}
    before: dict[str, JobStatus] = {}  # of each job, by its uid
    quiet = True
    while not stop.is_set():
        now = {status.ref.uid: status for status in map(job_status, jobs())}
        for uid in before.keys() - now.keys():
            yield from _deleted(reported, before[uid], time.time())
        for status in now.values():
            yield from _changed(reported, status, time.time(), quiet=quiet)
        before, quiet = now, False
        stop.wait(LOOK_SECONDS)


def _changed(
    reported: dict[str, int], status: JobStatus, now: float, *, quiet: bool
) -> Iterator[Event]:
    """What is new about a job; nothing of one that had ended before the watch began."""
    counts = tuple(sorted(status.counts.items()))
    news = hash((status.state, status.reason, status.message, counts))
    if reported.get(status.ref.uid) == news:
        return
    reported[status.ref.uid] = news
    if not (quiet and status.state.finished):
        yield Event(EventKind.JOB, _data(status), now)


def _deleted(reported: dict[str, int], status: JobStatus, now: float) -> Iterator[Event]:
    if reported.pop(status.ref.uid, None) is not None:
        yield Event(EventKind.JOB, _data(_gone(status)), now)


def _data(status: JobStatus) -> dict[str, Any]:
    where = {"namespace": status.ref.namespace, "name": status.ref.name}
    return where | _job_data(status) | {"counts": dict(status.counts)}


def _gone(status: JobStatus) -> JobStatus:
    """The last status of a job that was deleted."""
    state, message = JobState.DELETED, "the job was deleted"
    code = state.exit_code
    status = replace(status, state=state, reason="", message=message, exit_code=code, counts={})
    return replace(status, since=None)


def _warning(
    message: str, *, reason: str | None = None, replica: str = "", at: float = 0.0
) -> Event:
    """A WARNING event, of now where it has no time of its own."""
    data = {"message": message} if reason is None else {"message": message, "reason": reason}
    return Event(EventKind.WARNING, data, at or time.time(), replica)


def _job_data(status: JobStatus) -> dict[str, Any]:
    """A job's status as the data of a JOB event; times are seconds since the epoch."""
    data = {name: getattr(status, name) for name in ("reason", "message", "exit_code")}
    seconds = {name: time and time.timestamp() for name, time in status.times.items()}
    return {"state": str(status.state), **data, **seconds}

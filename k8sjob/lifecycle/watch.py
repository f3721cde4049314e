"""A job as it goes: its changes of state and its replicas' output, merged into one stream."""

from __future__ import annotations

import re
import time
from collections import defaultdict, deque
from dataclasses import replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final

from k8sjob.backends.api import LogLine, Snapshot
from k8sjob.contract import Event, EventKind
from k8sjob.errors import JobNotFound
from k8sjob.lifecycle.diagnose import Cause, diagnose
from k8sjob.lifecycle.funnel import Ended, Funnel
from k8sjob.lifecycle.logs import TAIL_LINES, excerpt, instant
from k8sjob.lifecycle.readers import Readers
from k8sjob.lifecycle.standing import PATIENCE_SECONDS, Standing
from k8sjob.lifecycle.status import JobState, JobStatus, job_status

if TYPE_CHECKING:
    from collections.abc import Iterator

    from k8sjob.backends.api import Backend, JobRef
    from k8sjob.lifecycle.diagnose import Finding

__all__ = ["job_data", "watch"]

SETTLE_SECONDS: Final = 0.5
"""How long an ended job must have been silent until its output counts as complete."""
_UID: Final = re.compile(r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}")
_TOLD_BY_STATE: Final = frozenset(
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
        "PyTorchJobFailed",
        "PyTorchJobRestarting",
        "Unschedulable",
    }
)
"""Reasons of warnings that say no more than the JOB and REPLICA events of the same moment."""
_LEAD: Final = re.compile(r'Error: |Failed to pull image "[^"]*": ')
"""What the kubelet puts before words that the replica's own state has too."""


def watch(
    backend: Backend, ref: JobRef, *, logs: bool = True, patience: float = PATIENCE_SECONDS
) -> Iterator[Event]:
    """Everything that happens to a job, from its beginning until it has ended or is gone.

    First come the lines of the replicas (LOG) and the runtime's own events, decoded from them, then
    the job's last JOB event, and what `why` would say of its end (FINDING). A suspended job has
    not ended. Of one that does not get on, what `why` says is told by a WARNING, once, when it has
    stood for some seconds. Closing the iterator detaches from the job and changes nothing about it.

    Args:
        backend: where the job lives.
        ref: the job.
        logs: read the replicas' output too, see Readers; without it there are no runtime events.
        patience: seconds for which a trouble must have stood.

    Raises:
        JobNotFound: there is no such job.
        BackendError: the back end could not be read any more.
    """
    watcher = _Watcher(Standing(patience))
    with Funnel[Snapshot | LogLine]() as funnel:
        # A snapshot says all that the ones before it do: a slow reader sees fewer of them.
        funnel.add("", lambda stop: backend.watch(ref, stop=stop), ahead=1)
        readers = Readers(backend, ref, funnel) if logs else None
        item = None
        while not watcher.settled(funnel.open, item):
            item = funnel.get(0.1)
            if isinstance(item, Snapshot):
                yield from watcher.changed(item, readers)
            elif isinstance(item, Ended):
                yield from watcher.source_ended(item, ref)
            elif item is not None:
                yield watcher.line(item)
            yield from watcher.trouble()
    yield from watcher.end()


class _Watcher:
    """What was told already, so that each thing is told once."""

    def __init__(self, standing: Standing) -> None:
        self._standing = standing
        self._snapshot: Snapshot | None = None
        self._status: JobStatus | None = None
        self._told_job: object = None
        self._told_replicas: dict[str, object] = {}
        self._told_warnings: set[object] = set()
        self._tails: dict[str, deque[str]] = defaultdict(lambda: deque(maxlen=TAIL_LINES))
        self._ended_at: float | None = None
        self._heard_at = 0.0
        self._end_stamp = ""
        self._deleted = False

    def settled(self, sources: set[str], last: Snapshot | LogLine | Ended | None) -> bool:
        """Whether the job has ended and its output is complete, or was waited for long enough.

        Whoever reads the watch may be slow: as long as something waits to be read (`last`, None
        where nothing came), there may be more, however long ago the end was. What replicas write
        after the end of their job is not waited for.
        """
        if self._ended_at is None:
            return False
        if not sources - {""}:
            return True
        if last is None or (isinstance(last, LogLine) and last.timestamp > self._end_stamp):
            return time.monotonic() - max(self._ended_at, self._heard_at) > SETTLE_SECONDS
        if isinstance(last, LogLine):
            self._heard_at = time.monotonic()
        return False

    def changed(self, snapshot: Snapshot, readers: Readers | None) -> Iterator[Event]:
        """What a newer snapshot tells; the terminal JOB event is kept for the end."""
        self._snapshot, self._status = snapshot, job_status(snapshot)
        if readers:
            yield from readers.look(snapshot.job, self._status)
        yield from self._replicas(self._status)
        yield from self._warnings(snapshot)
        if not self._status.state.finished:
            yield from self._job(self._status)
        elif self._ended_at is None:
            self._ended_at = time.monotonic()
            self._end_stamp = datetime.now(UTC).isoformat()

    def source_ended(self, ended: Ended, ref: JobRef) -> Iterator[Event]:
        """A source of lines that fails is told and left; a job that is gone has ended."""
        if not ended.source:
            if self._snapshot is None:
                raise ended.error or JobNotFound(f"{ref} is gone; `k8sjob list` names those there")
            if ended.error and not isinstance(ended.error, JobNotFound):
                raise ended.error
            self._deleted = self._ended_at is None
            self._ended_at = self._ended_at or time.monotonic()
        elif ended.error and not isinstance(ended.error, JobNotFound):
            message = f"the output of {ended.source} cannot be read any more: {ended.error}"
            alike = message.replace(ended.source, "")  # a permission is missing for all or none
            if alike not in self._told_warnings:
                self._told_warnings.add(alike)
                yield Event(EventKind.WARNING, {"message": message}, time.time(), ended.source)

    def trouble(self) -> Iterator[Event]:
        """What has kept the job from going on for some time; nothing may have changed since."""
        if self._snapshot and self._status and self._ended_at is None:
            now = time.monotonic()
            yield from self._standing.look(self._snapshot, self._status, self._tails, now)

    def line(self, line: LogLine) -> Event:
        """A runtime event where the line carries one, else the line."""
        if not line.gap:
            self._tails[line.replica].append(excerpt(line.text))
        event = Event.decode(line.text, line.replica)
        if event:
            return event
        data = {key: getattr(line, key) for key in ("text", "attempt", "timestamp", "gap")}
        return Event(EventKind.LOG, data, instant(line.timestamp).timestamp(), line.replica)

    def end(self) -> Iterator[Event]:
        """The job's last state, and why it failed."""
        if self._deleted and self._status:
            gone = replace(
                self._status,
                state=JobState.DELETED,
                reason="",
                message="the job was deleted",
                exit_code=JobState.DELETED.exit_code,
                finished=None,
            )
            yield from self._job(gone)
        elif self._status and self._snapshot:
            yield from self._job(self._status)
            for finding in self._findings(self._snapshot, self._status.state):
                yield Event(EventKind.FINDING, finding.as_dict(), time.time(), finding.replica)

    def _findings(self, snapshot: Snapshot, state: JobState) -> list[Finding]:
        """Why the job failed, or what it did not do though it succeeded."""
        if state not in (JobState.FAILED, JobState.SUCCEEDED):
            return []
        found = diagnose(snapshot, self._tails)
        late = Cause.LEFTOVER if state is JobState.SUCCEEDED else ""  # they may still be ending
        return [one for one in found if one.cause != late]

    def _job(self, status: JobStatus) -> Iterator[Event]:
        told = (status.state, status.reason, status.message)
        if told != self._told_job:
            self._told_job = told
            yield Event(EventKind.JOB, job_data(status), time.time())

    def _replicas(self, status: JobStatus) -> Iterator[Event]:
        for replica in status.replicas:
            if self._told_replicas.get(replica.name) != replica:
                self._told_replicas[replica.name] = replica
                data = {
                    "phase": replica.phase,
                    "reason": replica.reason,
                    "restarts": replica.restarts,
                    "node": replica.node,
                    "exit_code": replica.exit_code,
                    "message": replica.message,
                }
                yield Event(EventKind.REPLICA, data, time.time(), replica.name)

    def _warnings(self, snapshot: Snapshot) -> Iterator[Event]:
        """Each warning once, and once alone what many replicas meet alike."""
        job = snapshot.job.get("metadata", {}).get("name", "")
        for event in snapshot.events:
            if event.get("type") != "Warning" or event.get("reason") in _TOLD_BY_STATE:
                continue
            about, message = event.get("involvedObject") or {}, event.get("message") or ""
            pod = about.get("name", "") if about.get("kind", "Pod") == "Pod" else ""
            replica = pod.removeprefix(f"{job}-") if pod != job else ""
            alike = _UID.sub("", message.replace(pod, "")) if replica else event["metadata"]["uid"]
            if (event.get("reason"), alike) in self._told_warnings:
                continue
            if replica and self._is_told(replica, message):
                continue
            self._told_warnings.add((event.get("reason"), alike))
            data = {"message": message, "reason": event.get("reason", "")}
            yield Event(EventKind.WARNING, data, time.time(), replica)

    def _is_told(self, replica: str, message: str) -> bool:
        """Whether the replica's own state says so already, or the message nothing at all."""
        *_, said = _LEAD.sub("", message, count=1).strip().split("\n")  # as a state is told
        replicas = self._status.replicas if self._status else ()
        return said in _TOLD_BY_STATE or any(
            one.name == replica and said and said in one.message for one in replicas
        )


def job_data(status: JobStatus) -> dict[str, Any]:
    """A job's status as the data of a JOB event."""
    return {
        "state": str(status.state),
        "reason": status.reason,
        "message": status.message,
        "exit_code": status.exit_code,
        "created": _seconds(status.created),
        "started": _seconds(status.started),
        "finished": _seconds(status.finished),
    }


def _seconds(moment: datetime | None) -> float | None:
    return moment.timestamp() if moment else None

"""Records of all jobs in a cluster, and messages when they end, for jobs that nobody watches."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from enum import StrEnum
from typing import TYPE_CHECKING, Final

from k8sjob.backends.api import JobRef, Snapshot
from k8sjob.errors import BackendError, JobNotFound, StorageError, redacted
from k8sjob.kube.client.listwatch import Kind
from k8sjob.kube.objects import NOTIFY, Object, Pod, stamp
from k8sjob.observe.diagnose import diagnose
from k8sjob.observe.findings import findings_to_keep, with_earlier
from k8sjob.observe.logs import last_lines
from k8sjob.observe.status import job_status
from k8sjob.observe.watch import Stalled
from k8sjob.sanitize import safe_line
from k8sjob.targets.api import JobState
from k8sjob.targets.jobs import job_of

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable

    from k8sjob.backends.cluster.backend import ClusterBackend
    from k8sjob.backends.record import Records
    from k8sjob.backends.record_storage import StoredRecords
    from k8sjob.kube.client.listwatch import CollectionChange
    from k8sjob.kube.objects import Json
    from k8sjob.observe.status import JobStatus
    from k8sjob.observe.webhook import Webhook

_READERS: Final = 4
"""Jobs that are read at the same time because they have changed."""
_LOOK_SECONDS: Final = 30.0
"""Seconds from one check of the jobs that have not ended to the next."""
_PATIENCE_SECONDS: Final = 300.0
"""A problem that resolves itself sooner is not reported: images take minutes to pull."""
_AGAIN_SECONDS: Final = 60.0
"""Seconds between records of a running job."""
_OLD: Final = timedelta(hours=1)
"""An end that long ago is not reported: the collector was away, or is new."""
_EXIT_SECONDS: Final = 5.0
"""How long an exit waits for a look at a job; a request may take much longer."""
_MOST_PART: Final = 600
"""Characters of a cause or a next step in a message."""


class Occasion(StrEnum):
    """What a message may be about; the values of --notify-on and of the job's annotation."""

    FAILED = "failed"
    SUCCEEDED = "succeeded"
    STALLED = "stalled"


_ENDS: Final = {JobState.FAILED: Occasion.FAILED, JobState.SUCCEEDED: Occasion.SUCCEEDED}


@dataclass(slots=True)
class _Job:
    newest: Json
    is_complete: bool = False  # its end is recorded, and that of its Pods
    has_ended: bool = False  # its end is recorded
    is_deleted: bool = False
    stalled: Stalled = field(default_factory=lambda: Stalled(_PATIENCE_SECONDS))
    problem: str = ""  # why it could not be recorded the last time
    recorded: object = None  # what was new when it was recorded last
    recorded_at: float = float("-inf")  # time.monotonic()
    lock: threading.Lock = field(default_factory=threading.Lock)  # held while it is read


class Collector:
    """Keeps a record of each job, and sends messages about some.

    A job is recorded when it ends, when it is deleted, and while it runs whenever its state or its
    replicas' change, at most once a minute: of a job that is deleted together with its Pods the
    newest of these remains.

    Messages go to the webhook, if there is one; `occasions` are what they are about where a job's
    annotation does not say it. `report` is called with a line about what was done or failed, from
    several threads.
    """

    def __init__(
        self,
        backend: ClusterBackend,
        records: Records | StoredRecords,
        webhook: Webhook | None,
        occasions: Collection[str],
        report: Callable[[str], object],
    ) -> None:
        self._backend, self._records, self._webhook = backend, records, webhook
        self._occasions, self._report = frozenset(occasions), report
        self._jobs: dict[str, _Job] = {}
        self._readers = ThreadPoolExecutor(_READERS, "collector")
        self._outage = threading.Event()  # records cannot be kept, which was reported

    def run(self, changes: Iterable[CollectionChange], stop: threading.Event) -> None:
        """Collect until there are no more changes of jobs; see ClusterBackend.watch_jobs.

        At the end `stop` is set, for whoever makes the changes.

        Raises:
            BackendError: the jobs cannot be read any more.
        """
        looks = threading.Thread(target=self._look_again, args=[stop], daemon=True)
        looks.start()
        try:
            if self._webhook is not None:
                for name, message in self._records.messages().items():
                    self._webhook.send(name, message)
            for change in changes:
                self._changed(change)
        finally:
            stop.set()
            self._readers.shutdown(cancel_futures=True)
            looks.join(_EXIT_SECONDS)

    def _changed(self, change: CollectionChange) -> None:
        match change.kind:
            case Kind.ADDED | Kind.MODIFIED | Kind.DELETED:
                job = self._jobs.setdefault(Object(change.object).uid, _Job(change.object))
                job.newest, job.is_deleted = change.object, change.kind is Kind.DELETED
                self._readers.submit(self._read, job)
            case Kind.LOST:
                self._report(f"the connection to the cluster is lost, trying again: {change.why}")
            case Kind.RESTORED:
                self._report("the connection to the cluster is back")
            case _:
                pass

    def _look_again(self, stop: threading.Event) -> None:
        """Read the jobs that are not complete: nothing about them may change while they stall."""
        while not stop.wait(_LOOK_SECONDS):
            for uid, job in list(self._jobs.items()):
                if job.is_complete and job.is_deleted:
                    del self._jobs[uid]
                elif not (job.is_complete or stop.is_set()):
                    with suppress(Exception):  # a report may fail, as to a closed stdout
                        self._read(job)  # here, or many would keep the readers from what ends

    def _read(self, job: _Job) -> None:
        ref = JobRef.of(job_of(job.newest))
        try:
            with job.lock:
                if not job.is_complete:
                    self._look_at(job, ref)
        except (StorageError, OSError) as error:  # the same for all jobs, and tried again
            if not self._outage.is_set():
                self._outage.set()
                self._report(f"records cannot be kept, trying again: {error}")
        except Exception as error:  # noqa: BLE001 - no job may keep the others from being recorded
            if (problem := str(error) or type(error).__name__) != job.problem:
                self._report(f"{ref} could not be recorded: {problem}")
            job.problem = problem
            job.is_complete = job.is_deleted  # its next state is the same

    def _look_at(self, job: _Job, ref: JobRef) -> None:
        """Send the messages that are due about a job, and record it if anything is new."""
        # Every job is reported at a start; only the records say what an earlier collector did.
        if job.recorded is None and self._is_recorded(ref):
            job.is_complete = True  # by an earlier collector
            return
        is_gone = False
        try:
            snapshot = self._backend.snapshot(ref)
        except JobNotFound:
            # Its last object is that of the watch; its Pods may still be there for some seconds.
            snapshot = _deleted(self._backend.snapshot_of(job_of(job.newest)))
            is_gone = True
            if job.recorded and (job.has_ended or not snapshot.pods):
                job.is_complete = True  # the record before this one has more
                return
        status = job_status(snapshot)
        if status.state in _ENDS:
            self._report_end(snapshot, status)
        elif not is_gone:
            for event in job.stalled.look(snapshot, status, {}, time.monotonic()):
                self._send(
                    snapshot, Occasion.STALLED, f"makes no progress: {_part(event.data['message'])}"
                )
        # A job that runs is recorded now and then, since nobody knows when it will be deleted; its
        # end is recorded at once.
        has_ended = status.state.finished or snapshot.job.deleting
        may_wait = not has_ended and time.monotonic() - job.recorded_at < _AGAIN_SECONDS
        if (news := _news(status)) != job.recorded and not may_wait:
            path = self._records.keep(self._backend, ref, snapshot, findings_to_keep)
            job.recorded, job.recorded_at = news, time.monotonic()
            job.has_ended = status.state.finished
            if self._outage.is_set():
                self._outage.clear()
                self._report("records can be kept again")
            self._report(f"{ref} {status.state}: {path}")
        # After the job's end its Pods end, and their last state belongs to the record.
        if is_gone or (status.state.finished and not any(Pod(pod).live for pod in snapshot.pods)):
            job.is_complete = True

    def _is_recorded(self, ref: JobRef) -> bool:
        """Whether there is a record of the job's end."""
        with suppress(BackendError):
            return job_status(self._records.open(ref).snapshot(ref)).state.finished
        return False

    def _report_end(self, snapshot: Snapshot, status: JobStatus) -> None:
        ended = status.finished or snapshot.now
        if snapshot.now - ended > _OLD:
            return
        text = str(status.state).lower()
        if status.started:
            text += f" after {str(ended - status.started).partition('.')[0]}"
        lines = last_lines(self._backend, snapshot)
        findings = diagnose(snapshot, lines, self._backend.related(snapshot))
        for finding in with_earlier(snapshot, findings, self._records.open):
            text += f"\nwhy: {_part(finding.message)}\nnext: {_part(finding.next_step)}"
        self._send(snapshot, _ENDS[status.state], text)

    def _send(self, snapshot: Snapshot, occasion: Occasion, text: str) -> None:
        """Send a message if the job wants it and it was not sent before."""
        occasions: Collection[str] = self._occasions
        if (chosen := snapshot.job.annotations.get(NOTIFY)) is not None:
            occasions = [word.strip().lower() for word in chosen.split(",")]
        ref = JobRef.of(snapshot.job)
        if self._webhook is None or occasion not in occasions:
            return
        # Marked before it is sent, so that none is ever sent twice; kept, so that a collector that
        # ends meanwhile sends it at its next start.
        if self._records.mark(ref, occasion):
            self._webhook.send(f"{ref.uid}.{occasion}", f"{ref} {text}")


def _part(text: str) -> str:
    """A part of a message: one line, which cannot look like another part, without credentials."""
    return redacted(safe_line(text))[:_MOST_PART]


def _deleted(snapshot: Snapshot) -> Snapshot:
    """The last of a job that is gone, as one that is being deleted, by the cluster's clock."""
    metadata = {"deletionTimestamp": stamp(snapshot.now), **snapshot.job.metadata}
    job = snapshot.job.with_document({**snapshot.job.document, "metadata": metadata})
    return snapshot._replace(job=job)


def _news(status: JobStatus) -> object:
    """What a record must be written again for."""
    replicas = [
        (replica.name, replica.phase, replica.restarts, replica.reason)
        for replica in status.replicas
    ]
    return str(status.state), status.reason, status.message, replicas

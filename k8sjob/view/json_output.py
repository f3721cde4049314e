"""A job as data: the JSON of `-o json`, what `why` finds of it, and where its training stands."""

from __future__ import annotations

import math
import re
import time
from contextlib import suppress
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from k8sjob.backends.api import JobRef
from k8sjob.contract import EVENT_MARK, Event, EventKind
from k8sjob.errors import BackendError
from k8sjob.kube.objects import IMAGE_ORIGIN, Pod, stamp
from k8sjob.observe.logs import MOST_AT_ONCE, TAIL_LINES
from k8sjob.observe.merge import Merge
from k8sjob.observe.status import JobStatus, job_state, job_status, reporting_replica
from k8sjob.observe.training import Training
from k8sjob.provenance import Provenance
from k8sjob.targets.api import JobState
from k8sjob.view.formats import duration, position, started, values

if TYPE_CHECKING:
    import threading
    from collections.abc import Iterable, Iterator

    from k8sjob.backends.api import Backend, Snapshot
    from k8sjob.kube.objects import Json
    from k8sjob.targets.api import Job

WAIT_S: Final = 3.0
"""Seconds after which jobs that have not answered are left out."""
_OLD_S: Final = 60.0
"""Age in seconds from which it is shown: the numbers may not hold any more."""
_SHOWN_METRICS: Final = 3
_ENDED_LINES: Final = 50
"""Last lines that are read of a job that has succeeded: its metrics are among them."""
_REPORT: Final = f'{EVENT_MARK}{{"kind":"{EventKind.PROGRESS}"'
_REPORTS: Final = 8
"""Reports of a job's progress that are all read at the end of its output; of those before them one
in so many."""
_POINTS: Final = 60
"""Reports that are read before those of very many, enough for a small curve."""
_OF_A_REPLICA: Final = ("name", "phase", "node", "restarts", "reason", "exit_code", "message")
_DIGEST: Final = re.compile(r"@(sha256:[0-9a-f]{64})$")


def state_document(status: JobStatus) -> dict[str, Any]:
    """The first fields of a job's JSON, from its object alone."""
    return {
        "name": status.ref.name,
        "namespace": status.ref.namespace,
        "uid": status.ref.uid,
        "state": str(status.state),
        "reason": status.reason,
        "message": status.message,
        "exit_code": status.exit_code,
        **{name: time and stamp(time) for name, time in status.times.items()},
    }


def job_document(snapshot: Snapshot, progress: JobProgress | None = None) -> dict[str, Any]:
    """A job's status as JSON; docs/reference/json.md describes each field."""
    status, made_of = job_status(snapshot), provenance(snapshot.job)
    return {
        **state_document(status),
        "kind": snapshot.job.target.kind,
        "image": image(snapshot.job),
        "origin": made_of.as_dict() if made_of else None,
        "counts": dict(status.counts),
        "progress": progress.as_dict() if progress else None,
        "replicas": [
            {key: getattr(replica, key) for key in _OF_A_REPLICA} | {"digest": running_digest(pod)}
            for replica, pod in zip(status.replicas, snapshot.pods, strict=True)
        ],
    }


def image(job: Job) -> str | None:
    """The image that the manifest gives the job's first replica."""
    return next((role.main.get("image") for role in job.replicas), None)


def provenance(job: Job) -> Provenance | None:
    """The provenance of the image, if the job has it and still runs that image."""
    annotations = job.annotations
    origin = Provenance.decode(annotations.get(IMAGE_ORIGIN))
    return origin if origin and origin.image == image(job) else None


def running_digest(pod: Json) -> str | None:
    """The digest of the image that a pod really runs, as its node reports it."""
    match = _DIGEST.search(Pod(pod).container.raw.get("imageID") or "")
    return match[1] if match else None


class JobProgress(NamedTuple):
    """The progress of one job: its training, when that was written, and the seconds since.

    Of one that has succeeded (`ended`) it is what the training came to.
    """

    training: Training
    time: float
    age: float
    ended: bool = False

    def __str__(self) -> str:
        """The reason why it does not train, else epoch, step, loss, pace, ETA; the age if old.

        Of one that has succeeded the first metrics.
        """
        if self.ended:
            return values(dict(islice(self.training.last_values.items(), _SHOWN_METRICS)))
        now, age = self.training, self.age
        # A time left that was computed a minute ago is none.
        progress = now.progress._replace(eta_s=None) if age >= _OLD_S else now.progress
        pieces = [now.starting] if now.starting else position(progress)
        if not pieces:  # a script of its own reports how far it is, or its metrics alone
            metrics = values(dict(islice(now.last_values.items(), _SHOWN_METRICS)))
            pieces = [metrics or started(now.group)] if metrics or now.group else []
        return "  ".join(
            [*pieces, f"({duration(age)} ago)"] if pieces and age >= _OLD_S else pieces
        )

    def as_dict(self) -> dict[str, Any]:
        """The field `progress` of a job; docs/reference/json.md describes each key."""
        now = self.training.progress
        running = self.training.starting or ("training" if now.epoch else "started")
        return {
            "phase": "ended" if self.ended else running,
            "epoch": now.epoch or None,
            "epochs": now.epochs or None,
            "step": now.step if now.epoch else None,
            "steps": now.steps or None,
            "loss": _finite(now.loss),
            "samples_per_s": _finite(now.samples_per_s),
            "eta_s": None if self.ended else _finite(now.eta_s),
            "metrics": {
                name: metric if isinstance(metric, str) else _finite(metric)
                for name, metric in self.training.last_values.items()
            },
            "restarts": self.training.restarts,
            "time": self.time,
        }


def progress_of(
    jobs: Iterable[tuple[Backend, Snapshot]], *, succeeded: bool = False
) -> dict[JobRef, JobProgress]:
    """The progress of the jobs that run, and of those that have `succeeded`, as far as it is known.

    Of each job one replica's last lines are read, of the first MOST_AT_ONCE jobs, those that run
    before the others, all at once; what has not come after WAIT_S seconds, or cannot be
    read, is left out.
    """
    states = [JobState.RUNNING, *[JobState.SUCCEEDED] * succeeded]
    by_state = [(job_state(job[1]), job) for job in jobs]
    readable = [job for state in states for job_state, job in by_state if job_state is state]
    progress_by_job = dict[JobRef, JobProgress]()
    if not readable:
        return progress_by_job
    with Merge[tuple[JobRef, JobProgress]]() as merge:
        for number, (backend, snapshot) in enumerate(readable[:MOST_AT_ONCE]):
            merge.add(str(number), partial(_read, backend, snapshot))
        end = time.monotonic() + WAIT_S
        while merge.open and (patience := end - time.monotonic()) > 0:
            pair = merge.get(patience)
            if isinstance(pair, tuple):
                progress_by_job.update([pair])
    return progress_by_job


def _read(
    backend: Backend, snapshot: Snapshot, stop: threading.Event
) -> Iterator[tuple[JobRef, JobProgress]]:
    ref, replica = JobRef.of(snapshot.job), reporting_replica(snapshot.job)
    tail = TAIL_LINES if job_state(snapshot) is JobState.RUNNING else _ENDED_LINES
    with suppress(BackendError):
        pods = snapshot.pods_by_replica or None  # a list has those of jobs that run
        lines = backend.logs(ref, replica, tail=tail, stop=stop, pods=pods)
        if progress := progress_in(snapshot, (line.text for line in lines)):
            yield ref, progress


def progress_in(snapshot: Snapshot, lines: Iterable[str]) -> JobProgress | None:
    """The progress in the last lines of the replica that reports; None where nothing tells it."""
    events = events_in(lines)
    training, last = Training.of(events), events[-1].time if events else 0.0
    tells = (
        training.starting
        or training.group
        or training.restarts
        or training.progress.epoch
        or training.metrics
    )
    # The clocks of the nodes are nearer to the server's than that of this machine.
    age = snapshot.now.timestamp() - last
    ended = job_state(snapshot) is JobState.SUCCEEDED
    return JobProgress(training, last, age, ended) if last and tells else None


def events_in(lines: Iterable[str]) -> list[Event]:
    """The events in some lines; of many reports of progress some, and all of the last ones.

    Almost all of the lines are reports, and to decode them takes longer than all else of a list.
    """
    lines = list(lines)
    reports = [number for number, line in enumerate(lines) if _REPORT in line]
    every = max(_REPORTS, len(reports) // _POINTS)
    passed_over = set(reports[:-_REPORTS]) - set(reports[::every])
    read = (line for number, line in enumerate(lines) if number not in passed_over)
    return [event for line in read if (event := Event.decode(line))]


def _finite(value: float | None) -> float | None:
    """The number, if JSON can express it."""
    return value if value is not None and math.isfinite(value) else None

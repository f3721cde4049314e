"""What a row of the list says beyond its job's object: why, progress, and a curve of the loss.

It is read when a page asks for the rows on its screen, once for all pages, and again only after the
job has changed, or after some seconds where it has not ended.
"""

from __future__ import annotations

import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from k8sjob.backends.local import LocalBackend
from k8sjob.contract import Event
from k8sjob.errors import K8sJobError
from k8sjob.observe.findings import findings
from k8sjob.observe.logs import TAIL_LINES
from k8sjob.observe.status import job_state, reporting_replica
from k8sjob.observe.training import Training
from k8sjob.targets.api import JobState
from k8sjob.view.json_output import JobProgress

if TYPE_CHECKING:
    from collections.abc import Sequence

    from k8sjob.ui.jobs import JobEntry, Jobs

_AGAIN_SECONDS: Final = 5.0
"""Seconds between readings of a row whose job runs."""
_WHY_SECONDS: Final = 20.0
"""The same of one that waits: what explains it are several requests to a cluster."""
_WAIT_SECONDS: Final = 3.0
"""Rows that take longer come with a later answer."""
_READERS: Final = 8
"""Rows that are read at the same time."""
_LOCAL_LINES: Final = 5000
"""Last lines of a job on this machine of which its curve is made at first."""
_POINTS: Final = 60
"""Points of a curve, which is not much wider in pixels."""
_CAUSE_LENGTH: Final = 300


@dataclass(slots=True)
class _Row:
    """What was read of a job.

    Attributes:
        version: of the job's entry.
        training: of the lines that were read so far, the newest written at `last`.
        read_at: time.monotonic()
        content: what pages are sent.
    """

    version: int = 0
    training: Training = field(default_factory=Training)
    last: float = 0.0
    read_at: float = 0.0
    content: dict[str, Any] = field(default_factory=dict)


class Rows:
    """The rows that pages have asked for.

    Args:
        jobs: all jobs; once they are closed no more is read.
    """

    def __init__(self, jobs: Jobs) -> None:
        self._jobs = jobs
        self._rows: dict[str, Future[_Row]] = {}
        self._lock = threading.Lock()
        self._readers = ThreadPoolExecutor(_READERS, "row")

    def of(self, keys: Sequence[str]) -> dict[str, dict[str, Any]]:
        """By key what the rows of some jobs have.

        It has `state` (that of the job when it was read), `why` (the first line of the first
        cause), `progress` (its `text` and `fraction`) and `curve`, as [x, y] each.
        """
        with self._lock:
            for key in [key for key in self._rows if not self._jobs.find(key)]:
                del self._rows[key]
            rows = {key: self._row(entry) for key in keys if (entry := self._jobs.find(key))}
        wait(rows.values(), _WAIT_SECONDS)
        # No job keeps the others from being shown.
        read = [key for key, row in rows.items() if row.done() and not row.exception()]
        return {key: rows[key].result().content for key in read}

    def _row(self, entry: JobEntry) -> Future[_Row]:
        earlier, row = self._rows.get(entry.key), _Row()
        if earlier and not earlier.done():
            return earlier
        if earlier and not earlier.exception():
            row = earlier.result()
            state, age = job_state(entry.snapshot), time.monotonic() - row.read_at
            lasts = _AGAIN_SECONDS if state is JobState.RUNNING else _WHY_SECONDS
            if row.version == entry.version and (state.finished or age < lasts):
                return earlier
        self._rows[entry.key] = self._readers.submit(self._read, entry, row)
        return self._rows[entry.key]

    def _read(self, entry: JobEntry, row: _Row) -> _Row:
        if self._jobs.closed.is_set():  # what is queued would keep the process from ending
            return row
        state = job_state(entry.snapshot)
        if state not in {JobState.CREATED, JobState.QUEUED}:
            with suppress(K8sJobError, OSError):  # of Pods that are gone
                _read_output(entry, row)
        row.content = {
            "state": state,
            "why": _why(entry, row, state).partition("\n")[0][:_CAUSE_LENGTH],
            "progress": _progress(entry, row, state),
            "curve": _curve(row.training),
        }
        row.version, row.read_at = entry.version, time.monotonic()
        if state.finished:  # it may have many curves
            row.training, row.last = Training(), 0.0
        return row


def _why(entry: JobEntry, row: _Row, state: JobState) -> str:
    if state is JobState.RUNNING:  # its Pods and all of its output take too long for a list
        return str(row.training.hang.data.get("message", "")) if row.training.hang else ""
    if state is not JobState.SUCCEEDED:
        with suppress(K8sJobError, OSError):
            causes = findings(entry.backend, entry.backend.snapshot(entry.ref))
            return causes[0].message if causes else ""
    return ""


def _read_output(entry: JobEntry, row: _Row) -> None:
    """Take in what the replica that reports has written since the last time."""
    is_first = not row.last and isinstance(entry.backend, LocalBackend)
    count = _LOCAL_LINES if is_first else TAIL_LINES
    replica = reporting_replica(entry.snapshot.job)
    for line in entry.backend.logs(entry.ref, replica, tail=count):
        if (event := Event.decode(line.text)) and event.time > row.last:
            row.training.add(event)
            row.last = event.time


def _progress(entry: JobEntry, row: _Row, state: JobState) -> dict[str, Any] | None:
    age = entry.snapshot.now.timestamp() - row.last
    text = str(JobProgress(row.training, row.last, age, state.finished)) if row.last else ""
    fraction = None if state is JobState.SUCCEEDED else row.training.progress.fraction
    return {"text": text, "fraction": fraction} if text else None


def _curve(training: Training) -> list[tuple[float, float]]:
    """Points of the curve of the loss, the last one among them."""
    curve = training.curve or training.curves.get("epoch_loss", [])
    every = -(-len(curve) // _POINTS) or 1
    return curve[(len(curve) - 1) % every :: every]

"""What a row of the list says beyond its job's object: why, progress, and a curve of the loss.

It is read when a page asks for the rows on its screen, once for all pages, and again only after the
job has changed, or after some seconds where it has not ended or could not be read.
"""

from __future__ import annotations

import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import takewhile
from typing import TYPE_CHECKING, Any, Final

from k8sjob.backends.local import LocalBackend
from k8sjob.observe.findings import findings
from k8sjob.observe.logs import TAIL_LINES
from k8sjob.observe.status import job_state, reporting_replica
from k8sjob.observe.training import Training
from k8sjob.targets.api import JobState
from k8sjob.view.json_output import JobProgress, events_in

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from k8sjob.backends.api import LogLine
    from k8sjob.ui.jobs import JobEntry, Jobs

_AGAIN_SECONDS: Final = 5.0
"""Seconds between readings of a row whose job runs."""
_WHY_SECONDS: Final = 20.0
"""The same of one that waits: what explains it are several requests to a cluster."""
_WAIT_SECONDS: Final = 3.0
"""Rows that take longer come with a later answer."""
_READERS: Final = 8
"""Rows that are read at the same time."""
_LOCAL_LINES: Final = 2000
"""Last lines of a job on this machine of which its curve is made at first."""
_POINTS: Final = 60
"""Points of a curve, which is not much wider in pixels."""
_CAUSE_LENGTH: Final = 300


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
        return {key: row.result().content for key, row in rows.items() if row.done()}

    def _row(self, entry: JobEntry) -> Future[_Row]:
        row = self._rows.get(entry.key)
        if row is None or (row.done() and not row.result().is_current(entry)):
            earlier = row.result() if row else _Row()
            row = self._rows[entry.key] = self._readers.submit(self._read, entry, earlier)
        return row

    def _read(self, entry: JobEntry, row: _Row) -> _Row:
        if not self._jobs.closed.is_set():  # what is queued would keep the process from ending
            row.read(entry)
        return row


@dataclass(slots=True)
class _Row:
    """What was read of a job.

    Attributes:
        version: of the job's entry.
        read_at: time.monotonic()
        is_whole: whether all of it could be read.
        training: by the output up to the line `last`; its last event was written at `time`.
        content: what pages are sent.
    """

    version: int = 0
    read_at: float = 0.0
    is_whole: bool = False
    training: Training = field(default_factory=Training)
    last: LogLine | None = None
    time: float = 0.0
    content: dict[str, Any] = field(default_factory=dict)

    def is_current(self, entry: JobEntry) -> bool:
        """Whether it need not be read again now."""
        state, age = job_state(entry.snapshot), time.monotonic() - self.read_at
        is_recent = age < (_AGAIN_SECONDS if state is JobState.RUNNING else _WHY_SECONDS)
        return self.version == entry.version and (is_recent or (state.finished and self.is_whole))

    def read(self, entry: JobEntry) -> None:
        """Read it; what cannot be read is left out."""
        state, why = job_state(entry.snapshot), ""
        self.version, self.read_at, self.is_whole = entry.version, time.monotonic(), True
        if state not in {JobState.CREATED, JobState.QUEUED}:
            with self._failure_noted():
                self._read_output(entry)
        with self._failure_noted():
            why = self._why(entry, state).partition("\n")[0][:_CAUSE_LENGTH]
        progress = self._progress(entry, state)
        curve = _thinned(self.training.curve or self.training.curves.get("epoch_loss", []))
        self.content = {"state": state, "why": why, "progress": progress, "curve": curve}

    @contextmanager
    def _failure_noted(self) -> Iterator[None]:
        try:
            yield
        except Exception:  # noqa: BLE001 - no job keeps the others from being shown
            self.is_whole = False

    def _read_output(self, entry: JobEntry) -> None:
        """Take in what the replica that reports has written since the last time."""
        is_first = self.last is None and isinstance(entry.backend, LocalBackend)
        count = _LOCAL_LINES if is_first else TAIL_LINES
        replica = reporting_replica(entry.snapshot.job)
        lines = [
            line for line in entry.backend.logs(entry.ref, replica, tail=count) if not line.gap
        ]
        # By the line itself: a clock may jump, and several events may have the same time.
        added = [*takewhile(lambda line: line != self.last, reversed(lines))][::-1]
        for event in events_in(line.text for line in added):
            self.training.add(event)
            self.time = event.time
        self.last = added[-1] if added else self.last

    def _why(self, entry: JobEntry, state: JobState) -> str:
        if state is JobState.RUNNING:  # its Pods and all of its output take too long for a list
            hang = self.training.hang
            return str(hang.data.get("message", "")) if hang else ""
        if state is JobState.SUCCEEDED:
            return ""
        causes = findings(entry.backend, entry.backend.snapshot(entry.ref))
        return causes[0].message if causes else ""

    def _progress(self, entry: JobEntry, state: JobState) -> dict[str, Any] | None:
        age = entry.snapshot.now.timestamp() - self.time
        text = str(JobProgress(self.training, self.time, age, state.finished)) if self.time else ""
        fraction = None if state is JobState.SUCCEEDED else self.training.progress.fraction
        return {"text": text, "fraction": fraction} if text else None


def _thinned(curve: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """Some points of a curve, the last one among them."""
    every = -(-len(curve) // _POINTS) or 1
    return curve[(len(curve) - 1) % every :: every]

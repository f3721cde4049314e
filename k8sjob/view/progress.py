"""Where running jobs stand in their training, read from the last lines of one replica each."""

from __future__ import annotations

import math
import time
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from k8sjob.backends.api import JobRef
from k8sjob.contract import Event
from k8sjob.errors import BackendError
from k8sjob.observe.logs import MOST_AT_ONCE, TAIL_LINES
from k8sjob.observe.merge import Merge
from k8sjob.observe.status import job_status, speaker
from k8sjob.targets.api import JobState
from k8sjob.view.lines import duration, position, started
from k8sjob.view.summary import JobSummary

if TYPE_CHECKING:
    import threading
    from collections.abc import Iterable, Iterator

    from k8sjob.backends.api import Backend, Snapshot

WAIT_S: Final = 3.0
"""Seconds after which jobs that have not answered are left out."""
_OLD_S: Final = 60.0
"""Age in seconds from which it is shown: the numbers may not hold any more."""


@dataclass(frozen=True, slots=True)
class JobProgress:
    """The progress of one job."""

    summary: JobSummary
    time: float

    @property
    def pieces(self) -> list[str]:
        """What keeps it from training, else epoch, step, loss, pace and ETA; with an old age."""
        now = self.summary
        found = [now.starting] if now.starting else position(now.progress)
        if not found and now.group:
            found = [started(now.group)]
        age = time.time() - self.time
        return [*found, f"({duration(age)} ago)"] if found and age >= _OLD_S else found

    def __str__(self) -> str:
        return "  ".join(self.pieces)

    def as_dict(self) -> dict[str, Any]:
        """The field `progress` of a job; docs/reference/json.md describes each key."""
        now = self.summary.progress
        return {
            "phase": self.summary.starting or ("training" if now.epoch else "started"),
            "epoch": now.epoch or None,
            "epochs": now.epochs or None,
            "step": now.step if now.epoch else None,
            "steps": now.steps or None,
            "loss": _finite(now.loss),
            "samples_per_s": _finite(now.samples_per_s),
            "eta_s": _finite(now.eta_s),
            "time": self.time,
        }


def progress_of(jobs: Iterable[tuple[Backend, Snapshot]]) -> dict[JobRef, JobProgress]:
    """The progress of the jobs that run, as far as it is known.

    Of each job one replica's last TAIL_LINES lines are read, of the first MOST_AT_ONCE jobs that
    run, all at once; what has not come after WAIT_S seconds, or cannot be read, is left out.
    """
    running = [
        (backend, snapshot)
        for backend, snapshot in jobs
        if job_status(snapshot).state is JobState.RUNNING
    ]
    found = dict[JobRef, JobProgress]()
    if not running:
        return found
    with Merge[tuple[JobRef, JobProgress]]() as merge:
        for number, (backend, snapshot) in enumerate(running[:MOST_AT_ONCE]):
            merge.add(str(number), partial(_read, backend, snapshot))
        end = time.monotonic() + WAIT_S
        while merge.open and (rest := end - time.monotonic()) > 0:
            item = merge.get(rest)
            if isinstance(item, tuple):
                found.update([item])
    return found


def _read(
    backend: Backend, snapshot: Snapshot, stop: threading.Event
) -> Iterator[tuple[JobRef, JobProgress]]:
    ref, replica, last = JobRef.of(snapshot.job), speaker(snapshot.job), 0.0
    summary = JobSummary(ref.name)
    with suppress(BackendError):
        for line in backend.logs(ref, replica, tail=TAIL_LINES, stop=stop):
            if event := Event.decode(line.text, replica):
                summary.add(event)
                last = event.time
    if last and (summary.starting or summary.group or summary.progress.epoch):
        yield ref, JobProgress(summary, last)


def _finite(value: float | None) -> float | None:
    """The number, if JSON can express it."""
    return value if value is not None and math.isfinite(value) else None

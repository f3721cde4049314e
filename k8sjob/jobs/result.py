"""The result of a job: how it ended, its metrics and their history, its checkpoint, its output."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, fields
from pathlib import Path, PurePath, PurePosixPath
from typing import TYPE_CHECKING, Final

from k8sjob.backends.api import JobRef
from k8sjob.backends.local import LocalBackend
from k8sjob.backends.record import RecordBackend
from k8sjob.contract import Event, EventKind
from k8sjob.errors import BackendError, JobFailed
from k8sjob.observe.diagnose import diagnose
from k8sjob.observe.logs import last_lines
from k8sjob.observe.status import JobStatus, job_status, reporting_replica
from k8sjob.observe.training import Training, numbers_and_texts
from k8sjob.sanitize import safe_text
from k8sjob.targets.api import JobState
from k8sjob.targets.jobs import replica_names

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from k8sjob.backends.api import Backend, Snapshot
    from k8sjob.findings import Finding

_OWN: Final = frozenset({"time", "epoch", "step"})
MAX_ROWS: Final = 100_000
"""Rows of a history that are kept; of more every second one."""


class Logs(Mapping[str, str]):
    """The output of each replica by its name, read on demand.

    The reports of k8sjob's runtime, which `history` has, are left out.
    """

    def __init__(self, backend: Backend, snapshot: Snapshot) -> None:
        self._backend, self._ref = backend, JobRef.of(snapshot.job)
        self._names = replica_names(snapshot.job)

    def __getitem__(self, replica: str) -> str:
        if replica not in self._names:
            raise KeyError(f"{replica!r} is not one of {', '.join(self._names)}")
        lines = (line.text for line in self._backend.logs(self._ref, replica))
        return "".join(f"{line}\n" for line in lines if Event.decode(line) is None)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def __repr__(self) -> str:
        return f"Logs({', '.join(self._names)})"


@dataclass
class Reached(Training):
    """The training of a job by its events so far, with a row for each report.

    Attributes:
        history: see RunResult.
    """

    history: list[dict[str, str | float]] = field(default_factory=list)
    _at: list[tuple[float, float]] = field(default_factory=list)
    _now: tuple[float, float] = (0.0, 0.0)

    def add(self, event: Event) -> None:
        """Take in one event."""
        super().add(event)
        if event.kind == EventKind.PROGRESS and self.progress.is_placed:
            row = numbers_and_texts(event.data)
            row.pop("restart", None)
            self._now = self.progress.position
            # A group that starts again repeats the steps since its checkpoint.
            while self._at and self._at[-1] >= self._now:
                self._at.pop()
                self.history.pop()
            self._add_row(event, row)
        elif event.kind == EventKind.METRICS:
            row = numbers_and_texts(event.data)
            latest = self.history[-1] if self._now[0] and self.history else {}
            logged = {name: value for name, value in row.items() if name not in _OWN}
            # Curves of a table break where a row lacks their value, so there are no rows without.
            if latest and latest.keys().isdisjoint(logged):
                latest |= logged
            else:
                self._add_row(event, {"loss": latest["loss"], **row} if "loss" in latest else row)

    def _add_row(self, event: Event, row: dict[str, str | float]) -> None:
        epoch, step = self._now
        position = {"time": event.time, "epoch": epoch, "step": step}
        # Without reports of the training, the script's own epoch and step are the only ones.
        reserved = position if epoch else {"time"}
        logged = {name: value for name, value in row.items() if name not in reserved}
        self.history.append({**position, **logged})
        self._at.append(self._now)
        if len(self.history) > MAX_ROWS:
            del self.history[1:-1:2], self._at[1:-1:2]


@dataclass(frozen=True, slots=True)
class RunResult(JobStatus):
    """The result of a job, or its state so far.

    Attributes:
        metrics: the last loss, and the last value of each name that the script logged.
        checkpoints: the folder of its checkpoints on this machine; None if it wrote none, or
            ran elsewhere.
        checkpoint: the newest checkpoint; None if there is none. Of a job in a cluster the path
            in its containers.
        history: a row for each report of the training, in their order: `time` (seconds since the
            epoch), `epoch` (from 1), `step` (of the epoch), `loss`, `epoch_loss` at the end of an
            epoch, and so on, and the names that `job.log(...)` was given since. What was logged
            twice between two reports, or without any, has a row of its own.
            `pandas.DataFrame(result.history)` makes a table of it. Steps that a restart repeated
            are there once. Of more than 100,000 rows every second one is kept.
        logs: what each replica wrote, by its name, as `result.logs["worker-0"]`.
        why: the causes of a bad end, and what is wrong though it succeeded, as a loss that is nan;
            the first one first, each with its next step.
    """

    metrics: Mapping[str, str | float] = field(default_factory=dict)
    checkpoints: Path | None = None
    checkpoint: PurePath | None = None
    history: Sequence[dict[str, str | float]] = field(default=(), repr=False)
    logs: Mapping[str, str] = field(default_factory=dict, repr=False)
    why: tuple[Finding, ...] = ()


def read_reached(backend: Backend, snapshot: Snapshot) -> Reached:
    """Read a job's results from the output of the replica that reports; empty without it."""
    reached, ref = Reached(), JobRef.of(snapshot.job)
    with suppress(BackendError):  # what was read before it counts
        replica = reporting_replica(snapshot.job)
        record = backend if isinstance(backend, RecordBackend) else None
        for line in record.reports(replica) if record else backend.logs(ref, replica):
            if event := Event.decode(line.text, line.replica):
                reached.add(event)
    return reached


def result(backend: Backend, snapshot: Snapshot, reached: Reached, *, check: bool) -> RunResult:
    """The result of a job; of one that runs, how it stands.

    Raises:
        JobFailed: it has not succeeded, unless `check` is off; with this result.
    """
    status = job_status(snapshot)
    ended = status.state.finished
    why = diagnose(snapshot, last_lines(backend, snapshot)) if ended else ()
    local = backend.checkpoints(status.ref) if isinstance(backend, LocalBackend) else None
    run_result = RunResult(
        **{attribute.name: getattr(status, attribute.name) for attribute in fields(status)},
        metrics=reached.metrics,
        checkpoints=local,
        checkpoint=_newest(local, reached.checkpoint),
        history=reached.history,
        logs=Logs(backend, snapshot),
        why=tuple(why),
    )
    if check and status.state is not JobState.SUCCEEDED:
        lines = [f"{status.ref}: {status.state}: {status.message}"]
        lines += [cause.text for cause in why[:1]]
        failure = JobFailed(safe_text("\n".join(lines)))
        failure.exit_code, failure.result = status.exit_code, run_result
        raise failure
    return run_result


def deleted(ref: JobRef) -> JobFailed:
    """The error about a job that was deleted before its end."""
    failure = JobFailed(f"{ref} was deleted while it ran")
    failure.exit_code = JobState.DELETED.exit_code
    return failure


def _newest(folder: Path | None, reported: str) -> PurePath | None:
    """The checkpoint that was reported, or else what is newest in the folder."""
    if reported:
        return PurePosixPath(reported) if folder is None else Path(reported)
    if folder is None:
        return None
    # A script that saves by itself reports nothing.
    files = [file for file in folder.iterdir() if not file.name.startswith(".")]
    # The target of a link may be gone.
    return max(files, key=lambda file: file.lstat().st_mtime, default=None)

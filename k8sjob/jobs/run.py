"""A job on this machine: its start, its end by interrupts, and its result."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING

from k8sjob.errors import JobFailed
from k8sjob.jobs.plan import plan_job
from k8sjob.observe.diagnose import diagnose
from k8sjob.observe.logs import last_lines
from k8sjob.observe.status import JobStatus, job_status
from k8sjob.rendering import check_script
from k8sjob.targets.api import JobState
from k8sjob.targets.jobs import DEFAULT

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from k8sjob.backends.api import JobRef, Plan, Snapshot
    from k8sjob.backends.local import LocalBackend
    from k8sjob.spec import JobSpec

__all__ = ["RunResult", "plan_run", "result", "stop_on_interrupt"]


@dataclass(frozen=True, slots=True)
class RunResult(JobStatus):
    """How a run on this machine ended, and what it reached.

    Attributes:
        metrics: the last loss, and the last value of each name that the script logged.
        checkpoints: the folder of its checkpoints; None where it wrote none.
    """

    metrics: Mapping[str, str | float] = field(default_factory=dict)
    checkpoints: Path | None = None


def plan_run(spec: JobSpec, folder: str | Path = ".") -> Plan:
    """The plan of a job on this machine.

    Raises:
        SpecError: the overlay does not fit the manifest, or the script is not in the context.
    """
    # This machine keeps jobs as the training operator does, whatever they become in a cluster.
    plan = plan_job(spec.model_copy(update={"target": DEFAULT.name}), folder)
    check_script(spec, Path(folder), here=True)
    return plan


def stop_on_interrupt(backend: LocalBackend, ref: JobRef) -> Callable[[int], str | None]:
    """What interrupts do to a job of this process: the first stops it, the second kills it."""

    def stop(times: int) -> str | None:
        if times > 2:
            return None
        backend.stop(ref, now=times == 2, message="Ctrl-C or SIGTERM")
        if times == 2:
            return "killing the job"
        return "stopping after a checkpoint; press Ctrl-C again to kill the job"

    return stop


def result(
    backend: LocalBackend, snapshot: Snapshot, metrics: Mapping[str, str | float], *, check: bool
) -> RunResult:
    """The result of a job that has ended, after its replicas have.

    Raises:
        JobFailed: it did not succeed (unless `check` is off).
    """
    status = job_status(snapshot)
    if check and status.state is not JobState.SUCCEEDED:
        raise _failure(backend, snapshot, status)
    return RunResult(
        **{one.name: getattr(status, one.name) for one in fields(status)},
        metrics=metrics,
        checkpoints=backend.checkpoints(status.ref),
    )


def _failure(backend: LocalBackend, snapshot: Snapshot, status: JobStatus) -> JobFailed:
    causes = diagnose(snapshot, last_lines(backend, snapshot))
    lines = [f"{status.ref}: {status.state}: {status.message}"]
    lines += [f"{cause.message}; {cause.next_step}" for cause in causes[:1]]
    failure = JobFailed("\n".join(lines))
    failure.exit_code = status.exit_code
    return failure

"""A job on this machine, from its spec to its end: made, followed, judged."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING

from k8sjob.backends.local import LocalBackend
from k8sjob.errors import JobFailed, JobNotFound
from k8sjob.lifecycle.diagnose import diagnose
from k8sjob.lifecycle.logs import last_lines
from k8sjob.lifecycle.status import JobState, JobStatus, job_status
from k8sjob.rendering import check_script
from k8sjob.spec import JobSpec, load
from k8sjob.submission import plan
from k8sjob.view.follow import follow
from k8sjob.view.summary import JobSummary

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from k8sjob.backends.api import JobRef, Snapshot
    from k8sjob.contract import Event

__all__ = ["RunResult", "run", "stopper"]


@dataclass(frozen=True, slots=True)
class RunResult(JobStatus):
    """How a run on this machine ended, and what it reached.

    Attributes:
        metrics: the last loss, and the last value of each name that the script logged.
        checkpoints: the folder of its checkpoints; None where it wrote none.
    """

    metrics: Mapping[str, str | float] = field(default_factory=dict)
    checkpoints: Path | None = None


def run(
    spec: JobSpec | str | Path,
    *,
    view: Callable[[Event], object] | None = None,
    logs: bool = True,
    fresh: bool = False,
    resume: str = "",
    check: bool = True,
    folder: str | Path | None = None,
    backend: LocalBackend | None = None,
) -> RunResult:
    """Run a job on this machine and follow it to its end.

    Ctrl-C (in a notebook: interrupt) stops the job: its ranks write a checkpoint and end; a second
    one kills them. When this process dies the job is stopped too.

        >>> result = run("manifests/digits-ddp/job.yaml")  # doctest: +SKIP
        >>> result.state
        <JobState.SUCCEEDED: 'Succeeded'>

    Args:
        spec: a JobSpec, or the path of a job.yaml or of the folder that it lies in.
        view: is called with each event, in this thread; None: a live screen in a terminal, plain
            lines elsewhere, a summary at the end.
        logs: follow the replicas' output; without it there is no progress either.
        fresh: start from scratch, ignoring the checkpoints of earlier runs.
        resume: the id of the run whose checkpoints are resumed; empty: the last run of this name
            and folder, unless that succeeded.
        check: raise JobFailed where the job does not succeed.
        folder: what relative paths of the spec start from; None: where its job.yaml lies, or the
            working folder.
        backend: this machine's, with another state folder for instance.

    Returns:
        The job's last status, the last metrics, and the folder of its checkpoints.

    Raises:
        SpecError: the spec is not valid.
        BackendError: the job cannot be started here; JobExists: one of its name runs.
        JobFailed: it failed, was stopped or deleted (unless `check` is off).
        KeyboardInterrupt: after the job was stopped by Ctrl-C.
    """
    if not isinstance(spec, JobSpec):
        path = Path(spec)
        folder = folder or (path if path.is_dir() else path.parent)
        spec = load(path)
    check_script(spec, Path(folder or "."), here=True)
    backend = backend or LocalBackend(fresh=fresh, resume=resume)
    ref = backend.create(plan(spec, folder or "."))
    summary = JobSummary()
    try:
        code = follow(
            backend,
            ref,
            output=view or "auto",
            logs=logs,
            interrupted=stopper(backend, ref),
            files=backend.folder(ref).path,
            seen=summary.add,
        )
        snapshot = backend.snapshot(ref)
    except JobNotFound:
        raise JobFailed(f"{ref} was deleted while it ran") from None
    finally:
        backend.finish(ref)
    if code > 128:
        raise KeyboardInterrupt
    status = job_status(snapshot)
    if check and status.state is not JobState.SUCCEEDED:
        raise _failed(backend, snapshot)
    losses = {"loss": summary.curve[-1][1]} if summary.curve else {}
    return RunResult(
        **{one.name: getattr(status, one.name) for one in fields(status)},
        metrics=losses | summary.metrics,
        checkpoints=backend.checkpoints(ref),
    )


def stopper(backend: LocalBackend, ref: JobRef) -> Callable[[int], str | None]:
    """What interrupts do to a job of this process: the first stops it, the second kills it."""

    def stop(times: int) -> str | None:
        if times > 2:
            return None
        backend.stop(ref, now=times == 2, message="Ctrl-C or SIGTERM")
        if times == 2:
            return "ending it at once"
        return "stopping after a checkpoint; Ctrl-C again ends it at once"

    return stop


def _failed(backend: LocalBackend, snapshot: Snapshot) -> JobFailed:
    status = job_status(snapshot)
    tails = last_lines(backend, snapshot)
    words = [f"{status.ref}: {status.state}: {status.message}"]
    words += [f"{f.message}; {f.next_step}" for f in diagnose(snapshot, tails)[:1]]
    failure = JobFailed("\n".join(words))
    failure.exit_code = status.exit_code
    return failure

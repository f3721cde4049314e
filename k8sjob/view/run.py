"""The public `k8sjob.run`: a job on this machine, shown until it ends."""

from __future__ import annotations

from typing import TYPE_CHECKING

from k8sjob.backends.local import LocalBackend
from k8sjob.errors import JobFailed, JobNotFound
from k8sjob.jobs.plan import load_spec
from k8sjob.jobs.run import RunResult, plan_run, result, stop_on_interrupt
from k8sjob.view.follow import follow
from k8sjob.view.summary import JobSummary

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from k8sjob.contract import Event
    from k8sjob.spec import JobSpec

__all__ = ["run"]


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
        spec: a JobSpec, or the path of a job.yaml, of its folder, or of a script.
        view: called with each event, in this thread; None: a live screen in a terminal, plain
            lines elsewhere, a summary at the end.
        logs: follow the replicas' output; without it there is no progress either.
        fresh: start from scratch, ignoring the checkpoints of earlier runs.
        resume: the id of the run whose checkpoints are resumed; empty: the last run of this name
            and folder, unless that succeeded.
        check: raise JobFailed unless the job succeeds.
        folder: what relative paths of the spec start from; None: the folder of its job.yaml, or
            the working folder.
        backend: this machine's, with another state folder for instance.

    Returns:
        The job's last status, the last metrics, and the folder of its checkpoints.

    Raises:
        SpecError: the spec is not valid.
        BackendError: the job cannot be started here; JobExists: one of its name is running.
        JobFailed: it failed, was stopped or deleted (unless `check` is off).
        KeyboardInterrupt: after the job was stopped by Ctrl-C.
    """
    plan = plan_run(*load_spec(spec, folder, here=True))
    backend = backend or LocalBackend(fresh=fresh, resume=resume)
    ref = backend.create(plan)
    summary = JobSummary()
    try:
        code = follow(
            backend,
            ref,
            output=view or "auto",
            logs=logs,
            interrupted=stop_on_interrupt(backend, ref),
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
    losses = {"loss": summary.curve[-1][1]} if summary.curve else {}
    return result(backend, snapshot, losses | summary.metrics, check=check)

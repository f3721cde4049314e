"""A job on this machine, from its spec to its end: made, followed, judged."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from k8sjob.backends.local import LocalBackend
from k8sjob.errors import JobFailed, JobNotFound
from k8sjob.lifecycle.diagnose import diagnose
from k8sjob.lifecycle.logs import last_lines
from k8sjob.lifecycle.status import JobState, JobStatus, job_status
from k8sjob.spec import JobSpec, load
from k8sjob.submission import plan
from k8sjob.view.follow import follow

if TYPE_CHECKING:
    from collections.abc import Callable

    from k8sjob.backends.api import JobRef, Snapshot
    from k8sjob.contract import Event

__all__ = ["run", "stopper"]


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
) -> JobStatus:
    """Run a job on this machine and follow it to its end.

    Ctrl-C (in a notebook: interrupt) stops the job: its ranks write a checkpoint and end; a second
    one kills them. When this process dies the job is stopped too.

        >>> status = run("manifests/digits-ddp/job.yaml")  # doctest: +SKIP
        >>> status.state
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
        The job's last status.

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
    backend = backend or LocalBackend(fresh=fresh, resume=resume)
    ref = backend.create(plan(spec, folder or "."))
    try:
        code = follow(
            backend,
            ref,
            output=view or "auto",
            logs=logs,
            interrupted=stopper(backend, ref),
            files=backend.folder(ref).path,
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
    return status


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

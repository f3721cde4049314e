"""A job on this machine, from its plan to its end; the caller decides how it is shown."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from k8sjob.errors import JobNotFound

if TYPE_CHECKING:
    from collections.abc import Callable

    from k8sjob.backends.api import JobRef, Plan, Snapshot
    from k8sjob.backends.local import LocalBackend
    from k8sjob.jobs.result import Reached, RunResult

NO_CHECKPOINT: Final = (
    "the job has no `checkpoint`: unless its script saves and loads its own, the next run starts"
    " from the beginning; --set checkpoint.dir=/checkpoints keeps the progress of a session"
)


@dataclass(frozen=True, slots=True)
class LocalRun:
    """A job that this process has run.

    Attributes:
        backend: this machine's.
        ref: the job.
        code: the exit code, above 128 after an interrupt.
        reached: what was seen of its events.
        snapshot: when it was followed to the end; None if it was deleted.
    """

    backend: LocalBackend
    ref: JobRef
    code: int
    reached: Reached
    snapshot: Snapshot | None

    def result(self, *, check: bool) -> RunResult:
        """Its result.

        Raises:
            JobFailed: it was deleted, or, with `check`, it has not succeeded.
        """
        from k8sjob.jobs.result import deleted, result  # noqa: PLC0415 - see run_plan

        if self.snapshot is None:
            raise deleted(self.ref)
        return result(self.backend, self.snapshot, self.reached, check=check)


def run_plan(plan: Plan, backend: LocalBackend, follow: Callable[..., int]) -> LocalRun:
    """Create a job on this machine and follow it; it does not outlive this call.

    Args:
        plan: see plan_run.
        backend: this machine's.
        follow: shows the job to its end, as k8sjob.view.follow.follow does, and returns the exit
            code.

    Raises:
        BackendError: the job cannot be started, or not be read any more.
        JobFailed: it was deleted before it could be shown.
    """
    ref = backend.create(plan)
    snapshot = None

    def stop(times: int) -> str | None:
        """Stop the job at the first interrupt, and kill it at the second."""
        # The job is being killed already; the third interrupt ends this process.
        if times > 2:
            return None
        backend.stop(ref, now=times == 2, message="Ctrl-C or SIGTERM")
        if times == 2:
            return "killing the job"
        keeps = plan.spec.checkpoint is not None
        how = "stopping after a checkpoint" if keeps else "stopping the job"
        return f"{how}; press Ctrl-C again to kill the job"

    try:
        # The job runs already while what reads it is loaded, within reach of an interrupt.
        from k8sjob.jobs.result import Reached, deleted  # noqa: PLC0415 - see above

        reached = Reached()
        files = backend.folder(ref)
        code = follow(backend, ref, interrupted=stop, files=files, on_event=reached.add)
    except JobNotFound:
        raise deleted(ref) from None
    finally:
        # Also after an error of the view: a job in the foreground does not outlive the command.
        backend.finish(ref)
    # Only now are all replicas down: until then a Pod that explains the end may be on its way out.
    with suppress(JobNotFound):
        snapshot = backend.snapshot(ref)
    return LocalRun(backend, ref, code, reached, snapshot)

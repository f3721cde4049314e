"""A job's suspension and its end, for the command line and the page alike."""

from __future__ import annotations

from typing import TYPE_CHECKING

from k8sjob.backends.api import LOCAL
from k8sjob.kube.objects import QUEUE
from k8sjob.observe.status import job_status
from k8sjob.targets.jobs import settings_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from k8sjob.backends.api import Backend, JobRef
    from k8sjob.targets.api import Job


def suspend(
    backend: Backend,
    ref: JobRef,
    *,
    value: bool,
    waiting: Callable[[float], object] | None = None,
) -> tuple[str, str]:
    """Suspend or resume a job, unless it already is: what was done, and a warning or "".

    Raises:
        BackendError: see Backend.suspend.
    """
    job = (snapshot := backend.snapshot(ref)).job
    state = job_status(snapshot).state
    if job.suspended == value and not state.finished:
        how = "is already suspended" if value else f"is not suspended ({state})"
        done = f"{ref} {how}: nothing was changed"
        return done, _kueue_decides(job, ref, value=value) if value else ""
    backend.suspend(ref, value=value, waiting=waiting)
    warnings = [_kueue_decides(job, ref, value=value), _writes_no_checkpoint(job) if value else ""]
    done = f"{ref} is being {'suspended' if value else 'resumed'}"
    return done, "; ".join(filter(None, warnings))


def _writes_no_checkpoint(job: Job) -> str:
    """A warning where the job.yaml has no checkpoint; else, and for others' jobs, empty."""
    config = settings_of(job.document)
    if not config or config.get("checkpoint_dir"):
        return ""
    return "the job has no `checkpoint`: if its script writes none, `resume` starts from scratch"


def _kueue_decides(job: Job, ref: JobRef, *, value: bool) -> str:
    """A warning where the job is in a queue of Kueue's; else empty."""
    # The label alone does not tell whether Kueue manages this kind, so the warning says "if".
    if QUEUE not in job.labels or ref.namespace == LOCAL:
        return ""
    command = f"kubectl get workloads -n {ref.namespace} -l kueue.x-k8s.io/job-uid={job.uid}"
    if value:
        return (
            "if Kueue manages the job, it starts it again as long as the job has its quota; to stop"
            f" it, set spec.active of its Workload to false: {command}"
        )
    return (
        "if Kueue manages the job, it stops it again until the queue has room for it (see k8sjob"
        f" why), or as long as spec.active of its Workload is false: {command}"
    )

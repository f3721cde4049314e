"""A job's suspension and its end, for the command line and the page alike."""

from __future__ import annotations

from typing import TYPE_CHECKING

from k8sjob.backends.api import LOCAL
from k8sjob.kube.objects import QUEUE, Object
from k8sjob.observe.status import job_status
from k8sjob.targets.jobs import is_suspended

if TYPE_CHECKING:
    from collections.abc import Callable

    from k8sjob.backends.api import Backend, JobRef


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
    if is_suspended(job) == value and not state.finished:
        how = "is already suspended" if value else f"is not suspended ({state})"
        return f"{ref} {how}: nothing was changed", ""
    backend.suspend(ref, value=value, waiting=waiting)
    warning = ""
    if QUEUE in Object(job).labels and ref.namespace != LOCAL:
        warning = (
            "where Kueue manages the job it undoes that at once; set spec.active of its Workload"
            f" to {'false' if value else 'true'} instead: kubectl get workloads -n {ref.namespace}"
            f" -l kueue.x-k8s.io/job-uid={Object(job).uid}"
        )
    return f"{ref} is being {'suspended' if value else 'resumed'}", warning

"""`k8sjob suspend` and `k8sjob resume`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from k8sjob.backends.api import LOCAL
from k8sjob.cli.naming import Place, find_all, job_argument, place_options
from k8sjob.cli.output import line, say, warn
from k8sjob.kube.objects import QUEUE, Object
from k8sjob.observe.status import job_status
from k8sjob.targets.jobs import is_suspended

if TYPE_CHECKING:
    from k8sjob.backends.api import Backend, JobRef


@click.command("suspend")
@job_argument("jobs", many=True)
@place_options()
def suspend_command(jobs: tuple[str, ...], place: Place) -> None:
    """Stop the replicas after a checkpoint; the job stays, for k8sjob resume."""
    for backend, ref in find_all(jobs, place):
        _suspend(backend, ref, value=True)


@click.command("resume")
@job_argument("jobs", many=True)
@place_options()
def resume_command(jobs: tuple[str, ...], place: Place) -> None:
    """Resume suspended jobs from their newest checkpoint."""
    for backend, ref in find_all(jobs, place):
        _suspend(backend, ref, value=False)


def _suspend(backend: Backend, ref: JobRef, *, value: bool) -> None:
    """Suspend or resume a job, unless it already is."""
    snapshot = backend.snapshot(ref)
    state = job_status(snapshot).state
    if is_suspended(snapshot.job) == value and not state.finished:
        how = "is already suspended" if value else f"is not suspended ({state})"
        line(f"{ref} {how}: nothing was changed")
        return

    def waiting(seconds: float) -> None:
        say(f"waiting until the old pods of {ref} are gone, at most {seconds:.0f} s")

    backend.suspend(ref, value=value, waiting=waiting)
    line(f"{ref} is being {'suspended' if value else 'resumed'}")
    if QUEUE in Object(snapshot.job).labels and ref.namespace != LOCAL:
        warn(
            "where Kueue manages the job it undoes that at once; set spec.active of its Workload"
            f" to {'false' if value else 'true'} instead: kubectl get workloads -n {ref.namespace}"
            f" -l kueue.x-k8s.io/job-uid={Object(snapshot.job).uid}"
        )

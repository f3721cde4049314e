"""`k8sjob suspend` and `k8sjob resume`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from k8sjob.cli.find_job import Place, find_all, job_argument, place_options
from k8sjob.cli.output import line, print_status, warn
from k8sjob.jobs.suspend import suspend

if TYPE_CHECKING:
    from k8sjob.backends.api import Backend, JobRef


@click.command("suspend")
@job_argument("jobs", many=True)
@place_options()
def suspend_command(jobs: tuple[str, ...], place: Place) -> None:
    """Stop the replicas after a checkpoint; k8sjob resume continues the job."""
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

    def waiting(seconds: float) -> None:
        print_status(f"waiting until the old pods of {ref} are gone, at most {seconds:.0f} s")

    done, warning = suspend(backend, ref, value=value, waiting=waiting)
    line(done)
    if warning:
        warn(warning)

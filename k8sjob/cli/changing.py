"""Commands that change jobs which are there: suspend, resume, delete."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from k8sjob.backends.api import LOCAL, JobRef
from k8sjob.backends.conditions import is_suspended
from k8sjob.cli.failure import say
from k8sjob.cli.naming import find_all, job_argument, jobs_here, local_backend
from k8sjob.cli.output import line
from k8sjob.cli.place import Place, place_options
from k8sjob.cli.selecting import ago, selector_option
from k8sjob.errors import BackendError, JobNotFound
from k8sjob.lifecycle.status import deletion, job_status

if TYPE_CHECKING:
    from collections.abc import Sequence
    from datetime import datetime

    from k8sjob.backends.api import Backend, Snapshot

__all__ = ["delete_command", "resume_command", "suspend_command"]


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
    """Let suspended jobs go on from their newest checkpoint."""
    for backend, ref in find_all(jobs, place):
        _suspend(backend, ref, value=False)


def _suspend(backend: Backend, ref: JobRef, *, value: bool) -> None:
    """Suspend or resume a job, and say so; or that it is as it is to be already."""
    there = backend.snapshot(ref)
    state = job_status(there).state
    if is_suspended(there.job) == value and not state.finished:
        how = "is suspended already" if value else f"is not suspended ({state})"
        line(f"{ref} {how}: nothing was changed")
        return

    def waiting(seconds: float) -> None:
        say(f"waiting until the old pods of {ref} are gone, {seconds:.0f} s at most")

    backend.suspend(ref, value=value, waiting=waiting)
    line(f"{ref} is being {'suspended' if value else 'resumed'}")


@click.command("delete")
@job_argument("jobs", many=True, required=False)
@selector_option
@click.option("--all", "everything", is_flag=True, help="All jobs of the place that is named.")
@click.option(
    "--checkpoints", is_flag=True, help="Remove the checkpoints of jobs of this machine, too."
)
@click.option(
    "--older-than",
    "before",
    metavar="AGE",
    callback=ago,
    help="With -l or --all: only jobs that ended so long ago, as 12h or 7d.",
)
@place_options()
def delete_command(  # noqa: PLR0917 - click hands them over by name
    jobs: tuple[str, ...],
    labels: str,
    everything: bool,
    checkpoints: bool,
    before: datetime | None,
    place: Place,
) -> None:
    """Stop jobs and remove them with their logs; checkpoints stay, unless --checkpoints is given.

    With -l or --all in place of names the place must be said, by --local or by -n: nothing is
    deleted where nobody looked.
    """
    if sum((bool(jobs), bool(labels), everything)) != 1:
        raise click.UsageError("name jobs, or say which by -l SELECTOR or --all; one of the three")
    if jobs and before:
        raise click.UsageError("--older-than chooses among the jobs of -l SELECTOR or --all")
    chosen = find_all(jobs, place) if jobs else _chosen(labels, before, place)
    if checkpoints and any(ref.namespace != LOCAL for _, ref in chosen):
        raise click.UsageError(
            "--checkpoints is for jobs of this machine; in a cluster checkpoints lie on volumes"
        )
    for backend, ref in chosen:
        try:
            _delete(backend, ref, checkpoints=checkpoints)
        except JobNotFound:
            if jobs:
                raise
            continue  # it went by itself since it was chosen
    if not chosen:
        say("nothing to delete")


def _delete(backend: Backend, ref: JobRef, *, checkpoints: bool) -> None:
    """Delete a job, and say what stays of it."""
    from k8sjob.backends.local import LocalBackend  # noqa: PLC0415 - of no use for a cluster's jobs

    if not isinstance(backend, LocalBackend):
        backend.delete(ref)
        kept = _kept(backend, ref)
        line(f"{ref}: {kept}" if kept else f"{ref} deleted")
        return
    saved = backend.checkpoints(ref)
    backend.delete(ref, checkpoints=checkpoints)
    line(f"{ref} deleted")
    if saved and saved.exists():
        from k8sjob.image.context import shown_size  # noqa: PLC0415 - of no use in a cluster

        size = sum(path.lstat().st_size for path in saved.rglob("*") if path.is_file())
        why = "; another run uses them, or the folder is yours" if checkpoints else ""
        say(f"its checkpoints stay in {saved} ({shown_size(size)}){why}")


def _kept(backend: Backend, ref: JobRef) -> str:
    """What still keeps a job whose deletion was asked for; empty where it is gone."""
    try:
        job = backend.snapshot(ref).job
    except BackendError:  # gone, or nobody can tell
        return ""
    return deletion(job) if job["metadata"].get("deletionTimestamp") else ""


def _chosen(labels: str, before: datetime | None, place: Place) -> Sequence[tuple[Backend, JobRef]]:
    """The jobs of one place that fit a selector, all for an empty one, and had ended by then."""
    backend: Backend
    if place.is_local:
        backend, found = local_backend(), jobs_here(labels)
    elif place.namespace:
        backend = cluster = place.connect()
        found = cluster.jobs(selector=labels)
    else:
        raise click.UsageError("say where: --local for this machine, -n NAMESPACE for a cluster")
    return [
        (backend, JobRef.of(snapshot.job))
        for snapshot in found
        if before is None or _had_ended(snapshot, before)
    ]


def _had_ended(snapshot: Snapshot, moment: datetime) -> bool:
    status = job_status(snapshot)
    return status.state.finished and status.finished is not None and status.finished <= moment

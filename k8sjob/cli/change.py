"""`k8sjob suspend`, `k8sjob resume` and `k8sjob delete`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from k8sjob.backends.api import LOCAL, Backend, JobRef, Snapshot
from k8sjob.cli.naming import (
    Place,
    find_all,
    job_argument,
    jobs_here,
    keep_record,
    local_backend,
    place_options,
)
from k8sjob.cli.options import ago, selector_option
from k8sjob.cli.output import line, say, warn
from k8sjob.errors import BackendError, JobNotFound
from k8sjob.kube.labels import QUEUE
from k8sjob.kube.objects import Object
from k8sjob.observe.status import deletion, job_status
from k8sjob.targets.jobs import is_suspended

if TYPE_CHECKING:
    from collections.abc import Sequence
    from datetime import datetime


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


@click.command("delete")
@job_argument("jobs", many=True, required=False)
@selector_option
@click.option("--all", "everything", is_flag=True, help="All jobs of the named place.")
@click.option(
    "--checkpoints", is_flag=True, help="Remove the checkpoints of jobs on this machine, too."
)
@click.option(
    "--older-than",
    "before",
    metavar="AGE",
    callback=ago,
    help="With -l or --all: only jobs that ended at least this long ago, as 12h or 7d.",
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

    With -l or --all instead of names, --local or -n must name the place: nothing is deleted in a
    place that was not named.
    """
    if sum((bool(jobs), bool(labels), everything)) != 1:
        raise click.UsageError("name jobs, or select them by -l SELECTOR or by --all")
    if jobs and before:
        raise click.UsageError("--older-than selects among the jobs of -l SELECTOR or --all")
    chosen = find_all(jobs, place) if jobs else _chosen(labels, before, place)
    if checkpoints and any(ref.namespace != LOCAL for _, ref in chosen):
        raise click.UsageError(
            "--checkpoints is for jobs on this machine; in a cluster checkpoints are on volumes"
        )
    for backend, ref in chosen:
        try:
            _delete(backend, ref, checkpoints=checkpoints)
        except JobNotFound:
            if jobs:
                raise
            continue  # it was deleted since it was selected
    if not chosen:
        say("nothing to delete")


def _delete(backend: Backend, ref: JobRef, *, checkpoints: bool) -> None:
    """Delete a job, and print what remains of it."""
    from k8sjob.backends.local import LocalBackend  # noqa: PLC0415 - of no use for a cluster's jobs

    if not isinstance(backend, LocalBackend):
        if job_status(backend.snapshot(ref)).state.finished:
            keep_record(backend, ref)
        backend.delete(ref)
        kept = _kept(backend, ref)
        line(f"{ref}: {kept}" if kept else f"{ref} deleted")
        return
    saved = backend.checkpoints(ref)
    backend.delete(ref, checkpoints=checkpoints)
    line(f"{ref} deleted")
    if saved and saved.exists():
        from k8sjob.image.layer.context import shown_size  # noqa: PLC0415 - of no use in a cluster

        size = sum(path.lstat().st_size for path in saved.rglob("*") if path.is_file())
        why = "; another run uses them, or the folder is yours" if checkpoints else ""
        say(f"its checkpoints remain in {saved} ({shown_size(size)}){why}")


def _kept(backend: Backend, ref: JobRef) -> str:
    """What holds up the deletion of a job; empty if it is gone."""
    try:
        job = backend.snapshot(ref).job
    except BackendError:  # gone, or unknown
        return ""
    return deletion(job) if job["metadata"].get("deletionTimestamp") else ""


def _chosen(labels: str, before: datetime | None, place: Place) -> Sequence[tuple[Backend, JobRef]]:
    """The jobs of one place that fit a selector (all for an empty one) and had ended by then."""
    backend: Backend
    if place.is_local:
        backend, found = local_backend(), jobs_here(labels)
    elif place.namespace:
        backend = cluster = place.connect()
        found = cluster.jobs(selector=labels)
    else:
        raise click.UsageError("name the place: --local for this machine, or -n NAMESPACE")
    return [
        (backend, JobRef.of(snapshot.job))
        for snapshot in found
        if before is None or _had_ended(snapshot, before)
    ]


def _had_ended(snapshot: Snapshot, moment: datetime) -> bool:
    status = job_status(snapshot)
    return status.state.finished and status.finished is not None and status.finished <= moment

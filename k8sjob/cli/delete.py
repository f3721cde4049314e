"""`k8sjob delete`."""

from __future__ import annotations

import sys
from contextlib import suppress
from typing import TYPE_CHECKING

import click

from k8sjob.backends.api import LOCAL, Backend, JobRef
from k8sjob.cli.find_job import (
    Place,
    find_all,
    job_argument,
    jobs_here,
    keep_record,
    local_backend,
    place_options,
)
from k8sjob.cli.options import ago, selector_option
from k8sjob.cli.output import line, print_status
from k8sjob.errors import BackendError, JobNotFound, JobTooLarge
from k8sjob.observe.status import deletion, job_status

if TYPE_CHECKING:
    from collections.abc import Sequence
    from datetime import datetime


@click.command("delete")
@job_argument("jobs", many=True, required=False)
@selector_option
@click.option(
    "--all",
    "everything",
    is_flag=True,
    help="All jobs in the namespace of -n, or on this machine with --local.",
)
@click.option(
    "--checkpoints", is_flag=True, help="Also remove the checkpoints of jobs on this machine."
)
@click.option(
    "--older-than",
    "before",
    metavar="AGE",
    callback=ago,
    help="With -l or --all: only jobs that ended at least this long ago, such as 12h or 7d.",
)
@click.option(
    "-y", "--yes", is_flag=True, help="Do not ask before files that the job wrote are deleted."
)
@place_options()
def delete_command(  # noqa: PLR0917 - click hands them over by name
    jobs: tuple[str, ...],
    labels: str,
    everything: bool,
    checkpoints: bool,
    before: datetime | None,
    yes: bool,
    place: Place,
) -> None:
    """Stop jobs and remove them with their logs; checkpoints stay, unless --checkpoints is given.

    Files that a job wrote into its folders on this machine are named first; in a terminal the
    command asks before it deletes them.

    With -l or --all instead of names, --local or -n must be given: nothing is deleted in a
    place that was not specified.
    """
    if sum((bool(jobs), bool(labels), everything)) != 1:
        raise click.UsageError("give names of jobs, or select jobs with -l SELECTOR or --all")
    if jobs and before:
        raise click.UsageError("--older-than needs -l SELECTOR or --all")
    chosen = find_all(jobs, place) if jobs else _chosen(labels, before, place)
    if checkpoints and any(ref.namespace != LOCAL for _, ref in chosen):
        raise click.UsageError(
            "--checkpoints is for jobs on this machine; in a cluster checkpoints are on volumes"
        )
    # Asked once, before the first job is touched.
    _confirm_files(chosen, yes=yes)
    for backend, ref in chosen:
        try:
            _delete(backend, ref, checkpoints=checkpoints)
        except JobNotFound:
            if jobs:
                raise
            continue  # it was deleted since it was selected
    if not chosen:
        print_status("nothing to delete")


def _confirm_files(chosen: Sequence[tuple[Backend, JobRef]], *, yes: bool) -> None:
    """Name the files that go with the jobs; in a terminal ask whether they may."""
    from k8sjob.backends.local import LocalBackend  # noqa: PLC0415 - as in _delete
    from k8sjob.backends.local.outputs import listed, written_files  # noqa: PLC0415 - the same

    folders = [backend.folder(ref) for backend, ref in chosen if isinstance(backend, LocalBackend)]
    files = [path for folder in folders for path in written_files(folder)]
    if files:
        print_status(f"files that the job wrote are deleted with it:\n{listed(files)}")
        # In a script nobody can answer, and delete is what was asked for.
        if not yes and sys.stdin.isatty() and sys.stderr.isatty():
            click.confirm("Delete them?", abort=True, err=True)


def _delete(backend: Backend, ref: JobRef, *, checkpoints: bool) -> None:
    """Delete a job, and print what remains of it."""
    from k8sjob.backends.local import LocalBackend  # noqa: PLC0415 - of no use for a cluster's jobs

    if not isinstance(backend, LocalBackend):
        with suppress(JobTooLarge):  # it has no record, and whoever made it must be able to end it
            # Of a job that still runs `delete` is the end that its user wanted: nothing is to be
            # explained.
            if job_status(backend.snapshot(ref)).state.finished:
                keep_record(backend, ref)
        backend.delete(ref)
        outcome = f"{ref} deleted"
        with suppress(BackendError):  # gone, or unknown
            if (job := backend.snapshot(ref).job).deleting:
                outcome = f"{ref}: {deletion(job)}"
        line(outcome)
        return
    saved = backend.checkpoints(ref)
    backend.delete(ref, checkpoints=checkpoints)
    line(f"{ref} deleted")
    if saved and saved.exists():
        from k8sjob.image.build_context import shown_size  # noqa: PLC0415 - of no use in a cluster

        size = sum(path.lstat().st_size for path in saved.rglob("*") if path.is_file())
        why = "; another run uses them, or the folder is yours" if checkpoints else ""
        print_status(f"its checkpoints remain in {saved} ({shown_size(size)}){why}")


def _chosen(labels: str, before: datetime | None, place: Place) -> Sequence[tuple[Backend, JobRef]]:
    """The jobs of one place that fit a selector (all for an empty one) and had ended by then."""
    backend: Backend
    if place.is_local:
        backend, snapshots = local_backend(), jobs_here(labels)
    elif place.namespace:
        backend = cluster = place.connect()
        snapshots = cluster.jobs(selector=labels)
    else:
        raise click.UsageError("specify the place: --local for this machine, or -n NAMESPACE")
    return [
        (backend, JobRef.of(snapshot.job))
        for snapshot in snapshots
        if before is None or ((ended := job_status(snapshot).finished) and ended <= before)
    ]

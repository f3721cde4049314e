"""`k8sjob watch`: a job, or all jobs of a place, shown until they end or the reader leaves."""

from __future__ import annotations

import threading
from functools import partial
from typing import TYPE_CHECKING, cast

import click

from k8sjob.backends.local import LocalBackend
from k8sjob.cli.find_job import Place, find, job_argument, jobs_here, keep_record, place_options
from k8sjob.cli.options import selector_option, view_options
from k8sjob.cli.output import print_status
from k8sjob.observe.watch import poll_all, watch_all
from k8sjob.targets.api import JobState
from k8sjob.view.follow import follow, follow_all

if TYPE_CHECKING:
    from k8sjob.backends.api import Backend, JobRef
    from k8sjob.view.views import Format, Output


@click.command("watch")
@job_argument(required=False)
@view_options
@selector_option
@place_options(everywhere=True)
def watch_command(  # noqa: PLR0917 - click hands them over by name
    job: str | None,
    output: str,
    verbose: bool,
    no_logs: bool,
    labels: str,
    place: Place,
) -> int:
    """Follow a job to its end: its state, its progress, its output.

    Without NAME it follows all jobs: those of the cluster if one is configured, else those of this
    machine. Ctrl-C does not affect the jobs. The exit code is that of the job's outcome: 0 if it
    succeeded, 100 if it failed, 103 if it was stopped or deleted.
    """
    if job is None:
        return _watch_all(output, labels, place)
    if labels or place.all_namespaces:
        raise click.UsageError("-l and -A select among all jobs; omit them or NAME")
    backend, ref = find(job, place, any_kind=True)
    return attach(backend, ref, place, output=output, logs=not no_logs, verbose=verbose)


def _watch_all(output: str, labels: str, place: Place) -> int:
    """Many jobs of one place, until an interrupt comes."""
    stop = threading.Event()
    # One place at a time: a cluster's jobs come by its watch, those of this machine are read again
    # and again.
    if not place.asks_cluster:
        jobs = partial(jobs_here, labels)
        if not jobs():
            print_status("no jobs on this machine yet; waiting for the first")
        events = poll_all(jobs, stop)
    else:
        cluster = place.connect()
        changes = cluster.watch_jobs(
            stop=stop, all_namespaces=place.all_namespaces, selector=labels
        )
        events = watch_all(changes, lambda: cluster.transport.skew)
    try:
        return follow_all(events, output=cast("Format", output))
    finally:
        stop.set()


def attach(
    backend: Backend,
    ref: JobRef,
    place: Place,
    *,
    output: str = "auto",
    logs: bool = True,
    verbose: bool = False,
) -> int:
    """Follow a job that continues when its reader leaves; the exit code."""
    files = backend.folder(ref) if isinstance(backend, LocalBackend) else None
    kind = cast("Output", output)
    code = follow(backend, ref, output=kind, logs=logs, verbose=verbose, files=files)
    if code > 128:
        print_status(f"Detached; reattach with k8sjob watch {ref}{place.options}")
    elif code in {JobState.SUCCEEDED.exit_code, JobState.FAILED.exit_code}:
        keep_record(backend, ref)
    return code

"""`k8sjob watch`."""

from __future__ import annotations

import threading
from functools import partial
from typing import TYPE_CHECKING, cast

import click

from k8sjob.backends.connect import configured
from k8sjob.backends.local import LocalBackend
from k8sjob.cli.failure import say
from k8sjob.cli.naming import find, job_argument, jobs_here, place_options
from k8sjob.cli.options import selector_option, view_options
from k8sjob.observe.watch_all import poll_all, watch_all
from k8sjob.view.follow import follow, follow_all

if TYPE_CHECKING:
    from k8sjob.backends.api import Backend, JobRef
    from k8sjob.cli.naming import Place
    from k8sjob.view.views import Format, Output

__all__ = ["attach", "watch_command"]


@click.command("watch")
@job_argument(required=False)
@view_options
@selector_option
@place_options(everywhere=True)
def watch_command(job: str | None, output: str, no_logs: bool, labels: str, place: Place) -> int:
    """Follow a job to its end: its state, its progress, its output.

    Without NAME all jobs are followed, of the cluster if one is configured, else of this machine.
    Ctrl-C leaves the jobs alone. The exit code is that of the job's outcome: 0 if it succeeded,
    100 if it failed, 103 if it was stopped or deleted.
    """
    if job is None:
        return _watch_all(output, labels, place)
    if labels or place.all_namespaces:
        raise click.UsageError("-l and -A select among all jobs; leave them or NAME out")
    backend, ref = find(job, place)
    return attach(backend, ref, place, output=output, logs=not no_logs)


def _watch_all(output: str, labels: str, place: Place) -> int:
    """Many jobs of one place, until an interrupt comes."""
    stop = threading.Event()
    if place.is_local or not (place.is_cluster or place.all_namespaces or configured()):
        jobs = partial(jobs_here, labels)
        if not jobs():
            say("no jobs on this machine yet; waiting for the first")
        events = poll_all(jobs, stop)
    else:
        changes = place.connect().watch_jobs(
            stop=stop, all_namespaces=place.all_namespaces, selector=labels
        )
        events = watch_all(changes)
    try:
        return follow_all(events, output=cast("Format", output))
    finally:
        stop.set()


def attach(
    backend: Backend, ref: JobRef, place: Place, *, output: str = "auto", logs: bool = True
) -> int:
    """Follow a job that continues when its reader leaves; the exit code."""
    files = backend.folder(ref).path if isinstance(backend, LocalBackend) else None
    code = follow(backend, ref, output=cast("Output", output), logs=logs, files=files)
    if code > 128:
        say(f"Detached; reattach with k8sjob watch {ref}{place.options}")
    return code

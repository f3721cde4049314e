"""The job of a command that only reads: NAME, -l SELECTOR, or the newest job of the place."""

from __future__ import annotations

import functools
from collections import Counter
from typing import TYPE_CHECKING, Any, cast

import click

from k8sjob.backends.api import Backend, JobRef
from k8sjob.cli.find_job import Place, find, job_argument
from k8sjob.cli.list import EPOCH, all_jobs, name_of, no_jobs
from k8sjob.cli.output import print_status
from k8sjob.errors import JobNotFound
from k8sjob.kube.api_resources import is_selector
from k8sjob.observe.status import job_status

if TYPE_CHECKING:
    from collections.abc import Callable

    from k8sjob.backends.api import Snapshot
    from k8sjob.backends.cluster.backend import ClusterBackend


def job_or_labels(command: Callable[..., Any]) -> Callable[..., Any]:
    """The argument NAME, or -l SELECTOR in its place; without both the newest job is meant.

    The command gets them as one `job` for `read_job`, None for the newest.
    """

    @functools.wraps(command)
    def of_one(job: str | None, labels: str | None, **arguments: Any) -> Any:
        if labels is not None:
            if job is not None or not labels:
                raise click.UsageError("give NAME, or the labels of pods with -l SELECTOR")
            # A key alone is the selector of the Pods that have it, and would be taken for a name.
            job = f"pods/{labels if is_selector(labels) else f'{labels},{labels}'}"
        return command(job=job, **arguments)

    text = "All pods with these labels: app=web, 'stage in (dev, test)', !draft."
    decorated = click.option("-l", "--selector", "labels", metavar="SELECTOR", help=text)(of_one)
    return job_argument(required=False)(decorated)


def read_job(job: str | None, place: Place) -> tuple[Backend, JobRef, Snapshot]:
    """The back end that has the job or any object that runs Pods, and the job there; see `find`.

    None is the newest of the jobs that `list` shows for the place, and stderr has its name.

    Raises:
        JobNotFound: there is none.
    """
    if job is not None:
        backend, ref = find(job, place, any_kind=True)
        # A cluster has just been asked for it.
        if ref.job:
            return backend, ref, cast("ClusterBackend", backend).snapshot_of(ref.job)
        return backend, ref, backend.snapshot(ref)
    jobs, _, namespace = all_jobs("", place, pods=False)
    if not jobs:
        raise JobNotFound(no_jobs("", place, namespace))
    backend, snapshot = max(jobs, key=lambda pair: job_status(pair[1]).created or EPOCH)
    ref = JobRef.of(snapshot.job)
    runs = Counter(str(JobRef.of(run.job)) for _, run in jobs)
    print_status(f"the newest job: {name_of(ref, runs)}")
    return backend, ref, backend.snapshot(ref)

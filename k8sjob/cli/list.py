"""`k8sjob list`."""

from __future__ import annotations

from collections import Counter
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Final

import click

from k8sjob.backends.api import LOCAL, Backend, JobRef, Snapshot
from k8sjob.cli.find_job import Place, jobs_here, local_backend, place_options, warn_of_clock
from k8sjob.cli.options import format_option, selector_option
from k8sjob.cli.output import document, fail, line, print_status, table
from k8sjob.errors import BackendError
from k8sjob.kube.objects import outline, without_managed_fields
from k8sjob.observe.status import JobStatus, job_status
from k8sjob.targets.api import JobState
from k8sjob.targets.jobs import replica_names
from k8sjob.view.formats import duration

if TYPE_CHECKING:
    from k8sjob.kube.objects import Trim
    from k8sjob.view.json_output import JobProgress

_HAVE_PROGRESS: Final = (JobState.RUNNING, JobState.SUCCEEDED)
EPOCH: Final = datetime.fromtimestamp(0, UTC)
"""When a job without a time was created."""


@click.command("list")
@selector_option
@format_option("table", "wide", "json", "yaml", "name")
@place_options(everywhere=True)
def list_command(labels: str, output: str, place: Place) -> int:
    """List the jobs on this machine and, if one is configured, of the cluster; newest first.

    For the newest 32 running jobs it shows epoch, step, loss and ETA, or which phase of the start
    they are in; if fewer run, the last loss and metrics of jobs that have succeeded, of those in a
    cluster with -o wide, json or yaml. If this machine has several runs of one name, each is listed
    as local/NAME@RUN. The KIND is shown if there are several.

    If the cluster cannot be reached, the jobs on this machine are still listed, with an error and
    the exit code 1.
    """
    jobs, failed, namespace = all_jobs(labels, place, trim=outline)
    listed = [(job_status(snapshot), snapshot, backend) for backend, snapshot in jobs]
    listed.sort(key=lambda job: job[0].created or EPOCH, reverse=True)
    # The output of a job in a cluster is two requests, and one that has ended says nothing new.
    readable = [
        (backend, snapshot)
        for status, snapshot, backend in listed
        if output != "table"
        or status.ref.namespace == LOCAL
        or status.state is not JobState.SUCCEEDED
    ]
    progress: dict[JobRef, JobProgress] = {}
    if output != "name" and any(status.state in _HAVE_PROGRESS for status, *_ in listed):
        from k8sjob.view.json_output import progress_of  # noqa: PLC0415 - only where a job trains

        progress = progress_of(readable, succeeded=True)
    has_progress = any(map(str, progress.values()))
    runs = Counter(str(status.ref) for status, *_ in listed)
    match output:
        case "name":
            for status, *_ in listed:
                line(name_of(status.ref, runs))
        case "json" | "yaml":
            from k8sjob.view.json_output import job_document  # noqa: PLC0415 - a table needs none

            pairs = ((snapshot, progress.get(status.ref)) for status, snapshot, _ in listed)
            document([job_document(*pair) for pair in pairs], output)
        case _ if not listed:
            if not failed:
                print_status(no_jobs(labels, place, namespace))
        case _:
            wide = output == "wide"
            mixed = len({status.ref.kind for status, *_ in listed}) > 1
            header = ["NAME", *["KIND"] * mixed, "STATE", "REPLICAS", "AGE", "TIME"]
            rows = (
                [
                    name_of(status.ref, runs),
                    *[status.ref.kind] * mixed,
                    *_row(status, snapshot, progress.get(status.ref), wide=wide),
                    *[progress.get(status.ref, "")] * has_progress,
                ]
                for status, snapshot, _ in listed
            )
            more = ["RESTARTS", "IMAGE", "UID"] * wide + ["PROGRESS"] * has_progress
            table(header + more, rows)
    return int(failed)


def all_jobs(
    labels: str, place: Place, *, pods: bool = True, trim: Trim = without_managed_fields
) -> tuple[list[tuple[Backend, Snapshot]], bool, str]:
    """The jobs of all places, those of the cluster with their `pods` or without; see `jobs`.

    Returns:
        The jobs, each with its back end; whether the cluster could not be reached; and the
        namespace that was looked in, empty for all of them, or none.
    """
    jobs: list[tuple[Backend, Snapshot]] = []
    if not place.is_cluster and (here := jobs_here(labels)):
        local = local_backend()
        jobs += [(local, snapshot) for snapshot in here]
    if not place.asks_cluster:
        return jobs, False, ""
    try:
        cluster = place.connect()
        everywhere = place.all_namespaces
        snapshots = cluster.jobs(all_namespaces=everywhere, selector=labels, pods=pods, trim=trim)
        # The apiserver gives an empty list of a namespace that does not exist: a misspelled one
        # looks like one without jobs.
        if place.namespace and not snapshots:
            cluster.look_for_namespace()
    except BackendError as error:
        if place.is_cluster:
            raise
        fail(str(error))
        return jobs, True, ""
    # The skew is the server's: all snapshots have the same.
    for snapshot in snapshots[:1]:
        warn_of_clock(snapshot)
    jobs += [(cluster, snapshot) for snapshot in snapshots]
    return jobs, False, "" if place.all_namespaces else cluster.namespace


def no_jobs(labels: str, place: Place, namespace: str) -> str:
    """The sentence about a place that has none, by the namespace that was looked in."""
    fitting = f" with {labels}" if labels else ""
    if not place.asks_cluster:
        return f"no jobs{fitting} on this machine; start one with k8sjob run"
    where = f"in namespace {namespace} of the cluster" if namespace else "in the cluster"
    make = "k8sjob submit"
    if not place.is_cluster:
        where, make = f"on this machine or {where}", f"k8sjob run or {make}"
    hint = "-A looks in all namespaces; " if namespace else ""
    return f"no jobs{fitting} {where}; {hint}create one with {make}"


def name_of(ref: JobRef, runs: Counter[str]) -> str:
    """A job as other commands accept it, even if a name has several runs."""
    return f"{ref}@{ref.uid[:8]}" if ref.namespace == LOCAL and runs[str(ref)] > 1 else str(ref)


def _row(
    status: JobStatus, snapshot: Snapshot, progress: JobProgress | None, *, wide: bool
) -> list[object]:
    # The operator removes the Pods of a job that has failed, and counts them no more.
    removed = status.started is not None and status.state.finished
    none = f"{len(replica_names(snapshot.job))} removed" if removed else "none"
    counts = ", ".join(f"{count} {situation}" for situation, count in status.counts.items()) or none
    row: list[object] = [status.state, counts, *times(status, snapshot.now)]
    if wide:
        from k8sjob.view.json_output import image  # noqa: PLC0415 - other tables need none

        restarts = sum(replica.restarts for replica in status.replicas)
        restarts = max(restarts, progress.training.restarts if progress else 0)
        row += [restarts, image(snapshot.job) or "", status.ref.uid]
    return row


def times(status: JobStatus, now: datetime) -> tuple[str, str]:
    """How long ago the job was created, and how long it has been running or has run."""
    age = duration((now - status.created).total_seconds()) if status.created else ""
    if not status.started or status.state in (JobState.SUSPENDED, JobState.QUEUED):
        return age, ""
    return age, duration(((status.finished or now) - status.started).total_seconds())

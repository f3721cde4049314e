"""`k8sjob list` and `k8sjob status`: the states of jobs; one job, its image and its replicas."""

from __future__ import annotations

from collections import Counter
from contextlib import suppress
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Final

import click

from k8sjob.backends.api import LOCAL, JobRef
from k8sjob.cli.naming import Place, all_jobs, find, job_argument, place_options
from k8sjob.cli.options import format_option, selector_option
from k8sjob.cli.output import count, document, line, say, table
from k8sjob.errors import BackendError
from k8sjob.observe.diagnose import diagnose
from k8sjob.observe.logs import tail_lines
from k8sjob.observe.status import JobStatus, ReplicaStatus, job_status, speaker
from k8sjob.targets.api import JobState
from k8sjob.view.documents import (
    findings,
    image,
    job_document,
    progress_of,
    provenance,
    running_digest,
)
from k8sjob.view.lines import duration, last_line

if TYPE_CHECKING:
    from pathlib import Path

    from k8sjob.backends.api import Backend, Snapshot
    from k8sjob.kube.objects import Json
    from k8sjob.view.documents import JobProgress

_EPOCH: Final = datetime.fromtimestamp(0, UTC)


@click.command("list")
@selector_option
@format_option("table", "wide", "json", "yaml", "name")
@place_options(everywhere=True)
def list_command(labels: str, output: str, place: Place) -> int:
    """List the jobs of this machine and, if one is configured, of the cluster; newest first.

    Of up to 32 running jobs, the newest, it shows epoch, step, loss and ETA, or how far the start
    is. If this machine has several runs of one name, each is listed as local/NAME@RUN.

    If the cluster cannot be reached, the jobs of this machine are listed all the same, with an
    error and the exit code 1.
    """
    jobs, failed, asked = all_jobs(labels, place)
    found = [(job_status(snapshot), snapshot, backend) for backend, snapshot in jobs]
    found.sort(key=lambda one: one[0].created or _EPOCH, reverse=True)
    trains = {} if output == "name" else progress_of((place, one) for _, one, place in found)
    runs = Counter(str(status.ref) for status, *_ in found)
    match output:
        case "name":
            for status, *_ in found:
                line(_named(status.ref, runs))
        case "json" | "yaml":
            document(
                [job_document(one, trains.get(status.ref)) for status, one, _ in found], output
            )
        case _ if not found:
            if not failed:
                say(_nothing(labels, place, asked))
        case _:
            rows = []
            for status, snapshot, _ in found:
                row = {"NAME": _named(status.ref, runs), **_row(status)}
                row |= _wide(status, snapshot.job) if output == "wide" else {}
                row |= {"PROGRESS": trains.get(status.ref, "")} if trains else {}
                rows.append(row)
            table([*rows[0]], [[*row.values()] for row in rows])
    return int(failed)


def _nothing(labels: str, place: Place, asked: str) -> str:
    fitting = f" with {labels}" if labels else ""
    if not place.asks_cluster:
        return f"no jobs{fitting} on this machine; start one with k8sjob run"
    where = f"in namespace {asked} of the cluster" if asked else "in the cluster"
    make = "k8sjob submit"
    if not place.is_cluster:
        where, make = f"on this machine or {where}", f"k8sjob run or {make}"
    others = "-A looks in all namespaces; " if asked else ""
    return f"no jobs{fitting} {where}; {others}create one with {make}"


def _named(ref: JobRef, runs: Counter[str]) -> str:
    """A job as other commands accept it, even if a name has several runs."""
    return f"{ref}@{ref.uid[:8]}" if ref.namespace == LOCAL and runs[str(ref)] > 1 else str(ref)


def _row(status: JobStatus) -> dict[str, object]:
    counts = ", ".join(f"{count} {what}" for what, count in status.counts.items()) or "none"
    age, time = _times(status)
    return {"STATE": status.state, "REPLICAS": counts, "AGE": age, "TIME": time}


def _wide(status: JobStatus, job: Json) -> dict[str, object]:
    restarts = sum(replica.restarts for replica in status.replicas)
    return {"RESTARTS": restarts, "IMAGE": image(job) or "", "UID": status.ref.uid}


@click.command("status")
@job_argument()
@format_option("table", "json", "yaml", "name")
@click.option("--exit-code", is_flag=True, help="Exit with the job's outcome: 0, 100, 101 or 103.")
@place_options()
def status_command(job: str, output: str, exit_code: bool, place: Place) -> int:
    """Show the state of one job and of each of its replicas."""
    from k8sjob.backends.local import LocalBackend  # noqa: PLC0415 - of no use for a list

    backend, ref = find(job, place)
    snapshot = backend.snapshot(ref)
    status = job_status(snapshot)
    trains = None if output == "name" else progress_of([(backend, snapshot)]).get(status.ref)
    saved = backend.checkpoints(ref) if isinstance(backend, LocalBackend) else None
    match output:
        case "name":
            line(status.ref)
        case "json" | "yaml":
            document(
                {**job_document(snapshot, trains), "checkpoints": saved and str(saved)}, output
            )
        case _:
            _show(status, snapshot, saved, trains)
            _explain(backend, status, snapshot)
    return status.exit_code if exit_code else 0


def _show(
    status: JobStatus, snapshot: Snapshot, checkpoints: Path | None, progress: JobProgress | None
) -> None:
    digests = sorted({digest for pod in snapshot.pods if (digest := running_digest(pod))})
    reference = image(snapshot.job) or ""
    runs = [f"  runs as {digest}" for digest in digests if digest not in reference]
    replicas = ["REPLICA", "PHASE", "RESTARTS", "EXIT CODE", "NODE", "REASON", "MESSAGE"]
    table(["NAME", "STATE", "AGE", "TIME"], [[status.ref, status.state, *_times(status)]])
    for header, rows in (
        ([status.reason or "MESSAGE"], [[status.message]] if status.message else []),
        (["PROGRESS"], [[progress]] if progress else []),
        (["IMAGE"], [[one] for one in (reference, *runs, *_made_of(snapshot.job))]),
        (["CHECKPOINTS"], [[checkpoints]] if checkpoints else []),
        (replicas, [_replica_row(replica) for replica in status.replicas]),
    ):
        if rows:
            click.echo()
            table(header, rows)


def _explain(backend: Backend, status: JobStatus, snapshot: Snapshot) -> None:
    """The first finding of `why`, which reads more, if the output of one replica shows trouble."""
    logs: dict[str, list[str]] = {}
    if status.replicas and status.state in (JobState.RUNNING, JobState.SUCCEEDED, JobState.FAILED):
        name = speaker(snapshot.job)
        with suppress(BackendError):
            logs[name] = tail_lines(backend, status.ref, name)
    related = backend.related(snapshot) if status.state is JobState.QUEUED else ()
    if diagnose(snapshot, logs, related):
        from k8sjob.cli.why import show_finding  # noqa: PLC0415 - of no use for a list

        for finding in findings(backend, snapshot)[:1]:
            click.echo()
            show_finding(finding)


def _replica_row(replica: ReplicaStatus) -> list[object]:
    code = "" if replica.exit_code is None else replica.exit_code
    numbers, message = [replica.restarts, code], last_line(replica.message)
    return [replica.name, replica.phase, *numbers, replica.node, replica.reason, message]


def _made_of(job: Json) -> list[str]:
    """The layers of the image, the highest first, and its base."""
    from k8sjob.image.layer.context import shown_size  # noqa: PLC0415 - of no use for a list

    made_of = provenance(job)
    if made_of is None:
        return []
    lines = []
    for layer in reversed(made_of.layers):
        files = f", {count(made_of.files, 'file')}"
        size = shown_size(layer.size) + (files if layer.kind == "code" else "")
        lines.append(f"  {layer.kind:12}  {layer.digest}  {size}")
    if made_of.installed:
        lines.append(f"  {'installed':12}  {made_of.installed}")
    if made_of.onto != made_of.base:
        lines.append(f"  {'on':12}  {made_of.onto}")
    return [*lines, f"  {'base':12}  {made_of.base or 'not known'}"]


def _times(status: JobStatus) -> tuple[str, str]:
    """How long ago the job was created, and how long it has been running or has run."""
    now = datetime.now(UTC)
    age = duration((now - status.created).total_seconds()) if status.created else ""
    if not status.started:
        return age, ""
    return age, duration(((status.finished or now) - status.started).total_seconds())

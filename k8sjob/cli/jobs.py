"""Commands about jobs that are there: which there are, and where one of them stands."""

from __future__ import annotations

import re
from collections import Counter
from contextlib import suppress
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final

import click

from k8sjob.backends.api import LOCAL
from k8sjob.backends.connect import configured
from k8sjob.backends.references import pod_specs
from k8sjob.cli.failure import fail, say
from k8sjob.cli.naming import find, job_argument, jobs_here
from k8sjob.cli.output import document, format_option, line, table
from k8sjob.cli.place import Place, place_options
from k8sjob.cli.selecting import selector_option
from k8sjob.contract import CONTAINER_NAME
from k8sjob.errors import BackendError
from k8sjob.labels import IMAGE_ORIGIN
from k8sjob.lifecycle.diagnose import diagnose
from k8sjob.lifecycle.logs import tail_lines
from k8sjob.lifecycle.status import JobState, job_status, speaker
from k8sjob.origin import Origin
from k8sjob.view.lines import duration, last_line

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from k8sjob.backends.api import Backend, JobRef, Json, Snapshot
    from k8sjob.lifecycle.status import JobStatus, ReplicaStatus

__all__ = ["list_command", "record", "status_command"]

_DIGEST: Final = re.compile(r"@(sha256:[0-9a-f]{64})$")
_BEGINNING: Final = datetime.fromtimestamp(0, UTC)


@click.command("list")
@selector_option
@format_option("table", "wide", "json", "yaml", "name")
@place_options(everywhere=True)
def list_command(labels: str, output: str, place: Place) -> int:
    """List the jobs of this machine and, where one is configured, of the cluster; newest first.

    Where this machine has several runs of one name, each is listed as local/NAME@RUN.

    A cluster that cannot be reached does not hide the jobs of this machine: it is said, and the
    exit code is 1.
    """
    snapshots, failed, asked = _all(labels, place)
    found = [(job_status(snapshot), snapshot) for snapshot in snapshots]
    found.sort(key=lambda one: one[0].created or _BEGINNING, reverse=True)
    runs = Counter(str(status.ref) for status, _ in found)
    match output:
        case "name":
            for status, _ in found:
                line(_named(status.ref, runs))
        case "json" | "yaml":
            document([record(snapshot) for _, snapshot in found], output)
        case _ if not found:
            if not failed:
                say(_nothing(labels, place, asked))
        case _:
            wide = output == "wide"
            header = ["NAME", "STATE", "REPLICAS", "AGE", "TIME"]
            rows = (
                [_named(status.ref, runs), *_row(status, snapshot.job, wide=wide)]
                for status, snapshot in found
            )
            table(header + ["RESTARTS", "IMAGE", "UID"] * wide, rows)
    return int(failed)


def _all(labels: str, place: Place) -> tuple[list[Snapshot], bool, str]:
    """The jobs of all places that are meant.

    Returns:
        The jobs, whether a place could not be asked, and the namespace that was looked in; empty
        for all of them, or none.
    """
    found = [] if place.is_cluster else jobs_here(labels)
    if not _asks_a_cluster(place):
        return found, False, ""
    try:
        cluster = place.connect()
        there = cluster.jobs(all_namespaces=place.all_namespaces, selector=labels, pods=True)
        if place.namespace and not there:
            cluster.look_for_namespace()
    except BackendError as error:
        if place.is_cluster:
            raise
        fail(str(error))
        return found, True, ""
    return found + there, False, "" if place.all_namespaces else cluster.namespace


def _asks_a_cluster(place: Place) -> bool:
    return not place.is_local and (place.is_cluster or place.all_namespaces or configured())


def _nothing(labels: str, place: Place, asked: str) -> str:
    fitting = f" with {labels}" if labels else ""
    if not _asks_a_cluster(place):
        return f"no jobs{fitting} on this machine; start one with k8sjob run"
    where = f"in namespace {asked} of the cluster" if asked else "in the cluster"
    make = "k8sjob submit"
    if not place.is_cluster:
        where, make = f"on this machine or {where}", f"k8sjob run or {make}"
    others = "-A looks in all namespaces; " if asked else ""
    return f"no jobs{fitting} {where}; {others}make one with {make}"


@click.command("status")
@job_argument()
@format_option("table", "json", "yaml", "name")
@click.option("--exit-code", is_flag=True, help="Exit as the job stands: 0, 100, 101 or 103.")
@place_options()
def status_command(job: str, output: str, exit_code: bool, place: Place) -> int:
    """Show where one job and each of its replicas stand."""
    from k8sjob.backends.local import LocalBackend  # noqa: PLC0415 - of no use for a list

    backend, ref = find(job, place)
    snapshot = backend.snapshot(ref)
    status = job_status(snapshot)
    saved = backend.checkpoints(ref) if isinstance(backend, LocalBackend) else None
    match output:
        case "name":
            line(status.ref)
        case "json" | "yaml":
            document({**record(snapshot), "checkpoints": saved and str(saved)}, output)
        case _:
            _show(status, snapshot, saved)
            _explain(backend, status, snapshot)
    return status.exit_code if exit_code else 0


def record(snapshot: Snapshot) -> dict[str, Any]:
    """A job's status as JSON; docs/reference/json.md says what each field means."""
    status = job_status(snapshot)
    return {
        "name": status.ref.name,
        "namespace": status.ref.namespace,
        "uid": status.ref.uid,
        "state": str(status.state),
        "reason": status.reason,
        "message": status.message,
        "exit_code": status.exit_code,
        "created": _stamp(status.created),
        "started": _stamp(status.started),
        "finished": _stamp(status.finished),
        "image": _image(snapshot.job),
        "origin": origin.as_dict() if (origin := _origin(snapshot.job)) else None,
        "counts": dict(status.counts),
        "replicas": [
            {
                "name": replica.name,
                "phase": replica.phase,
                "node": replica.node,
                "restarts": replica.restarts,
                "reason": replica.reason,
                "exit_code": replica.exit_code,
                "message": replica.message,
                "digest": _digest(pod),
            }
            for replica, pod in zip(status.replicas, snapshot.pods, strict=True)
        ],
    }


def _show(status: JobStatus, snapshot: Snapshot, checkpoints: Path | None) -> None:
    table(["NAME", "STATE", "AGE", "TIME"], [[status.ref, status.state, *_times(status)]])
    if status.message:
        click.echo()
        table([status.reason or "MESSAGE"], [[status.message]])
    click.echo()
    digests = sorted({digest for pod in snapshot.pods if (digest := _digest(pod))})
    image = _image(snapshot.job) or ""
    runs = [f"  runs as {digest}" for digest in digests if digest not in image]
    table(["IMAGE"], [[line] for line in (image, *runs, *_made_of(snapshot.job))])
    if checkpoints:
        click.echo()
        table(["CHECKPOINTS"], [[checkpoints]])
    if status.replicas:
        click.echo()
        header = ["REPLICA", "PHASE", "RESTARTS", "EXIT CODE", "NODE", "REASON", "MESSAGE"]
        table(header, [_replica_row(replica) for replica in status.replicas])


def _explain(backend: Backend, status: JobStatus, snapshot: Snapshot) -> None:
    """The first of what `why` says, which reads more, where one replica's output finds trouble."""
    logs: dict[str, list[str]] = {}
    if status.replicas and status.state in (JobState.RUNNING, JobState.SUCCEEDED, JobState.FAILED):
        name = speaker(snapshot.job)
        with suppress(BackendError):
            logs[name] = tail_lines(backend, status.ref, name)
    related = backend.related(snapshot) if status.state is JobState.QUEUED else ()
    if diagnose(snapshot, logs, related):
        from k8sjob.cli.explaining import findings, show_finding  # noqa: PLC0415 - of no use for a list

        for finding in findings(backend, snapshot)[:1]:
            click.echo()
            show_finding(finding)


def _replica_row(replica: ReplicaStatus) -> list[object]:
    code = "" if replica.exit_code is None else replica.exit_code
    said = last_line(replica.message)
    numbers = [replica.restarts, code]
    return [replica.name, replica.phase, *numbers, replica.node, replica.reason, said]


def _named(ref: JobRef, runs: Counter[str]) -> str:
    """A job as other commands take it, also where a name has several runs."""
    return f"{ref}@{ref.uid[:8]}" if ref.namespace == LOCAL and runs[str(ref)] > 1 else str(ref)


def _row(status: JobStatus, job: Json, *, wide: bool) -> list[object]:
    counts = ", ".join(f"{count} {what}" for what, count in status.counts.items()) or "none"
    row: list[object] = [status.state, counts, *_times(status)]
    if wide:
        restarts = sum(replica.restarts for replica in status.replicas)
        row += [restarts, _image(job) or "", status.ref.uid]
    return row


def _image(job: Json) -> str | None:
    """What the job's first replica is asked to run."""
    for _, _, spec in pod_specs(job):
        return _of_training(spec.get("containers")).get("image")
    return None


def _origin(job: Json) -> Origin | None:
    """What the image was made of, where the job carries it, and still runs that image."""
    annotations = (job.get("metadata") or {}).get("annotations") or {}
    found = Origin.decode(annotations.get(IMAGE_ORIGIN))
    return found if found and found.image == _image(job) else None


def _made_of(job: Json) -> list[str]:
    """The layers of the image, the highest first, and what they lie on."""
    from k8sjob.image.context import shown_size  # noqa: PLC0415 - of no use for a list

    origin = _origin(job)
    if origin is None:
        return []
    lines = []
    for layer in reversed(origin.layers):
        files = f", {origin.files} file{'' if origin.files == 1 else 's'}"
        size = shown_size(layer.size) + (files if layer.kind == "code" else "")
        lines.append(f"  {layer.kind:12}  {layer.digest}  {size}")
    if origin.installed:
        lines.append(f"  {'installed':12}  {origin.installed}")
    if origin.onto != origin.base:
        lines.append(f"  {'on':12}  {origin.onto}")
    return [*lines, f"  {'base':12}  {origin.base or 'not known'}"]


def _digest(pod: Json) -> str | None:
    """The digest of the image that a pod really runs, as its node says it."""
    status = _of_training((pod.get("status") or {}).get("containerStatuses"))
    found = _DIGEST.search(status.get("imageID") or "")
    return found[1] if found else None


def _of_training(containers: Iterable[Json] | None) -> Json:
    return next((c for c in containers or () if c.get("name") == CONTAINER_NAME), {})


def _times(status: JobStatus) -> tuple[str, str]:
    """How long ago the job was made, and how long it has been running or has run."""
    now = datetime.now(UTC)
    age = duration((now - status.created).total_seconds()) if status.created else ""
    if not status.started:
        return age, ""
    return age, duration(((status.finished or now) - status.started).total_seconds())


def _stamp(moment: datetime | None) -> str | None:
    return moment.isoformat().replace("+00:00", "Z") if moment else None

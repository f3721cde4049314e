"""Commands about jobs that are there: what they are doing, and the few things to ask of them."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import click

from k8sjob.backends.local import LocalBackend
from k8sjob.cli.naming import find, job_argument
from k8sjob.cli.output import document, format_option, table
from k8sjob.lifecycle.status import job_status
from k8sjob.view.lines import duration, last_words

if TYPE_CHECKING:
    from k8sjob.lifecycle.status import JobStatus, ReplicaStatus

__all__ = [
    "delete_command",
    "list_command",
    "record",
    "resume_command",
    "status_command",
    "suspend_command",
]


@click.command("list")
@format_option("table", "wide", "json", "yaml", "name")
def list_command(output: str) -> None:
    """List the jobs of this machine, the newest first."""
    statuses = [job_status(snapshot) for snapshot in LocalBackend().jobs()]
    match output:
        case "name":
            for status in statuses:
                click.echo(str(status.ref))
        case "json" | "yaml":
            document([record(status) for status in statuses], output)
        case _ if not statuses:
            click.echo("no jobs on this machine; start one with k8sjob run", err=True)
        case _:
            wide = output == "wide"
            header = ["NAME", "STATE", "REPLICAS", "AGE", "TIME"]
            table(header + ["RESTARTS", "UID"] * wide, [_row(s, wide=wide) for s in statuses])


@click.command("status")
@job_argument()
@format_option("table", "json", "yaml", "name")
@click.option("--exit-code", is_flag=True, help="Exit as the job stands: 0, 100, 101 or 103.")
def status_command(job: str, output: str, exit_code: bool) -> int:
    """Show where one job and each of its replicas stand."""
    backend, ref = find(job)
    status = job_status(backend.snapshot(ref))
    match output:
        case "name":
            click.echo(str(status.ref))
        case "json" | "yaml":
            document(record(status), output)
        case _:
            _show(status)
    return status.exit_code if exit_code else 0


@click.command("suspend")
@job_argument("jobs", many=True)
def suspend_command(jobs: tuple[str, ...]) -> None:
    """Stop the replicas after a checkpoint; the job stays, for k8sjob resume."""
    for job in jobs:
        backend, ref = find(job)
        backend.suspend(ref, value=True)
        click.echo(f"{ref} is being suspended")


@click.command("resume")
@job_argument("jobs", many=True)
def resume_command(jobs: tuple[str, ...]) -> None:
    """Let suspended jobs go on from their newest checkpoint."""
    for job in jobs:
        backend, ref = find(job)
        backend.suspend(ref, value=False)
        click.echo(f"{ref} is being resumed")


@click.command("delete")
@job_argument("jobs", many=True)
def delete_command(jobs: tuple[str, ...]) -> None:
    """Stop jobs and remove them with their logs; checkpoints on volumes stay."""
    for job in jobs:
        backend, ref = find(job)
        backend.delete(ref)
        click.echo(f"{ref} deleted")


def record(status: JobStatus) -> dict[str, Any]:
    """A job's status as JSON; docs/reference/json.md says what each field means."""
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
        "replicas": [
            {
                "name": replica.name,
                "phase": replica.phase,
                "node": replica.node,
                "restarts": replica.restarts,
                "reason": replica.reason,
                "exit_code": replica.exit_code,
                "message": replica.message,
            }
            for replica in status.replicas
        ],
    }


def _show(status: JobStatus) -> None:
    table(["NAME", "STATE", "AGE", "TIME"], [[status.ref, status.state, *_times(status)]])
    if status.message:
        click.echo()
        table([status.reason or "MESSAGE"], [[status.message]])
    if status.replicas:
        click.echo()
        header = ["REPLICA", "PHASE", "RESTARTS", "EXIT CODE", "REASON", "MESSAGE"]
        table(header, [_replica_row(replica) for replica in status.replicas])


def _replica_row(replica: ReplicaStatus) -> list[object]:
    code = "" if replica.exit_code is None else replica.exit_code
    said = last_words(replica.message)
    return [replica.name, replica.phase, replica.restarts, code, replica.reason, said]


def _row(status: JobStatus, *, wide: bool) -> list[object]:
    replicas = ", ".join(f"{count} {what}" for what, count in status.counts.items()) or "none"
    row: list[object] = [status.ref, status.state, replicas, *_times(status)]
    if wide:
        row += [sum(replica.restarts for replica in status.replicas), status.ref.uid]
    return row


def _times(status: JobStatus) -> tuple[str, str]:
    """How long ago the job was made, and how long it has been running or has run."""
    now = datetime.now(UTC)
    age = duration((now - status.created).total_seconds()) if status.created else ""
    if not status.started:
        return age, ""
    return age, duration(((status.finished or now) - status.started).total_seconds())


def _stamp(moment: datetime | None) -> str | None:
    return moment.isoformat().replace("+00:00", "Z") if moment else None

"""`k8sjob status`: one job, its image and its replicas."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Final

import click

from k8sjob.backends.api import LOCAL
from k8sjob.cli.find_job import Place, place_options, warn_of_clock
from k8sjob.cli.job_to_read import job_or_labels, read_job
from k8sjob.cli.list import times
from k8sjob.cli.options import format_option
from k8sjob.cli.output import document, line, table
from k8sjob.contract import counted
from k8sjob.errors import BackendError
from k8sjob.observe.diagnose import diagnose
from k8sjob.observe.logs import tail_lines
from k8sjob.observe.status import JobStatus, ReplicaStatus, job_status, reporting_replica
from k8sjob.targets.api import JobState
from k8sjob.view.formats import last_line
from k8sjob.view.json_output import (
    image,
    job_document,
    progress_in,
    provenance,
    running_digest,
)

if TYPE_CHECKING:
    from pathlib import Path

    from k8sjob.backends.api import Snapshot
    from k8sjob.targets.api import Job
    from k8sjob.view.json_output import JobProgress

_HAVE_PROGRESS: Final = (JobState.RUNNING, JobState.SUCCEEDED)
_HAVE_OUTPUT: Final = (JobState.RUNNING, JobState.SUCCEEDED, JobState.FAILED, JobState.STOPPED)


@click.command("status")
@job_or_labels
@format_option("table", "json", "yaml", "name")
@click.option("--exit-code", is_flag=True, help="Exit with the job's outcome: 0, 100, 101 or 103.")
@place_options()
def status_command(job: str | None, output: str, exit_code: bool, place: Place) -> int:
    """Show the state of a job (the newest without NAME) and of each of its replicas."""
    backend, ref, snapshot = read_job(job, place)
    warn_of_clock(snapshot)
    status = job_status(snapshot)
    reporter, lines = reporting_replica(snapshot.job), list[str]()
    # One request for the output; before the start and after a suspension there is none.
    if output != "name" and status.replicas and status.state in _HAVE_OUTPUT:
        with suppress(BackendError):
            lines = tail_lines(backend, status.ref, reporter, snapshot.pods_by_replica)
    progress = progress_in(snapshot, lines)
    trains = progress if status.state in _HAVE_PROGRESS else None
    saved: Path | None = None
    written: list[Path] = []
    files: dict[str, str] = {}
    if ref.namespace == LOCAL:  # a cluster may have a namespace of that name, too
        from k8sjob.backends.local import LocalBackend  # noqa: PLC0415 - of no use for a cluster
        from k8sjob.backends.local.outputs import listed, written_files  # noqa: PLC0415 - the same

        if isinstance(backend, LocalBackend):
            saved, written = backend.checkpoints(ref), written_files(backend.folder(ref))
            files = {"CHECKPOINTS": str(saved or ""), "WRITTEN": listed(written)}
    match output:
        case "name":
            line(status.ref)
        case "json" | "yaml":
            places = {"checkpoints": saved and str(saved), "written": list(map(str, written))}
            document({**job_document(snapshot, trains), **places}, output)
        case _:
            _show(status, snapshot, files, progress)
            # Only a job that waits is explained by other objects, whose look-up takes many
            # requests.
            related = backend.related(snapshot) if status.state is JobState.QUEUED else ()
            # What `why` finds reads more, so only if the output of one replica shows trouble.
            if diagnose(snapshot, {reporter: lines} if lines else {}, related):
                from k8sjob.cli.why import show_finding  # noqa: PLC0415 - most jobs have no trouble
                from k8sjob.observe.findings import findings  # noqa: PLC0415 - the same

                for finding in findings(backend, snapshot)[:1]:
                    click.echo()
                    show_finding(finding)
    return status.exit_code if exit_code else 0


def _show(
    status: JobStatus, snapshot: Snapshot, files: dict[str, str], progress: JobProgress | None
) -> None:
    row = [status.ref, status.state, *times(status, snapshot.now)]
    table(["NAME", "STATE", "AGE", "TIME"], [row])
    digests = sorted({digest for pod in snapshot.pods if (digest := running_digest(pod))})
    reference = image(snapshot.job) or ""
    # A tag may have moved since: the digest is what the nodes have pulled.
    runs = [f"  runs as {digest}" for digest in digests if digest not in reference]
    sections = {
        status.reason or "MESSAGE": [status.message],
        "PROGRESS": [str(progress or "")] * (status.state in _HAVE_PROGRESS),
        "IMAGE": [reference, *runs, *_made_of(snapshot.job)],
        **{title: paths.splitlines() for title, paths in files.items()},
    }
    for title, lines in sections.items():
        if any(lines) or title == "IMAGE":
            click.echo()
            table([title], [[text] for text in lines])
    if status.replicas:
        click.echo()
        restarts = progress.training.restarts if progress else 0
        header = ["REPLICA", "PHASE", "RESTARTS", "EXIT CODE", "NODE", "REASON", "MESSAGE"]
        table(header, [_replica_row(replica, restarts) for replica in status.replicas])


def _replica_row(replica: ReplicaStatus, restarts: int) -> list[object]:
    """Its row; `restarts` of the processes, which those of the containers are part of."""
    code = "" if replica.exit_code is None else replica.exit_code
    numbers, message = [max(replica.restarts, restarts), code], last_line(replica.message)
    return [replica.name, replica.phase, *numbers, replica.node, replica.reason, message]


def _made_of(job: Job) -> list[str]:
    """The layers of the image, the highest first, and its base."""
    from k8sjob.image.build_context import shown_size  # noqa: PLC0415 - of no use for a list

    made_of = provenance(job)
    if made_of is None:
        return []
    lines = []
    for layer in reversed(made_of.layers):
        files = f", {counted(made_of.files, 'file')}"
        size = shown_size(layer.size) + (files if layer.kind == "code" else "")
        lines.append(f"  {layer.kind:12}  {layer.digest}  {size}")
    if made_of.installed:
        lines.append(f"  {'installed':12}  {made_of.installed}")
    if made_of.onto != made_of.base:
        lines.append(f"  {'on':12}  {made_of.onto}")
    return [*lines, f"  {'base':12}  {made_of.base or 'unknown'}"]

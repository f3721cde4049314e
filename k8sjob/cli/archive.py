"""`k8sjob archive`, `k8sjob report` and `k8sjob export`: what a job leaves, as a file."""

from __future__ import annotations

import json
import subprocess
import sys
from contextlib import contextmanager
from importlib import util
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Final

import click

from k8sjob.backends.api import LOCAL
from k8sjob.backends.record import SUFFIX, whole_file, write_record
from k8sjob.card import Html, card, curve, folded, moments, table
from k8sjob.cli.naming import Place, find, job_argument, local_backend, place_options
from k8sjob.cli.output import line, say, warn
from k8sjob.contract import Event
from k8sjob.errors import JobNotFound, K8sJobError
from k8sjob.jobs.result import POSITION, Reached, finding_parts, read_reached
from k8sjob.observe.logs import last_lines
from k8sjob.observe.status import job_status
from k8sjob.observe.timing import read_output_times, timing
from k8sjob.targets.jobs import sent
from k8sjob.view.documents import findings
from k8sjob.yamldoc import dump

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from k8sjob.backends.api import Backend, Snapshot

_MOST_CURVES: Final = 24
_SPEED: Final = ("samples_per_s", "step_s", "wait_s", "memory_bytes")
"""What the runtime adds to each report; these curves come last."""
_HEAD: Final = """\
<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>k8sjob report</title>
<style>body{font:16px/1.5 system-ui,sans-serif;margin:2em auto;max-width:64em;padding:0 1em}
h2{font-size:1.1em;margin:1.5em 0 .3em}
figure{display:inline-block;margin:0 2em 1em 0;max-width:100%}svg{max-width:100%}</style>
"""


def _file_options(default: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """The options about the file that is written."""
    path = click.Path(path_type=Path)
    help_text = f"The file, default {default}."

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        force = click.option("--force", is_flag=True, help="Replace an existing file.")
        output = click.option("-o", "--output", "path", metavar="FILE", type=path, help=help_text)
        return output(force(command))

    return decorate


@click.command("archive")
@job_argument()
@_file_options("NAME.k8sjob")
@place_options()
def archive_command(job: str, path: Path | None, force: bool, place: Place) -> None:
    """Write all that is known of a job as one file: its state, its objects and its output.

    `why`, `status` and `logs` read the file in place of NAME: when the job is deleted, and on other
    machines. It has the job's manifest and output as they are: check them for secrets before you
    give the file to others.
    """
    if path and path.suffix != SUFFIX:
        raise click.UsageError(f"-o {path}: the name of a record ends with {SUFFIX}")
    backend, ref = find(job, place)

    def unread(replica: str, reason: str) -> None:
        warn(f"the record has not all of the output of {replica}: {reason}")

    with _whole(path or Path(f"{ref.name}{SUFFIX}"), force=force) as out:
        write_record(backend, ref, out, unread)


@click.command("report")
@job_argument()
@_file_options("NAME.html")
@place_options()
def report_command(job: str, path: Path | None, force: bool, place: Place) -> None:
    """Write a page about a job: its state, what `why` finds, curves, times, output, manifest.

    The page is one HTML file that loads nothing and runs no script. NAME may be a record, too. It
    has the job's manifest and last output as they are: check them for secrets before you give the
    file to others.
    """
    backend, ref = find(job, place)
    text = page(backend, backend.snapshot(ref))
    with _whole(path or Path(f"{ref.name}.html"), force=force) as out:
        out.write(text.encode(errors="replace"))


@contextmanager
def _whole(path: Path, *, force: bool) -> Iterator[IO[bytes]]:
    """A file to write, which gets its name once it is complete; then the name is printed."""
    if path.exists() and not force:
        raise K8sJobError(f"{path} exists; give another name with -o, or --force to replace it")
    try:
        with whole_file(path) as out:
            yield out
    except OSError as error:
        raise K8sJobError(f"{path} cannot be written: {error.strerror or error}") from error
    line(path)


def page(backend: Backend, snapshot: Snapshot) -> str:
    """A job as an HTML page; what the job and its cluster wrote is escaped."""
    status, reached = job_status(snapshot), read_reached(backend, snapshot)
    found = findings(backend, snapshot)
    times = moments(created=status.created, started=status.started, finished=status.finished)
    rows: dict[str, object] = {
        "message": "" if found else status.message,
        **times,
        **moments(recorded=snapshot.at),
        "checkpoint": reached.checkpoint,
        **{name: value for name, value in reached.metrics.items() if name not in POSITION},
    }
    why = [part for one in found for part in finding_parts(one)]
    parts = [
        card(str(status.ref), rows, *why, subtitle=snapshot.job.get("kind", ""), state=status.state)
    ]
    sections = {
        "Training": list(_curves(reached)),
        "Replicas": [status.replica_table()] if status.replicas else [],
        "Time to the first step": _start(backend, snapshot),
        "Output": list(_output(backend, snapshot)),
        "Manifest": [folded(snapshot.job.get("kind", ""), dump(sent(snapshot.job)))],
    }
    for title, content in sections.items():
        if content:
            parts += [f"<h2>{title}</h2>", *content]
    return _HEAD + "\n".join(parts) + "\n"


def _curves(reached: Reached) -> Iterator[Html]:
    """The numbers of the training in the order of their reports."""
    names = dict.fromkeys(name for row in reached.history for name in row if name not in POSITION)
    for name in sorted(names, key=_SPEED.__contains__)[:_MOST_CURVES]:
        values = [row[name] for row in reached.history if name in row]
        points = enumerate(value for value in values if isinstance(value, int | float))
        if drawn := curve(points, name):
            yield Html(f"<figure>{drawn}</figure>")


def _start(backend: Backend, snapshot: Snapshot) -> list[Html]:
    took = timing(snapshot, read_output_times(backend, snapshot))
    rows = [
        [one.phase.replace("+", ", "), f"{one.seconds:.2f} s", one.replica, one.detail]
        for one in took.phases
    ]
    return [table(("phase", "seconds", "replica", ""), rows)] if rows else []


def _output(backend: Backend, snapshot: Snapshot) -> Iterator[Html]:
    """The end of each replica's output, without the reports of k8sjob's runtime."""
    for replica, lines in last_lines(backend, snapshot).items():
        written = [text for text in lines if Event.decode(text) is None]
        if written:
            yield folded(replica, "\n".join(written))


@click.command("export")
@click.argument("checkpoint", type=click.Path(path_type=Path), metavar="CHECKPOINT|NAME")
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path, dir_okay=False),
    default=Path("model.pt"),
    show_default=True,
    help="The file: .pt, .pth or .safetensors.",
)
@click.option(
    "--all",
    "everything",
    is_flag=True,
    help="The optimizer, the position in the data and the rest, too.",
)
@click.option("--force", is_flag=True, help="Replace an existing file.")
def export_command(checkpoint: Path, output: Path, everything: bool, force: bool) -> None:
    """Write the model's weights of a checkpoint as one state_dict.

    CHECKPOINT is a file or folder step-..., or their folder, of which the newest complete one is
    used. NAME is a job on this machine. The checkpoints of a job in a cluster are on its volume:
    copy them from there first. Nothing in them is executed.
    """
    if util.find_spec("torch") is None:
        raise K8sJobError(f"torch is not installed for {sys.executable}; pip install 'k8sjob[run]'")
    source = checkpoint if checkpoint.exists() else _of_job(str(checkpoint))
    report = _export(source, output, everything=everything, force=force)
    for warning in report["warnings"]:
        warn(warning)
    if "error" in report:
        raise K8sJobError(report["error"])
    say(f"{report['tensors']} tensors, {report['bytes']:,} bytes, of step {report['step']}")
    line(report["path"])


def _of_job(name: str) -> Path:
    """The folder of the checkpoints of a job of this machine."""
    local = local_backend()
    try:
        found = local.checkpoints(local.find(name.removeprefix(f"{LOCAL}/")))
    except JobNotFound as error:
        raise K8sJobError(
            f"{name}: no such checkpoint, and no such job on this machine; copy the checkpoint of a"
            " job in a cluster from its volume first (kubectl cp), and name the copy"
        ) from error
    if found is None:
        raise K8sJobError(f"{name} has written no checkpoint; set checkpoint.dir in its job.yaml")
    return found


def _export(source: Path, target: Path, *, everything: bool, force: bool) -> dict[str, Any]:
    """The report of another Python, with torch: the client itself never loads it."""
    asked = {"source": str(source), "target": str(target), "everything": everything, "force": force}
    module = "k8sjob.runtime.checkpoint.export"
    done = subprocess.run(
        [sys.executable, "-P", "-m", module, json.dumps(asked)],
        capture_output=True,
        text=True,
        check=False,
    )
    try:
        found: dict[str, Any] = json.loads(done.stdout)
    except ValueError:
        last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        raise K8sJobError(f"{source} could not be exported: {last}") from None
    return found

"""`k8sjob report`: what is known of a job, as a page."""

from __future__ import annotations

from functools import partial
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click

from k8sjob.cli.archive import complete_file, file_options
from k8sjob.cli.find_job import Place, place_options
from k8sjob.cli.job_to_read import job_or_labels, read_job
from k8sjob.contract import Event
from k8sjob.html_card import Html, card, curve, finding_parts, folded, moments, table
from k8sjob.jobs.result import Reached, read_reached
from k8sjob.observe.findings import findings
from k8sjob.observe.logs import last_lines
from k8sjob.observe.status import job_status
from k8sjob.observe.timing import read_timing
from k8sjob.view.cards import replica_table
from k8sjob.view.formats import environment, quantity
from k8sjob.yamldoc import dump

if TYPE_CHECKING:
    from collections.abc import Iterator

    from k8sjob.backends.api import Backend, Snapshot

_MOST_CURVES: Final = 24
_SPEED: Final = ("samples_per_s", "wait_s", "memory_bytes")
"""Metrics that the runtime adds to each report; their curves come last."""
_HEAD: Final = """\
<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>NAME · k8sjob report</title>
<style>body{font:16px/1.5 system-ui,sans-serif;margin:2em auto;max-width:64em;padding:0 1em}
h2{font-size:1.1em;margin:1.5em 0 .3em}
figure{display:inline-block;margin:0 2em 1em 0;max-width:100%}svg{max-width:100%}</style>
"""


@click.command("report")
@job_or_labels
@file_options("NAME.html")
@place_options()
def report_command(job: str | None, path: Path | None, force: bool, place: Place) -> None:
    """Write a page about a job: its state, what `why` finds, curves, times, output, manifest.

    The page is one HTML file that loads nothing and runs no script. NAME may also be a record. The
    page contains the job's manifest and last output unchanged: check them for secrets before you
    give the file to others.
    """
    backend, ref, snapshot = read_job(job, place)
    text = page(backend, snapshot)
    with complete_file(path or Path(f"{ref.name.replace('/', '-')}.html"), force=force) as out:
        out.write(text.encode(errors="replace"))


def page(backend: Backend, snapshot: Snapshot) -> str:
    """A job as an HTML page; what the job and its cluster wrote is escaped."""
    status, reached = job_status(snapshot), read_reached(backend, snapshot)
    causes = findings(backend, snapshot)
    times = moments(created=status.created, started=status.started, finished=status.finished)
    rows: dict[str, object] = {
        "message": "" if causes else status.message,
        **times,
        **moments(recorded=snapshot.at),
        "environment": environment(reached.last_group),
        "checkpoint": reached.checkpoint,
        **{
            name: value if isinstance(value, str) else quantity(name, value)
            for name, value in reached.last_values.items()
        },
    }
    parts = [
        card(
            str(status.ref),
            rows,
            *finding_parts(causes),
            subtitle=snapshot.job.raw.get("kind", ""),
            state=status.state,
        )
    ]
    sections = {
        "Training": list(_curves(reached)),
        "Replicas": [replica_table(status)] if status.replicas else [],
        "Time to the first step": _start(backend, snapshot),
        "Output": list(_output(backend, snapshot)),
        "Manifest": [folded(snapshot.job.raw.get("kind", ""), dump(snapshot.job.raw))],
    }
    for title, content in sections.items():
        if content:
            parts += [f"<h2>{title}</h2>", *content]
    return _HEAD.replace("NAME", escape(str(status.ref))) + "\n".join(parts) + "\n"


def _curves(reached: Reached) -> Iterator[Html]:
    """The numbers of the training over its epochs, or by their count where it has none."""
    curves, axis = reached.curves, "epoch" if reached.counts_epochs else "report"
    for name in sorted(curves, key=_SPEED.__contains__)[:_MOST_CURVES]:
        if drawn := curve(curves[name], name, axis=axis, written=partial(quantity, name)):
            yield Html(f"<figure>{drawn}</figure>")


def _start(backend: Backend, snapshot: Snapshot) -> list[Html]:
    took = read_timing(backend, snapshot)
    rows = [
        [phase.ends, f"{phase.seconds:.2f} s", phase.replica, phase.detail] for phase in took.phases
    ]
    return [table(("until", "took", "replica", ""), rows)] if rows else []


def _output(backend: Backend, snapshot: Snapshot) -> Iterator[Html]:
    """The end of each replica's output, without the reports of k8sjob's runtime."""
    for replica, lines in last_lines(backend, snapshot).items():
        written = [text for text in lines if Event.decode(text) is None]
        if written:
            yield folded(replica, "\n".join(written))

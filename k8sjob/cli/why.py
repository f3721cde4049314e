"""`k8sjob why`: the causes of a job's state, and where the time to its first step went."""

from __future__ import annotations

import sys
from dataclasses import fields
from typing import TYPE_CHECKING, Final

import click
from rich.text import Text

from k8sjob.cli.find_job import Place, place_options, warn_of_clock
from k8sjob.cli.job_to_read import job_or_labels, read_job
from k8sjob.cli.options import format_option
from k8sjob.cli.output import document, line, table
from k8sjob.contract import Event, EventKind
from k8sjob.observe.diagnose import as_data
from k8sjob.observe.findings import findings
from k8sjob.observe.status import job_status
from k8sjob.observe.timing import Phase, Row, Timing, read_timing
from k8sjob.observe.usage import read_usage
from k8sjob.targets.api import JobState
from k8sjob.view.formats import environment
from k8sjob.view.lines import finding_lines
from k8sjob.view.summary import finding
from k8sjob.view.views import console_for

if TYPE_CHECKING:
    from collections.abc import Sequence

    from k8sjob.findings import Finding


_COLUMNS: Final = {"met": "JOINED"}
"""Headings that differ from the name in JSON."""
_MOST_ROWS: Final = 16
_NOTABLE_SECONDS: Final = 3600.0
"""Minimum device seconds of a job for a note about where they went."""


@click.command("why")
@job_or_labels
@click.option("--timing", "timed", is_flag=True, help="Show where the time to the first step went.")
@format_option("table", "json", "yaml")
@place_options()
def why_command(job: str | None, timed: bool, output: str, place: Place) -> None:
    """Explain why a job failed, hangs or does not start, and how to fix it.

    Without NAME it is the newest job. The first cause comes first. Works for any training job,
    whoever created it, and for whatever runs pods: KIND/NAME, or -l SELECTOR. With --timing it
    shows what took the time from the submission, or the last suspension, to the first training
    step, as far as the cluster and the job's output show it.
    """
    backend, ref, snapshot = read_job(job, place)
    warn_of_clock(snapshot)
    if timed:
        took = read_timing(backend, snapshot)
        if output == "table":
            _show_timing(took)
        else:
            document(took.as_dict(), output)
        return
    causes = findings(backend, snapshot)
    if output != "table":
        document([as_data(cause) for cause in causes], output)
        return
    for cause in causes:
        show_finding(cause)
    if backend.recorded:
        from k8sjob.jobs.result import read_reached  # noqa: PLC0415 - only for records

        if ran := environment(read_reached(backend, snapshot).last_group):
            line(f"ran: {ran}")
    state = job_status(snapshot).state
    if causes:
        return
    succeeded = state is JobState.SUCCEEDED
    line(f"{ref} succeeded" if succeeded else f"{ref} is {state}; nothing wrong was found")
    if not succeeded:
        return
    used = read_usage(backend, snapshot)
    if used.total >= _NOTABLE_SECONDS and used.note:
        line(used.note)


def show_finding(cause: Finding) -> None:
    """Print a finding, without the control sequences of a container or a cluster."""
    shown = finding(Event(EventKind.FINDING, as_data(cause), replica=cause.replica))
    console_for(sys.stdout).print(Text("\n").join(finding_lines(shown)), soft_wrap=True)


def _show_timing(timing: Timing) -> None:
    """Print the phases, the replicas side by side, and what is not known."""
    whole = "no first training step is known"
    if timing.seconds is not None:
        whole = f"about {timing.seconds:.0f} s from its {timing.since} to the first training step"
    line(f"{timing.ref}: {whole}")
    if timing.phases:
        click.echo()
        header = ["UNTIL", "TOOK", "AT", "REPLICA", "DETAIL"]
        table(header, [_phase(phase) for phase in timing.phases])
    if len(timing.replicas) > 1:
        click.echo()
        _show_rows(timing.replicas)
    if timing.notes or timing.missing:
        click.echo()
    for note in (*timing.notes, *(f"unknown: {missing}" for missing in timing.missing)):
        line(note)


def _phase(phase: Phase) -> list[str]:
    took = f"{phase.seconds:.2f} s" if phase.exact else f"~{phase.seconds:.0f} s"
    return [phase.ends, took, f"{phase.at:.1f} s", phase.replica, phase.detail]


def _show_rows(rows: Sequence[Row]) -> None:
    """Print the rows of the replicas; of many, those that started last."""
    # The last ones are those that all others waited for.
    shown = sorted(rows, key=lambda row: -(row.container or 0.0))[:_MOST_ROWS]
    moments = [field.name for field in fields(Row)][2:]
    columns = [name for name in moments if any(getattr(row, name) is not None for row in shown)]
    header = [
        "REPLICA",
        "NODE",
        *(_COLUMNS.get(name, name.replace("_", " ").upper()) for name in columns),
    ]
    cells = ([_at(getattr(row, name)) for name in columns] for row in shown)
    table(header, [[row.name, row.node, *times] for row, times in zip(shown, cells, strict=True)])
    if len(rows) > len(shown):
        line(f"and {len(rows) - len(shown)} more, started earlier; -o json has them all")


def _at(seconds: float | None) -> str:
    return "" if seconds is None else f"{seconds:.1f} s"

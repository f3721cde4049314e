"""The command that says why a job stands where it stands."""

from __future__ import annotations

import sys

import click
from rich.text import Text

from k8sjob.cli.naming import find, job_argument
from k8sjob.cli.output import document, format_option
from k8sjob.cli.place import Place, place_options
from k8sjob.lifecycle.diagnose import diagnose
from k8sjob.lifecycle.logs import last_lines
from k8sjob.lifecycle.status import JobState, job_status
from k8sjob.view.lines import finding_lines
from k8sjob.view.show import console_for
from k8sjob.view.story import Finding

__all__ = ["why_command"]


@click.command("why")
@job_argument()
@format_option("table", "json", "yaml")
@place_options()
def why_command(job: str, output: str, place: Place) -> None:
    """Say why a job failed, hangs or does not start, and what to do about it."""
    backend, ref = find(job, place)
    snapshot = backend.snapshot(ref)
    found = diagnose(snapshot, last_lines(backend, snapshot), backend.related(snapshot))
    if output != "table":
        document([finding.as_dict() for finding in found], output)
        return
    console = console_for(sys.stdout)
    for finding in found:
        shown = Finding(finding.cause, finding.message, finding.next_step, finding.replica)
        console.print(Text("\n").join(finding_lines(shown)), soft_wrap=True)
    if not found:
        status = job_status(snapshot)
        what = "ended well" if status.state is JobState.SUCCEEDED else f"is {status.state}"
        click.echo(f"{ref} {what}; there is nothing to explain")

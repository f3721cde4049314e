"""The command that says why a job stands where it stands."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import click
from rich.text import Text

from k8sjob.cli.naming import find, job_argument
from k8sjob.cli.output import document, format_option, line
from k8sjob.cli.place import Place, place_options
from k8sjob.contract import Event, EventKind
from k8sjob.lifecycle.diagnose import diagnose
from k8sjob.lifecycle.logs import last_lines
from k8sjob.lifecycle.status import JobState, job_status
from k8sjob.view.lines import finding_lines
from k8sjob.view.summary import finding
from k8sjob.view.views import console_for

if TYPE_CHECKING:
    from k8sjob.backends.api import Backend, Snapshot
    from k8sjob.lifecycle.diagnose import Finding

__all__ = ["findings", "show_finding", "why_command"]


@click.command("why")
@job_argument()
@click.option("--timing", is_flag=True, help="Where the time to the first training step went.")
@format_option("table", "json", "yaml")
@place_options()
def why_command(job: str, timing: bool, output: str, place: Place) -> None:
    """Say why a job failed, hangs or does not start, and what to do about it.

    The first cause comes first. Works for any PyTorchJob, whoever made it. With --timing it says
    what took the time from the submission to the first training step, as far as the cluster and the
    job's output tell.
    """
    backend, ref = find(job, place)
    snapshot = backend.snapshot(ref)
    if timing:
        _show_timing(backend, snapshot, output)
        return
    found = findings(backend, snapshot)
    if output != "table":
        document([one.as_dict() for one in found], output)
        return
    for one in found:
        show_finding(one)
    if not found:
        status = job_status(snapshot)
        if status.state is JobState.SUCCEEDED:
            line(f"{ref} succeeded")
        else:
            line(f"{ref} is {status.state}; nothing wrong was found")


def _show_timing(backend: Backend, snapshot: Snapshot, output: str) -> None:
    from k8sjob.cli.timing import show_timing  # noqa: PLC0415 - few ask for it
    from k8sjob.lifecycle.timing import (  # noqa: PLC0415 - the same
        read_output_times,
        timing,
    )

    found = timing(snapshot, read_output_times(backend, snapshot))
    if output == "table":
        show_timing(found)
    else:
        document(found.as_dict(), output)


def findings(backend: Backend, snapshot: Snapshot) -> list[Finding]:
    """What `why` and `status` say of a job, from all that there is."""
    return diagnose(snapshot, last_lines(backend, snapshot), backend.related(snapshot))


def show_finding(found: Finding) -> None:
    """Print a finding; what a container or a cluster wrote in it is made harmless."""
    told = finding(Event(EventKind.FINDING, found.as_dict(), replica=found.replica))
    console_for(sys.stdout).print(Text("\n").join(finding_lines(told)), soft_wrap=True)

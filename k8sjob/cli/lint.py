"""`k8sjob lint`: problems of manifests, training scripts and job.yaml files."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import click

from k8sjob.checks.lint import Severity, lint
from k8sjob.cli.failure import say, warn
from k8sjob.cli.options import format_option
from k8sjob.cli.output import document, line
from k8sjob.errors import SpecError
from k8sjob.yamldoc import JOB_FILE, job_file

__all__ = ["lint_command", "show_lint_errors"]


@click.command("lint")
@click.argument("files", nargs=-1, type=click.Path(path_type=Path, allow_dash=True))
@click.option("--strict", is_flag=True, help="Exit with 1 for warnings, too.")
@format_option("table", "json", "yaml")
def lint_command(files: tuple[Path, ...], strict: bool, output: str) -> int:
    """Find what will hang, be rejected by the operator or go wrong silently in FILES.

    A file is a PyTorchJob manifest, a training script, or a job.yaml (the default), whose script
    is read too; - is any of them on standard input. Nothing is executed. The exit code is 1 if
    there is an error among the findings.
    """
    found = [finding for file in files or (job_file(Path(JOB_FILE)),) for finding in lint(file)]
    if output != "table":
        document([asdict(finding) for finding in found], output)
    else:
        for finding in found:
            line(str(finding))
        if not found:
            say("nothing found")
    return int(any(strict or finding.severity is Severity.ERROR for finding in found))


def show_lint_errors(file: Path) -> None:
    """Warn of what is known to hang or crash in a job.yaml or its script, before the job starts.

    The job starts all the same: lint reads the script and cannot see every way through it.
    """
    if str(file) == "-":
        return  # standard input was read by the command itself
    try:
        found = lint(file)
    except SpecError:
        return  # a script in another encoding: Python may read what lint does not
    for finding in found:
        if finding.severity is Severity.ERROR:
            warn(f"lint: {finding}")

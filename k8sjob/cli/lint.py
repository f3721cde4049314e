"""`k8sjob lint`: what goes wrong in files, found before a run; its errors before every start."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from k8sjob.checks.lint import CHECKS, Severity, lint, sarif
from k8sjob.cli.jobfile import JobFile, set_option
from k8sjob.cli.options import format_option
from k8sjob.cli.output import document, line, print_status, warn
from k8sjob.errors import SpecError
from k8sjob.yamldoc import JOB_FILE, job_file

if TYPE_CHECKING:
    from k8sjob.spec.changes import Change


@click.command("lint")
@click.argument("files", nargs=-1, type=click.Path(path_type=Path, allow_dash=True))
@set_option
@click.option("--strict", is_flag=True, help="Also exit with 1 for warnings.")
@format_option("table", "json", "yaml", "sarif")
def lint_command(
    files: tuple[Path, ...], sets: tuple[Change, ...], strict: bool, output: str
) -> int:
    """Find what will hang, be rejected by the operator or go wrong silently in FILES.

    A file is a manifest of a job, a training script, or a job.yaml (the default), whose script
    is read too; - is any of them on standard input. Nothing is executed. The exit code is 1 if
    there is an error among the findings.
    """
    paths = files or (job_file(Path(JOB_FILE)),)
    findings = [finding for path in paths for finding in lint(path, sets)]
    if output == "sarif":
        document(sarif(findings, CHECKS), "json")
    elif output != "table":
        document([finding.as_dict("source", "line", "column") for finding in findings], output)
    else:
        for finding in findings:
            line(str(finding))
        if not findings:
            print_status("nothing found")
    return int(any(strict or finding.severity is Severity.ERROR for finding in findings))


def show_lint_errors(job: JobFile) -> None:
    """Warn of what is known to hang or crash in a job.yaml or its script, before the job starts.

    The job starts all the same: lint reads the script and cannot see every way through it.
    """
    if str(job.path) == "-":
        return  # standard input was read by the command itself
    try:
        findings = lint(job.path, job.changes)
    except SpecError:
        return  # a script in another encoding: Python may read what lint does not
    for finding in findings:
        if finding.severity is Severity.ERROR:
            warn(f"lint: {finding}")

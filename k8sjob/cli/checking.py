"""Commands about what was written without k8sjob: manifests and training scripts."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import click

from k8sjob.adopt import adopt
from k8sjob.cli.failure import say
from k8sjob.cli.output import document, format_option, line, source_name, text
from k8sjob.document import JOB_FILE, content, job_file
from k8sjob.lint import Severity, lint

__all__ = ["adopt_command", "lint_command"]


@click.command("adopt")
@click.argument("file", type=click.Path(path_type=Path, allow_dash=True))
def adopt_command(file: Path) -> None:
    """Print the job.yaml that renders what a PyTorchJob manifest says: FILE, or - for stdin.

    What a job.yaml has no field for goes to its overlay; nothing is dropped. Notes about it go to
    standard error, so that k8sjob adopt pytorchjob.yaml > job.yaml works.
    """
    adopted = adopt(content(file), source_name(file))
    text(adopted.spec.to_yaml())
    for note in adopted.notes:
        say(f"note: {note}")


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

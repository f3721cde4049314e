"""`k8sjob validate`, `k8sjob schema` and `k8sjob lint`: problems of files, found before a run."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from k8sjob.cli.jobfile import JobFile, set_option
from k8sjob.cli.options import format_option, source_name
from k8sjob.cli.output import count, document, fail, line, print_status, warn
from k8sjob.errors import SpecError
from k8sjob.jobs.plan import image_warnings
from k8sjob.rendering import check_script, manifest, remarks
from k8sjob.spec import schema
from k8sjob.yamldoc import JOB_FILE, job_file

if TYPE_CHECKING:
    from k8sjob.spec.document import Change

_FILES: Final = click.argument("files", nargs=-1, type=click.Path(path_type=Path, allow_dash=True))


@click.command("validate")
@_FILES
@set_option
@format_option("table", "json", "yaml")
def validate_command(files: tuple[Path, ...], sets: tuple[Change, ...], output: str) -> int:
    """Check each of FILES (default: job.yaml; - is standard input) and print every problem found.

    The exit code is 1 if any of them is not a valid job.
    """
    checked = [_checked(JobFile(file, sets)) for file in files or (job_file(Path(JOB_FILE)),)]
    if output != "table":
        document([result for result, _ in checked], output)
    for result, verdict in checked if output == "table" else ():
        (line if result["valid"] else fail)(verdict)
        for warning in result["warnings"]:
            warn(f"{result['file']}: {warning}")
    return 0 if all(result["valid"] for result, _ in checked) else 1


def _checked(job: JobFile) -> tuple[dict[str, Any], str]:
    """The result as data, and as text."""
    result: dict[str, Any] = {"file": source_name(job.path), "valid": True, "job": None}
    result |= {"problems": [], "warnings": []}
    try:
        spec = job.load()
        with job.located():
            manifest(spec)  # whether an overlay fits shows only in the manifest
            check_script(spec, job.folder)
    except SpecError as error:
        result.update(valid=False, problems=[asdict(problem) for problem in error.problems])
        return result, str(error)
    result["job"] = {"name": spec.name, "nodes": spec.nnodes, "processes": spec.world_size}
    result["warnings"] = [*remarks(spec), *image_warnings(spec, spec.image_reference)]
    size = f"{count(spec.nnodes, 'pod')}, {count(spec.world_size, 'process', 'es')}"
    return result, f"{source_name(job.path)}: valid: {spec.name}, {size}"


@click.command("schema")
def schema_command() -> None:
    """Print the JSON Schema of job.yaml, for editors and other tools.

    k8sjob init writes it beside the job.yaml and names it in its first line.
    """
    document(schema(), "json")


@click.command("lint")
@_FILES
@set_option
@click.option("--strict", is_flag=True, help="Exit with 1 for warnings, too.")
@format_option("table", "json", "yaml", "sarif")
def lint_command(
    files: tuple[Path, ...], sets: tuple[Change, ...], strict: bool, output: str
) -> int:
    """Find what will hang, be rejected by the operator or go wrong silently in FILES.

    A file is a manifest of a job, a training script, or a job.yaml (the default), whose script
    is read too; - is any of them on standard input. Nothing is executed. The exit code is 1 if
    there is an error among the findings.
    """
    from k8sjob.checks.lint import CHECKS, Severity, lint, sarif  # noqa: PLC0415 - of no use for validate

    named = files or (job_file(Path(JOB_FILE)),)
    found = [finding for file in named for finding in lint(file, sets)]
    if output == "sarif":
        document(sarif(found, CHECKS), "json")
    elif output != "table":
        document([asdict(finding) for finding in found], output)
    else:
        for finding in found:
            line(str(finding))
        if not found:
            print_status("nothing found")
    return int(any(strict or finding.severity is Severity.ERROR for finding in found))


def show_lint_errors(job: JobFile) -> None:
    """Warn of what is known to hang or crash in a job.yaml or its script, before the job starts.

    The job starts all the same: lint reads the script and cannot see every way through it.
    """
    from k8sjob.checks.lint import Severity, lint  # noqa: PLC0415 - of no use for validate

    if str(job.path) == "-":
        return  # standard input was read by the command itself
    try:
        found = lint(job.path, job.changes)
    except SpecError:
        return  # a script in another encoding: Python may read what lint does not
    for finding in found:
        if finding.severity is Severity.ERROR:
            warn(f"lint: {finding}")

"""`k8sjob validate` and `k8sjob schema`: whether a job.yaml is a valid job."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from k8sjob.cli.jobfile import JobFile, old_base, set_option
from k8sjob.cli.options import format_option, source_name
from k8sjob.cli.output import document, fail, line, warn
from k8sjob.contract import counted
from k8sjob.errors import SpecError
from k8sjob.rendering.dockerfile import check_script
from k8sjob.rendering.manifest import image_warnings, remarks, render
from k8sjob.spec import schema
from k8sjob.yamldoc import JOB_FILE, job_file

if TYPE_CHECKING:
    from k8sjob.spec.changes import Change


@click.command("validate")
@click.argument("files", nargs=-1, type=click.Path(path_type=Path, allow_dash=True))
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
            rendered = render(spec)  # whether an overlay fits shows only in the manifest
            check_script(spec, job.folder)
    except SpecError as error:
        problems = [problem.as_dict("field", "line", "column") for problem in error.findings]
        return {**result, "valid": False, "problems": problems}, str(error)
    result["job"] = {"name": spec.name, "nodes": spec.nnodes, "processes": spec.world_size}
    of_image = image_warnings(spec, spec.image_reference)
    result["warnings"] = [*remarks(spec), *of_image, *old_base(spec)]
    if "hostNetwork: true" in rendered:
        from k8sjob.checks.lint import lint_manifest  # noqa: PLC0415 - few jobs have it

        for finding in lint_manifest(rendered):
            if finding.id == "host-network-dns":
                result["warnings"].append(finding.text)
    size = f"{counted(spec.nnodes, 'pod')}, {counted(spec.world_size, 'process', 'es')}"
    return result, f"{source_name(job.path)}: valid: {spec.name}, {size}"


@click.command("schema")
def schema_command() -> None:
    """Print the JSON Schema of job.yaml, for editors and other tools.

    k8sjob init writes it beside the job.yaml and names it in its first line.
    """
    document(schema(), "json")

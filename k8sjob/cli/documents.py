"""Commands that read a job.yaml and print what follows from it; nothing is started."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from k8sjob.cli.failure import fail, say, warn
from k8sjob.cli.output import document, format_option, line, source_name, text
from k8sjob.document import JOB_FILE, job_file
from k8sjob.errors import SpecError
from k8sjob.rendering import check_script, dockerfile, render, write_context
from k8sjob.spec import Image, JobSpec, load, schema
from k8sjob.spec.load import located

__all__ = [
    "FILE",
    "build_option",
    "folder_of",
    "onto_option",
    "plain_http_option",
    "render_command",
    "schema_command",
    "show_lint_errors",
    "validate_command",
]

FILE = click.argument("file", default=JOB_FILE, type=click.Path(path_type=Path, allow_dash=True))
"""The argument FILE: a job.yaml, a folder with one, or `-`."""
onto_option = click.option(
    "--onto",
    metavar="REF",
    help="Put the code on this image, which has what the job installs, and not on the base.",
)
build_option = click.option(
    "--build",
    "builds",
    is_flag=True,
    help="Build what the job installs first, where it is not built yet.",
)
plain_http_option = click.option(
    "--plain-http",
    multiple=True,
    metavar="HOST",
    envvar="K8SJOB_PLAIN_HTTP",
    help="A registry (host[:port]) that has no TLS; may be given more than once.",
)


def folder_of(file: Path) -> Path:
    """The folder that the relative paths of a job.yaml start from."""
    if str(file) == "-":
        return Path.cwd()
    return file if file.is_dir() else file.parent


def show_lint_errors(file: Path) -> None:
    """Show what lint knows to hang or crash in a job.yaml or its script, before the job starts.

    The job starts all the same: lint reads the script and cannot see every way through it.
    """
    from k8sjob.lint import Severity, lint  # noqa: PLC0415 - only commands that start a job need it

    if str(file) == "-":
        return  # standard input was read by the command itself
    try:
        found = lint(file)
    except SpecError:
        return  # a script in an encoding of its own: Python may read what lint does not
    for finding in found:
        if finding.severity is Severity.ERROR:
            warn(f"lint: {finding}")


@click.command("validate")
@click.argument("files", nargs=-1, type=click.Path(path_type=Path, allow_dash=True))
@format_option("table", "json", "yaml")
def validate_command(files: tuple[Path, ...], output: str) -> int:
    """Check each of FILES (default: job.yaml; - is standard input) and say every problem found.

    The exit code is 1 if any of them is not a valid job.
    """
    checked = [_checked(file) for file in files or (job_file(Path(JOB_FILE)),)]
    if output != "table":
        document([result for result, _ in checked], output)
    for result, verdict in checked if output == "table" else ():
        (line if result["valid"] else fail)(verdict)
        for remark in result["warnings"]:
            warn(f"{result['file']}: {remark}")
    return 0 if all(result["valid"] for result, _ in checked) else 1


def _checked(file: Path) -> tuple[dict[str, Any], str]:
    """What was found as data, and in words."""
    result: dict[str, Any] = {"file": source_name(file), "valid": True, "job": None}
    result |= {"problems": [], "warnings": []}
    try:
        spec = load(file)
        with located(file):
            render(spec)  # an overlay shows whether it fits in the manifest alone
            check_script(spec, folder_of(file))
    except SpecError as error:
        result.update(valid=False, problems=[asdict(problem) for problem in error.problems])
        return result, str(error)
    result["job"] = {"name": spec.name, "nodes": spec.nnodes, "processes": spec.world_size}
    result["warnings"] = list(spec.remarks)
    size = f"{_count(spec.nnodes, 'pod')}, {_count(spec.world_size, 'process', 'es')}"
    return result, f"{source_name(file)}: valid: {spec.name}, {size}"


def _count(count: int, noun: str, plural: str = "s") -> str:
    return f"{count} {noun}{plural if count != 1 else ''}"


@click.command("schema")
def schema_command() -> None:
    """Print the JSON Schema of job.yaml, for editors and other tools.

    k8sjob init writes it beside the job.yaml and names it in its first line.
    """
    document(schema(), "json")


@click.command("render")
@FILE
@click.option("--dockerfile", "only_dockerfile", is_flag=True, help="Print the Dockerfile instead.")
@click.option(
    "-d",
    "--dir",
    "target",
    type=click.Path(path_type=Path, file_okay=False),
    help="Write manifest, Dockerfile and what the image is built from into a folder.",
)
@click.option("--image", help="The image that the replicas run, best with its digest.")
@click.option("-n", "--namespace", help="Namespace of the job, instead of the file's.")
def render_command(
    file: Path, only_dockerfile: bool, target: Path | None, image: str | None, namespace: str | None
) -> None:
    """Print the PyTorchJob manifest of FILE (default: job.yaml), for kubectl apply -f -."""
    if only_dockerfile and (target or image or namespace):
        raise click.UsageError("--dockerfile goes with none of --dir, --image and --namespace")
    spec = load(file)
    if namespace:
        spec = spec.with_(namespace=namespace)
    if only_dockerfile:
        text(dockerfile(spec))
        return
    with located(file):
        if target is None:
            text(render(spec, image))
        else:
            for path in write_context(spec, _context(spec, file), target, image=image):
                say(f"wrote {path}")
    for remark in spec.remarks:
        warn(remark)


def _context(spec: JobSpec, file: Path) -> Path:
    context = spec.image.context if isinstance(spec.image, Image) else "."
    return folder_of(file) / context

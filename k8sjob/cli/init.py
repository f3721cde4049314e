"""`k8sjob init` and `k8sjob adopt`: a job.yaml from a template, a script or a manifest."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click

from k8sjob.adopt import adopt
from k8sjob.cli.jobfile import JobCommand, JobFile, script_args
from k8sjob.cli.options import source_name
from k8sjob.cli.output import print_status, text
from k8sjob.errors import BackendError, K8sJobError, SpecError
from k8sjob.files import write_files
from k8sjob.findings import invalid
from k8sjob.rendering.template import templates_dir
from k8sjob.spec import JobSpec, schema
from k8sjob.yamldoc import content, scalar

if TYPE_CHECKING:
    from collections.abc import Mapping

_FILES: Final = ("job.yaml", "main.py", "requirements.txt")
_SCHEMA: Final = ".job.schema.json"
_NAME: Final = "my-job"
"""The name in the template."""


@click.command("init", cls=JobCommand)
@click.argument(
    "folder", required=False, type=click.Path(path_type=Path, file_okay=False), metavar="DIR"
)
@click.option("--name", metavar="NAME", help="The job's name; by default the folder's.")
@click.option(
    "--from",
    "origin",
    type=click.Path(path_type=Path, exists=True),
    metavar="SCRIPT",
    help="Write the job.yaml of a script, a notebook, or the training script in a folder.",
)
def init_command(folder: Path | None, name: str | None, origin: Path | None) -> None:
    """Write a job into DIR that is ready to run: handwritten digits, two processes.

    With --from, write the job.yaml of a training script into its folder, or into DIR around it:
    how it is started, what it imports, which GPUs and arguments it takes, with the reasons. The
    script is read, not executed. Arguments after `--` are passed to the script.

    Existing files are not overwritten.
    """
    if origin is not None:
        _init_from_script(origin, folder, name or "")
        return
    if folder is None:
        raise click.UsageError("give the DIR of the new job, or a script with --from")
    files = _job(name or folder.absolute().name, named=name is not None)
    _write(files, folder, "use another folder")
    for file in files:
        print_status(f"wrote {folder / file}")
    job = shlex.quote(str(folder / "job.yaml"))
    requirements = shlex.quote(str(folder / "requirements.txt"))
    print_status(f"\nrun it:     k8sjob run {job}\nit needs:   pip install torch -r {requirements}")


def _init_from_script(origin: Path, folder: Path | None, name: str) -> None:
    """Write the job of a script."""
    from k8sjob.backends.local.machine import check_packages  # noqa: PLC0415 - only needed here
    from k8sjob.checks.scripts.job_draft import draft, find_script  # noqa: PLC0415 - with all of lint
    from k8sjob.cli.lint import show_lint_errors  # noqa: PLC0415 - the same

    script = find_script(origin)
    drafted = draft(script, folder or script.parent, name=name, args=script_args())
    direct = f", or run the script without: k8sjob run {shlex.quote(str(script))}"
    step = f"remove it{direct if script.suffix == '.py' else ''}"
    _write(drafted.files, folder or script.parent, step)
    job = (folder or script.parent) / "job.yaml"
    for file in drafted.files:
        print_status(f"wrote {job.parent / file}")
    for note in drafted.notes:
        print_status(f"note: {note}")
    try:
        check_packages(JobFile(job).load(), job.parent)
    except BackendError as error:
        print_status(f"note: {error}")
    show_lint_errors(JobFile(job))
    print_status(f"run it:     k8sjob run {shlex.quote(str(job))}")


def _job(name: str, *, named: bool) -> dict[str, str]:
    """The files by name, checked to be a valid job."""
    source = templates_dir() / "init"
    files = {file: (source / file).read_text(encoding="utf-8") for file in _FILES}
    # As a YAML scalar: a folder may be called 1e3 or "no".
    files["job.yaml"] = files["job.yaml"].replace(_NAME, scalar(name))
    try:
        JobSpec.from_yaml(files["job.yaml"])
    except SpecError as error:
        step = "" if named else "give the job a name with --name"
        of_name = (problem for problem in error.findings if problem.path == ("name",))
        problems = [invalid(("name",), problem.text, step) for problem in of_name]
        raise SpecError(problems or error.findings) from error
    return {**files, _SCHEMA: json.dumps(schema(), indent=1) + "\n"}


def _write(files: Mapping[str, str], folder: Path, step: str) -> None:
    """Write new files; an existing one stops all of them."""
    # A job.yml would be a second job file beside the new job.yaml.
    existing = [str(folder / file) for file in (*files, "job.yml") if (folder / file).exists()]
    if existing:
        raise K8sJobError(f"{', '.join(existing)}: already exists; {step}")
    write_files(folder, files)


@click.command("adopt")
@click.argument("file", type=click.Path(path_type=Path, allow_dash=True))
@click.option("--name", metavar="NAME", help="The job to adopt, if FILE has several.")
def adopt_command(file: Path, name: str | None) -> None:
    """Print a job.yaml that renders the same job as a manifest: FILE, or - for standard input.

    FILE has one job of a supported kind and the objects that belong to it. Anything without a field
    in job.yaml goes to its pod_template or overlay; nothing is dropped. Notes about it go to
    standard error, so that k8sjob adopt pytorchjob.yaml > job.yaml works.
    """
    adopted = adopt(content(file), source_name(file), name)
    text(adopted.spec.to_yaml())
    for note in adopted.notes:
        print_status(f"note: {note}")

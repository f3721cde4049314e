"""`k8sjob archive`: the record of a job."""

from __future__ import annotations

from pathlib import Path

import click

from k8sjob.backends.record import SUFFIX, write_record
from k8sjob.cli.naming import Place, find, job_argument, place_options
from k8sjob.cli.output import line, warn
from k8sjob.errors import K8sJobError


@click.command("archive")
@job_argument()
@click.option(
    "-o",
    "--output",
    "path",
    metavar="FILE",
    type=click.Path(path_type=Path),
    help="The file, default NAME.k8sjob.",
)
@click.option("--force", is_flag=True, help="Replace an existing file.")
@place_options()
def archive_command(job: str, path: Path | None, force: bool, place: Place) -> None:
    """Write all that is known of a job as one file: its state, its objects and its output.

    `why`, `status` and `logs` read the file in place of NAME: when the job is deleted, and on other
    machines. It has the job's manifest and output as they are: check them for secrets before you
    give the file to others.
    """
    backend, ref = find(job, place)
    file = path or Path(f"{ref.name}{SUFFIX}")
    if file.suffix != SUFFIX:
        raise click.UsageError(f"-o {file}: the name of a record ends with {SUFFIX}")
    if file.exists() and not force:
        raise K8sJobError(f"{file} exists; give another name with -o, or --force to replace it")

    def unread(replica: str, reason: str) -> None:
        warn(f"the record has not all of the output of {replica}: {reason}")

    try:
        write_record(backend, ref, file, unread)
    except OSError as error:
        raise K8sJobError(f"{file} cannot be written: {error.strerror or error}") from error
    line(file)

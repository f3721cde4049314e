"""`k8sjob archive`: what is known about a job, as a file."""

from __future__ import annotations

from contextlib import contextmanager
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import click

from k8sjob.backends.record import SUFFIX, RecordBackend, Records, write_record
from k8sjob.cli.find_job import Place, find, job_argument, place_options
from k8sjob.cli.output import line, warn
from k8sjob.errors import K8sJobError
from k8sjob.files import whole_file
from k8sjob.observe.findings import findings_to_keep

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from k8sjob.backends.api import JobRef


def file_options(default: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """The options about the file that is written."""
    path = click.Path(path_type=Path)
    help_text = f"The file, default {default}."

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        force = click.option("--force", is_flag=True, help="Replace an existing file.")
        output = click.option("-o", "--output", "path", metavar="FILE", type=path, help=help_text)
        return output(force(command))

    return decorate


@click.command("archive")
@job_argument()
@file_options("NAME.k8sjob")
@place_options()
def archive_command(job: str, path: Path | None, force: bool, place: Place) -> None:
    """Write all that is known about a job to one file: its state, its objects and its output.

    `why`, `status` and `logs` read the file in place of NAME: when the job is deleted, and on other
    machines. It contains the job's manifest and output unchanged: check them for secrets before you
    give the file to others.
    """
    if path and path.suffix != SUFFIX:
        raise click.UsageError(f"-o {path}: the name of a record must end with {SUFFIX}")
    backend, ref = find(job, place)

    def unread(replica: str, reason: str) -> None:
        warn(f"the record does not have all of the output of {replica}: {reason}")

    with complete_file(path or Path(f"{ref.name}{SUFFIX}"), force=force) as out:
        write_record(backend, ref, out, unread, earlier=_kept, judge=findings_to_keep)


def _kept(ref: JobRef) -> RecordBackend:
    """The record that was kept before: of Pods that are gone it may have the output, and why."""
    return Records().open(ref)


@contextmanager
def complete_file(path: Path, *, force: bool) -> Iterator[IO[bytes]]:
    """A file to write, which gets its name once it is complete; then the name is printed."""
    # Looked at before the content is written: the record of a large job takes minutes.
    if path.exists() and not force:
        raise K8sJobError(f"{path} exists; give another name with -o, or --force to replace it")
    try:
        with whole_file(path) as out:
            yield out
    except OSError as error:
        raise K8sJobError(f"{path} cannot be written: {error.strerror or error}") from error
    line(path)

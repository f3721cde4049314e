"""`k8sjob push`: a job's code, added to its base in the registry."""

from __future__ import annotations

import shlex
import sys
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from k8sjob.checks.distributions import installed_version
from k8sjob.cli.jobfile import JobFile, job_command, old_base
from k8sjob.cli.options import build_option, onto_option, plain_http_option
from k8sjob.cli.output import document, first_names, line, print_status, warn, warn_of_secrets
from k8sjob.contract import counted
from k8sjob.image.build_context import shown_size
from k8sjob.image.code_image import CodeImage, Source
from k8sjob.image.push import Pushed, push
from k8sjob.image.registry.blob_content import Sent
from k8sjob.image.registry.http_client import HttpClient
from k8sjob.sanitize import safe_line

if TYPE_CHECKING:
    from collections.abc import Iterator

    from k8sjob.image.build import Built
    from k8sjob.spec import JobSpec

_FIRST: Final = 1.0
"""Seconds before the first line about what is being sent: most pushes end earlier."""
_REPORT_SECONDS: Final = {True: 0.2, False: 10.0}
"""Seconds between such lines: in a terminal, where one replaces the other, and elsewhere."""
_LISTS: Final = ("blobs", "findings")
_SHOWN: Final = 10
"""Left-out files that are named at most."""


def _output(_ctx: click.Context, _option: click.Parameter, value: str) -> str | Path:
    """The output format, or the folder that the image is written to."""
    kind, _, folder = value.partition(":")
    if value in {"name", "json"}:
        return value
    if kind == "oci" and folder:
        return Path(folder)
    raise click.BadParameter(f"{value!r} is not one of name, json and oci:DIR")


@job_command("push")
@click.option("--dry-run", is_flag=True, help="Print what would be sent, without sending it.")
@build_option
@onto_option
@click.option("--strict", is_flag=True, help="Refuse code that seems to contain credentials.")
@plain_http_option
@click.option(
    "-o",
    "--output",
    "output",
    metavar="[name|json|oci:DIR]",
    callback=_output,
    default="name",
    show_default=True,
    help="name: print the image's reference; json: all that is known about it; oci:DIR: write the"
    " image to a folder, as an OCI layout, and nothing to the registry.",
)
def push_command(  # noqa: PLR0917 - click hands them over by name
    job: JobFile,
    dry_run: bool,
    builds: bool,
    onto: str | None,
    strict: bool,
    plain_http: tuple[str, ...],
    output: str | Path,
) -> None:
    """Add the code of FILE (default: job.yaml) to its base image in the registry without a builder.

    Prints the image with its digest. Unchanged code gives the same digest, and nothing is sent.
    Logins are those of docker and podman.
    """
    if builds and (dry_run or onto):
        raise click.UsageError("--build builds an image first; omit --dry-run and --onto")
    # To read changes takes as long as the file, and a build needs the whole spec.
    torch = installed_version("torch")
    source = None if job.changes or builds else Source.of(job.path, torch)
    image = CodeImage.remembered(source) if source else None
    if source and image:
        spec, folder = None, source.folder
    else:
        spec, folder = _checked(job), job.folder
        image = CodeImage.of(spec, old_base(spec))
        # The file may have been written since, and another job been read of it.
        if source and source == Source.of(job.path, torch):
            image.remember(source)
    for remark in image.remarks:
        warn(remark)
    layout = output if isinstance(output, Path) else None
    with transfer_options(plain_http) as options:
        if builds and spec:
            build_and_report(spec, folder, **options)
        pushed = push(
            image,
            folder,
            onto=onto,
            strict=strict,
            dry_run=dry_run,
            output=layout,
            say=warn,
            packs=print_status,
            packing=options["progress"].packing,
            reads_commit=output == "json",
            **options,
        )
    report_push(pushed, dry_run=dry_run, mounts=layout is None)
    if layout and not dry_run:
        name = f"{pushed.reference.partition('@')[0]}:{pushed.tag}"
        print_status(
            f"written to {layout}; to push it: skopeo copy --preserve-digests"
            f" oci:{shlex.quote(str(layout))}:{pushed.tag} docker://{name}"
        )
    if output == "json":
        # docs/reference/json.md describes the fields.
        lists = {name: [part._asdict() for part in getattr(pushed, name)] for name in _LISTS}
        document({**pushed._asdict(), **lists, "origin": pushed.origin.as_dict()}, output)
    else:
        line(pushed.reference)


def _checked(job: JobFile) -> JobSpec:
    """The spec of a job, whose script is in its image."""
    from k8sjob.rendering.dockerfile import check_script  # noqa: PLC0415 - as in jobfile

    spec = job.load()
    with job.located():
        check_script(spec, job.folder)
    return spec


class _Line:
    """The progress of a push: one line of a terminal, or a line now and then elsewhere."""

    def __init__(self) -> None:
        self._terminal = sys.stderr.isatty()
        self._next = time.monotonic() + _FIRST
        self.written = False

    def __call__(self, done: int, total: int) -> None:
        self._show("sending", done, total)

    def packing(self, packed: int, total: int) -> None:
        """The progress of packing the code, before it is sent."""
        self._show("packing", packed, total)

    def _show(self, activity: str, done: int, total: int) -> None:
        now = time.monotonic()
        if now < self._next:
            return
        self._next = now + _REPORT_SECONDS[self._terminal]
        text = safe_line(f"{activity}: {shown_size(min(done, total))} of {shown_size(total)}")
        click.echo(f"\r\033[K{text}" if self._terminal else text, err=True, nl=not self._terminal)
        self.written = self._terminal


@contextmanager
def transfer_options(plain_http: tuple[str, ...]) -> Iterator[dict[str, Any]]:
    """The options shared by builds and pushes: the registry's client, and progress on stderr."""
    progress = _Line()
    try:
        yield {"http": HttpClient(plain_http=plain_http), "progress": progress}
    finally:
        if progress.written:
            click.echo("\r\033[K", err=True, nl=False)


def build_and_report(spec: JobSpec, folder: Path, **options: Any) -> Built:
    """Build what a job installs; see k8sjob.image.build.build for the options."""
    from k8sjob.image.build import build  # noqa: PLC0415 - a push needs no builders: 0.02 s

    built = build(spec, folder, say=print_status, **options)
    if built.tag is None:
        print_status("nothing to install: the code is added to the base as it is")
    elif built.builder is None:
        print_status(f"unchanged: {built.tag} already exists, for {built.platform}: {built.wanted}")
    elif built.reference is None:
        place = f"{built.tag} on {built.base} for {built.platform}"
        print_status(f"would build {place} with {built.builder}: {built.wanted}")
    else:
        print_status(f"built with {built.builder}: {built.tag} for {built.platform}")
    return built


def report_push(pushed: Pushed, *, dry_run: bool = False, mounts: bool = True) -> None:
    """Print on stderr what went into the image, and over the network."""
    print_status(f"on {pushed.base} for {pushed.platform}")
    if pushed.private:
        warn(
            f"left out, since they may hold credentials: {first_names(pushed.private, _SHOWN)}; a"
            f" line '!{pushed.private[0]}' in .dockerignore includes one"
        )
    warn_of_secrets(pushed.findings, "--strict refuses it")
    if pushed.unchanged:
        print_status("unchanged: the image already exists")
    else:
        print_status(_transfers(pushed) if not dry_run else _expected(pushed, mounts=mounts))


def _expected(pushed: Pushed, *, mounts: bool) -> str:
    """A line about the data that would be sent."""
    # The parts are in the manifest's order, the config last.
    *base, layer, config = pushed.blobs
    own_size, base_size = (
        sum(blob.size for blob in blobs if blob.sent is Sent.MISSING)
        for blobs in ([layer, config], base)
    )
    unless = " unless the registry mounts them" if mounts else ""
    more = f", and {shown_size(base_size)} of the base{unless}"
    return f"would send {shown_size(own_size)}{more if base_size else ''}"


def _transfers(pushed: Pushed) -> str:
    """Lines about how the parts of the image got to the registry."""
    words = {Sent.UPLOADED: "sent", Sent.MOUNTED: "mounted", Sent.THERE: "already there"}
    parts = []
    for transfer, word in words.items():
        sizes = [blob.size for blob in pushed.blobs if blob.sent is transfer]
        if sizes:
            parts.append(f"{word}: {counted(len(sizes), 'part')} ({shown_size(sum(sizes))})")
    return ", ".join(parts)

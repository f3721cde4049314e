"""`k8sjob build` and `k8sjob push`: what a job installs, and its code, into the registry."""

from __future__ import annotations

import shlex
import sys
import time
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from k8sjob.cli.documents import FILE, build_option, folder_of, onto_option, plain_http_option
from k8sjob.cli.failure import say, warn
from k8sjob.cli.output import document, line
from k8sjob.image.blobs import Sent
from k8sjob.image.build import build
from k8sjob.image.builders import AUTO, BUILDERS
from k8sjob.image.context import shown_size
from k8sjob.image.http_client import HttpClient
from k8sjob.image.push import push
from k8sjob.rendering import check_script
from k8sjob.spec import load
from k8sjob.spec.load import located
from k8sjob.view.safe import safe_line

if TYPE_CHECKING:
    from collections.abc import Iterator

    from k8sjob.image.build import Built
    from k8sjob.image.push import Pushed
    from k8sjob.spec import JobSpec

__all__ = ["build_and_tell", "build_command", "progress_line", "push_command", "tell"]

_FIRST: Final = 1.0
"""Seconds before there is a line about what is being sent: most pushes are over by then."""
_EVERY: Final = {True: 0.2, False: 10.0}
"""Seconds between such lines: in a terminal, where one takes the other's place, and elsewhere."""
_SHOWN: Final = 10
"""Left-out files, and contents that look like credentials, that are named at most."""


@click.command("build")
@FILE
@click.option(
    "--builder",
    type=click.Choice([AUTO, *BUILDERS]),
    default=AUTO,
    show_default=True,
    help="What builds; auto is the first of these that can.",
)
@click.option(
    "--platform",
    "platforms",
    multiple=True,
    metavar="OS/ARCH",
    help="Instead of image.platform; may be given more than once: each gets an image.",
)
@click.option("--no-cache", is_flag=True, help="Build anew, whatever there is already.")
@click.option(
    "--zstd",
    is_flag=True,
    help="Compress what is installed by zstd: smaller; for nodes with containerd 1.5 or newer.",
)
@click.option("--dry-run", is_flag=True, help="Say what would be built, and build nothing.")
@plain_http_option
@click.option(
    "-o",
    "--output",
    "output",
    type=click.Choice(["name", "json"]),
    default="name",
    show_default=True,
    help="Print the image's reference, or all about it.",
)
def build_command(  # noqa: PLR0917 - click hands them over by name
    file: Path,
    builder: str,
    platforms: tuple[str, ...],
    no_cache: bool,
    zstd: bool,
    dry_run: bool,
    plain_http: tuple[str, ...],
    output: str,
) -> None:
    """Build the image with what FILE (default: job.yaml) installs: apt, pip and requirements.

    It is pushed to the job's repository under a tag that follows from the base and from what is
    installed. While those are the same nothing is built again, and k8sjob push and submit put the
    code on it. Prints the image by its digest; where nothing is installed, the base.
    """
    spec, images = load(file), []
    how = {"builder": builder, "cached": not no_cache, "zstd": zstd, "dry_run": dry_run}
    for platform in platforms or (None,):
        with progress_line() as progress:
            http = HttpClient(plain_http=plain_http)
            built = build_and_tell(
                spec, folder_of(file), http=http, progress=progress, platform=platform, **how
            )
        images.append(built)
        if output == "name" and built.reference:
            line(built.reference)
    if output == "json":
        document([asdict(built) for built in images], output)


def build_and_tell(spec: JobSpec, folder: Path, **options: Any) -> Built:
    """Build what a job installs; see k8sjob.image.build.build for the options."""
    built = build(spec, folder, say=say, **options)
    _tell_built(built)
    return built


def _tell_built(built: Built) -> None:
    """Say on stderr what has become of it."""
    if built.tag is None:
        say("nothing to install: the code goes on the base as it is")
    elif built.builder is None:
        say(f"unchanged: {built.tag} is there already, for {built.platform}: {built.wanted}")
    elif built.reference is None:
        place = f"{built.tag} on {built.base} for {built.platform}"
        say(f"would build {place} by {built.builder}: {built.wanted}")
    else:
        say(f"built by {built.builder}: {built.tag} for {built.platform}")


def _output(_ctx: click.Context, _option: click.Parameter, value: str) -> str | Path:
    """What is to be printed, or the folder that the image is written to."""
    kind, _, folder = value.partition(":")
    if value in {"name", "json"}:
        return value
    if kind == "oci" and folder:
        return Path(folder)
    raise click.BadParameter(f"{value!r} is none of name, json and oci:DIR")


@click.command("push")
@FILE
@click.option("--dry-run", is_flag=True, help="Say what would be sent, and send nothing.")
@build_option
@onto_option
@click.option("--strict", is_flag=True, help="Refuse code that looks as if it held credentials.")
@plain_http_option
@click.option(
    "-o",
    "--output",
    "output",
    metavar="[name|json|oci:DIR]",
    callback=_output,
    default="name",
    show_default=True,
    help="name: print the image's reference; json: all about it; oci:DIR: write the image to a"
    " folder, as an OCI layout, and nothing to the registry.",
)
def push_command(  # noqa: PLR0917 - click hands them over by name
    file: Path,
    dry_run: bool,
    builds: bool,
    onto: str | None,
    strict: bool,
    plain_http: tuple[str, ...],
    output: str | Path,
) -> None:
    """Put the code of FILE (default: job.yaml) on its base, in the registry: no builder is needed.

    Prints the image by its digest. Code that has not changed gives the same one, and nothing is
    sent. Logins are those of docker and podman.
    """
    if builds and (dry_run or onto):
        raise click.UsageError("--build makes an image first; leave --dry-run and --onto out")
    spec, folder = load(file), folder_of(file)
    with located(file):
        check_script(spec, folder)
    layout = output if isinstance(output, Path) else None
    with progress_line() as progress:
        if builds:
            build_and_tell(spec, folder, http=HttpClient(plain_http=plain_http), progress=progress)
        pushed = push(
            spec,
            folder,
            onto=onto,
            strict=strict,
            dry_run=dry_run,
            output=layout,
            say=warn,
            packing=progress.packing,
            progress=progress,
            http=HttpClient(plain_http=plain_http),
        )
    tell(pushed, dry_run=dry_run, mounts=layout is None)
    if layout and not dry_run:
        image = f"{pushed.reference.partition('@')[0]}:{pushed.tag}"
        say(
            f"written to {layout}; to bring it on: skopeo copy --preserve-digests"
            f" oci:{shlex.quote(str(layout))}:{pushed.tag} docker://{image}"
        )
    if output == "json":
        document(_fields(pushed), output)
    else:
        line(pushed.reference)


def tell(pushed: Pushed, *, dry_run: bool = False, mounts: bool = True) -> None:
    """Say on stderr what went into the image, and over the network.

    Args:
        pushed: what was done.
        dry_run: it would be done.
        mounts: the parts go where layers can be mounted.
    """
    code = f"{_count(pushed.files, 'file')} ({shown_size(pushed.code_size)})"
    say(f"code: {code}, on {pushed.base} for {pushed.platform}")
    if pushed.private:
        warn(
            f"left out, since they may hold credentials: {_some(pushed.private)}; a line"
            f" '!{pushed.private[0]}' in .dockerignore takes one along"
        )
    for finding in pushed.findings[:_SHOWN]:
        warn(f"{finding}: it goes into the image; --strict refuses it")
    if len(pushed.findings) > _SHOWN:
        warn(f"and {len(pushed.findings) - _SHOWN} more contents that look like credentials")
    if pushed.unchanged:
        say("unchanged: the image is there already")
    else:
        say(_way(pushed) if not dry_run else _expected(pushed, mounts=mounts))


def _expected(pushed: Pushed, *, mounts: bool) -> str:
    """What would be sent."""
    *base, layer, config = pushed.blobs
    own, below = (
        sum(blob.size for blob in blobs if blob.sent is Sent.MISSING)
        for blobs in ([layer, config], base)
    )
    unless = " unless the registry mounts them" if mounts else ""
    more = f", and {shown_size(below)} of the base{unless}"
    return f"would send {shown_size(own)}{more if below else ''}"


def _way(pushed: Pushed) -> str:
    """How the parts of the image came to where it is."""
    words = {Sent.UPLOADED: "sent", Sent.MOUNTED: "mounted", Sent.THERE: "there already"}
    parts = []
    for sent, word in words.items():
        sizes = [blob.size for blob in pushed.blobs if blob.sent is sent]
        if sizes:
            parts.append(f"{word}: {_count(len(sizes), 'part')} ({shown_size(sum(sizes))})")
    return ", ".join(parts)


def _count(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"


def _some(names: tuple[str, ...]) -> str:
    more = len(names) - _SHOWN
    return ", ".join(names[:_SHOWN]) + (f" and {more} more" if more > 0 else "")


def _fields(pushed: Pushed) -> dict[str, Any]:
    """The JSON of `-o json`: see docs/reference/json.md."""
    fields = asdict(pushed)
    fields["findings"] = [finding._asdict() for finding in pushed.findings]
    return fields


class _Line:
    """What is done so far, on one line of a terminal or now and then elsewhere."""

    def __init__(self) -> None:
        self._terminal = sys.stderr.isatty()
        self._next = time.monotonic() + _FIRST
        self.written = False

    def __call__(self, sent: int, total: int) -> None:
        self._show("sending", sent, total)

    def packing(self, packed: int, total: int) -> None:
        """The same of the code, before any of it is sent."""
        self._show("packing", packed, total)

    def _show(self, what: str, done: int, total: int) -> None:
        now = time.monotonic()
        if now < self._next:
            return
        self._next = now + _EVERY[self._terminal]
        text = safe_line(f"{what}: {shown_size(min(done, total))} of {shown_size(total)}")
        click.echo(f"\r\033[K{text}" if self._terminal else text, err=True, nl=not self._terminal)
        self.written = self._terminal


@contextmanager
def progress_line() -> Iterator[_Line]:
    """Shows on stderr how far a push is, when it takes long."""
    line = _Line()
    try:
        yield line
    finally:
        if line.written:
            click.echo("\r\033[K", err=True, nl=False)

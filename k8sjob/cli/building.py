"""`k8sjob push`: the code of a job into the registry."""

from __future__ import annotations

import sys
import time
from contextlib import contextmanager
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Final

import click

from k8sjob.cli.documents import FILE, folder_of, onto_option, plain_http_option
from k8sjob.cli.failure import say, warn
from k8sjob.cli.output import document
from k8sjob.image.context import shown_size
from k8sjob.image.push import push
from k8sjob.image.upload import Sent
from k8sjob.image.wire import Wire
from k8sjob.spec import load
from k8sjob.view.safe import safe_line

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from k8sjob.image.push import Pushed

__all__ = ["progress_line", "push_command", "tell"]

_FIRST: Final = 1.0
"""Seconds before there is a line about what is being sent: most pushes are over by then."""
_EVERY: Final = {True: 0.2, False: 10.0}
"""Seconds between such lines: in a terminal, where one takes the other's place, and elsewhere."""
_SHOWN: Final = 10
"""Left-out files, and contents that look like credentials, that are named at most."""


@click.command("push")
@FILE
@click.option("--dry-run", is_flag=True, help="Say what would be sent, and send nothing.")
@onto_option
@click.option("--strict", is_flag=True, help="Refuse code that looks as if it held credentials.")
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
def push_command(  # noqa: PLR0917 - click hands them over by name
    file: Path,
    dry_run: bool,
    onto: str | None,
    strict: bool,
    plain_http: tuple[str, ...],
    output: str,
) -> None:
    """Put the code of FILE (default: job.yaml) on its base, in the registry: no builder is needed.

    Prints the image by its digest. Code that has not changed gives the same one, and nothing is
    sent. Logins are those of docker and podman.
    """
    with progress_line() as progress:
        pushed = push(
            load(file),
            folder_of(file),
            onto=onto,
            strict=strict,
            dry_run=dry_run,
            progress=progress,
            wire=Wire(plain_http=plain_http),
        )
    tell(pushed, dry_run=dry_run)
    if output == "json":
        document(_fields(pushed), output)
    else:
        click.echo(pushed.reference)


def tell(pushed: Pushed, *, dry_run: bool = False) -> None:
    """Say on stderr what went into the image, and over the network."""
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
    say("unchanged: the image is there already" if pushed.unchanged else _way(pushed, dry_run))


def _way(pushed: Pushed, dry_run: bool) -> str:
    """How the parts of the image came to the registry."""
    if dry_run:
        *base, layer, config = pushed.blobs
        own, below = (
            sum(blob.size for blob in blobs if blob.sent is Sent.MISSING)
            for blobs in ([layer, config], base)
        )
        mounted = f", and {shown_size(below)} of the base unless the registry mounts them"
        return f"would send {shown_size(own)}{mounted if below else ''}"
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
    """What has been sent so far, on one line of a terminal or now and then elsewhere."""

    def __init__(self) -> None:
        self._terminal = sys.stderr.isatty()
        self._next = time.monotonic() + _FIRST
        self.written = False

    def __call__(self, sent: int, total: int) -> None:
        now = time.monotonic()
        if now < self._next:
            return
        self._next = now + _EVERY[self._terminal]
        text = safe_line(f"sending: {shown_size(min(sent, total))} of {shown_size(total)}")
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

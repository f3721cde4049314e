"""Data on stdout: tables for people, JSON, YAML and names for programs."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Final

import click

from k8sjob.document import dump
from k8sjob.view.safe import safe_line

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from pathlib import Path

__all__ = ["document", "format_option", "line", "source_name", "table", "text"]

_COLUMN_GAP: Final = 3


def format_option(*formats: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """The option `-o`; the first of the formats is the default."""
    return click.option(
        "-o",
        "--output",
        "output",
        type=click.Choice(formats),
        default=formats[0],
        show_default=True,
        help="How to print it.",
    )


def source_name(file: Path) -> str:
    """What a file is called in what is said about it."""
    return "<stdin>" if str(file) == "-" else str(file)


def document(data: Any, output: str) -> None:
    """Print JSON data as "json" or "yaml"."""
    if output == "yaml":
        text(dump(data))
    else:
        text(json.dumps(data, indent=2) + "\n")


def text(content: str) -> None:
    """Print a document as it is, in UTF-8 whatever the terminal's encoding."""
    click.echo(content.encode(), nl=False)


def line(content: object) -> None:
    """Print one line for a person; what a cluster or a container wrote in it is made harmless."""
    click.echo(safe_line(str(content)))


def table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Print aligned columns, as kubectl does; what does not fit a terminal is not cut off.

    Header and cells are made harmless: both may come from a cluster.
    """
    from rich.cells import cell_len  # noqa: PLC0415 - documents are printed without it

    cells = [[safe_line(str(cell)) for cell in row] for row in (header, *rows)]
    widths = [max(map(cell_len, column)) for column in zip(*cells, strict=True)]
    for row in cells:
        padded = (
            cell + " " * (width - cell_len(cell) + _COLUMN_GAP)
            for cell, width in zip(row, widths, strict=True)
        )
        click.echo("".join(padded).rstrip())

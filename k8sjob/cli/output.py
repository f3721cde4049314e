"""Data on stdout: tables for people, JSON, YAML and names for programs."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Final

import click

from k8sjob.view.sanitize import safe_line
from k8sjob.yamldoc import dump

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

__all__ = ["count", "document", "line", "some", "table", "text"]

_COLUMN_GAP: Final = 3


def document(data: Any, output: str) -> None:
    """Print JSON data as "json" or "yaml"."""
    text(dump(data) if output == "yaml" else json.dumps(data, indent=2) + "\n")


def text(content: str) -> None:
    """Print a document as it is, in UTF-8 whatever the terminal's encoding."""
    click.echo(content.encode(), nl=False)


def line(content: object) -> None:
    """Print one line for a person, without the control sequences of a cluster or a container."""
    click.echo(safe_line(str(content)))


def count(number: int, noun: str, plural: str = "s") -> str:
    """`1 file`, `2 files`."""
    return f"{number} {noun}{'' if number == 1 else plural}"


def some(names: Sequence[str], limit: int) -> str:
    """The first names, and how many more there are."""
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more


def table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Print aligned columns, as kubectl does; what does not fit a terminal is not cut off.

    Control sequences are taken out: header and cells may come from a cluster.
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

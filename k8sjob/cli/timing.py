"""How the time from a submission to the first training step is shown."""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING, Final

import click

from k8sjob.cli.output import line, table
from k8sjob.lifecycle.timing import Row

if TYPE_CHECKING:
    from collections.abc import Sequence

    from k8sjob.lifecycle.timing import Phase, Timing

__all__ = ["show_timing"]

_WORDS: Final = {
    "suspended": "suspended or queued",
    "pod": "pod made",
    "scheduling": "scheduled",
    "setup": "pod set up",
    "init": "init container",
    "image": "image there",
    "container": "container started",
    "runtime": "first line",
    "import": "imported",
    "meeting": "processes met",
    "step": "first step",
}
"""What each phase ends with."""
_MOST_ROWS: Final = 16


def show_timing(found: Timing) -> None:
    """Print the phases, the replicas side by side, and what is not known."""
    whole = "there is no first training step that is known of"
    if found.seconds is not None:
        whole = f"about {found.seconds:.0f} s from its submission to the first training step"
    line(f"{found.ref}: {whole}")
    if found.phases:
        click.echo()
        header = ["UNTIL", "TOOK", "AT", "REPLICA", "DETAIL"]
        table(header, [_phase(phase) for phase in found.phases])
    if len(found.replicas) > 1:
        click.echo()
        _show_rows(found.replicas)
    if found.notes or found.missing:
        click.echo()
    for note in found.notes:
        line(note)
    for missing in found.missing:
        line(f"not known: {missing}")


def _phase(phase: Phase) -> list[str]:
    words = ", ".join(_WORDS.get(part, part) for part in phase.phase.split("+"))
    took = f"{phase.seconds:.2f} s" if phase.exact else f"~{phase.seconds:.0f} s"
    return [words, took, f"{phase.at:.1f} s", phase.replica, phase.detail]


def _show_rows(rows: Sequence[Row]) -> None:
    """What is known of the replicas; of many those that were started last."""
    shown = sorted(rows, key=lambda row: -(row.container or 0.0))[:_MOST_ROWS]
    moments = [one.name for one in fields(Row)][2:]
    known = [name for name in moments if any(getattr(row, name) is not None for row in shown)]
    header = ["REPLICA", "NODE", *(name.replace("_", " ").upper() for name in known)]
    table(
        header,
        [[row.name, row.node, *(_at(getattr(row, name)) for name in known)] for row in shown],
    )
    if len(rows) > len(shown):
        line(f"and {len(rows) - len(shown)} more, started earlier; -o json has them all")


def _at(seconds: float | None) -> str:
    return "" if seconds is None else f"{seconds:.1f} s"

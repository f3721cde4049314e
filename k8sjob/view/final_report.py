"""The report that is printed when the job is over: the outcome, what it reached, why it failed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from rich.text import Text

from k8sjob.view.formats import duration, number
from k8sjob.view.lines import STATE_STYLE, finding_lines

if TYPE_CHECKING:
    from collections.abc import Mapping

    from k8sjob.view.summary import JobSummary

_MOST_METRICS: Final = 30
_WIDEST_LABEL: Final = 30
"""Columns of a label; a longer one moves its value alone."""


def report(summary: JobSummary, *, more: Mapping[str, str] | None = None) -> list[Text]:
    """How the job ended, what it reached, why it failed, and what to do next."""
    lines = [_outcome(summary)]
    for finding in summary.findings:
        lines += finding_lines(finding)
    logged = [name for name in summary.logged if name not in {"epoch", "step"}]
    rows = {
        name: value if isinstance(value := summary.logged[name], str) else number(value)
        for name in logged[:_MOST_METRICS]
    }
    if len(logged) > _MOST_METRICS:
        rows["..."] = f"{len(logged) - _MOST_METRICS} more"
    if summary.written:
        rows["checkpoint"] = summary.written
    rows.update(more or {})
    rows = {label: value for label, value in rows.items() if value != ""}
    margin = min(max([10, *map(len, rows)]), _WIDEST_LABEL)
    lines += [
        Text("  ").append(f"{label if not at else '':{margin}}", style="dim").append(f"  {line}")
        for label, value in rows.items()
        for at, line in enumerate(str(value).splitlines())
    ]
    return lines


def _outcome(summary: JobSummary) -> Text:
    state = summary.state or "Ended"
    text = Text(summary.job, style="bold").append(" ")
    text.append(state, style=STATE_STYLE.get(state, "yellow"))
    if summary.seconds is not None:
        text.append(f" after {duration(summary.seconds)}", style="not bold")
    detail = summary.message if state != "Succeeded" and not summary.findings else ""
    return text.append(f": {detail}", style="not bold") if detail else text

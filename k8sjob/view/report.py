"""The report that is printed when the job is over: the loss curve, the outcome, why it failed."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from rich.text import Text

from k8sjob.view.lines import STATE_STYLE, duration, finding_lines, number

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from k8sjob.view.summary import JobSummary

__all__ = ["plot", "report"]

MAX_WIDTH = 76
Point = tuple[float, float]


def report(
    summary: JobSummary,
    *,
    width: int = 80,
    more: Mapping[str, str] | None = None,
) -> list[Text]:
    """The loss curve, how the job ended, what it reached, why it failed, and what to do next.

    Args:
        summary: of the job's events.
        width: columns of the terminal.
        more: further rows, by label: where the logs are, which command shows them.
    """
    lines = []
    if drawn := plot(summary.curve, width=min(width, MAX_WIDTH)):
        first, last = (number(round(summary.curve[end][0], 1)) for end in (0, -1))
        title = f"loss, epoch {first} to {last}".rjust(len(drawn[-1]))
        lines = [Text(line) for line in (*drawn, title, "")]
    lines.append(_outcome(summary))
    for found in summary.findings:
        lines += finding_lines(found)
    rows = {
        name: value if isinstance(value, str) else number(value)
        for name, value in summary.metrics.items()
        if name not in {"epoch", "step"}
    }
    if summary.checkpoint:
        rows["checkpoint"] = summary.checkpoint
    rows.update(more or {})
    margin = max([10, *map(len, rows)])
    lines += [
        Text("  ").append(f"{label:{margin}}", style="dim").append(f"  {value}")
        for label, value in rows.items()
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


def plot(points: Sequence[Point], *, width: int = 60, height: int = 9) -> list[str]:
    """Draw the points, joined by straight lines, with asterisks.

    Args:
        points: (x, y) by ascending x; those that are not finite are left out.
        width: columns of the whole, labels included; at least 16.
        height: lines of the curve; the x axis adds one.

    Returns:
        The lines, or none where there are fewer than two points to join.
    """
    points = [(x, y) for x, y in points if math.isfinite(x) and math.isfinite(y)]
    if len(points) < 2 or points[0][0] == points[-1][0]:
        return []
    low, high = min(y for _, y in points), max(y for _, y in points)
    labels = {height - 1: number(low), 0: number(high)}
    margin = max(map(len, labels.values()))
    columns = max(width, 16) - margin - 2
    rows = [[" "] * columns for _ in range(height)]
    for column, row in _trace(points, columns, height, low, high):
        rows[row][column] = "*"
    lines = [
        f"{labels.get(index, ''):>{margin}} |{''.join(row)}".rstrip()
        for index, row in enumerate(rows)
    ]
    return [*lines, f"{'':>{margin}} +{'-' * columns}"]


def _trace(
    points: Sequence[Point], columns: int, rows: int, low: float, high: float
) -> Iterator[tuple[int, int]]:
    """The cells (column, row) of the line through the points; row 0 is the highest value."""
    left, right = points[0][0], points[-1][0]
    # Halved first: the difference of two floats may be more than a float can hold.
    span = (high / 2 - low / 2) or 1.0
    before = None
    for x, y in points:
        down = (high / 2 - y / 2) / span if high > low else 0.5
        place = round((x - left) / (right - left) * (columns - 1)), round(down * (rows - 1))
        yield place
        if before:
            across, along = place[0] - before[0], place[1] - before[1]
            steps = max(abs(across), abs(along))
            for step in range(1, steps):
                yield (
                    before[0] + round(across * step / steps),
                    before[1] + round(along * step / steps),
                )
        before = place

"""The report that is printed when the job is over: the curves, the outcome, why it failed."""

from __future__ import annotations

import math
import statistics
from itertools import cycle, pairwise
from typing import TYPE_CHECKING, Final

from rich.text import Text

from k8sjob.view.formats import duration, number
from k8sjob.view.lines import STATE_STYLE, finding_lines

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from k8sjob.view.summary import JobSummary

MAX_WIDTH = 76
_MARKS: Final = "*o+"
"""The marks of the first curve, the second, ... of a figure."""
_OTHERS: Final = 2
"""Metrics other than losses that get a figure."""
_MOST_METRICS: Final = 30
_WIDEST_LABEL: Final = 30
"""Columns of a label; a longer one moves its value alone."""
_FEW: Final = 8
"""Points from which their distribution counts."""
Point = tuple[float, float]


def report(
    summary: JobSummary,
    *,
    width: int = 80,
    more: Mapping[str, str] | None = None,
) -> list[Text]:
    """The curves, how the job ended, what it reached, why it failed, and what to do next."""
    lines = _curves(summary, min(width, MAX_WIDTH))
    lines.append(_outcome(summary))
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


def _curves(summary: JobSummary, width: int) -> list[Text]:
    """The loss, with test losses over it, and each other test metric for itself."""
    losses = {"loss": summary.curve} if summary.curve else {}
    tests = summary.test_curves
    losses |= {name: points for name, points in tests.items() if "loss" in name.lower()}
    figures = [(dict(list(losses.items())[: len(_MARKS)]), 9)]
    test_metrics = [name for name in tests if name not in losses]
    figures += [({name: tests[name]}, 5) for name in test_metrics[:_OTHERS]]
    lines: list[Text] = []
    for curves, height in figures:
        drawn = plot(*curves.values(), width=width, height=height)
        if drawn:
            unit = "epoch" if summary.counts_epochs else "number"
            title = _title(curves, unit, wide=len(drawn[-1])).rjust(len(drawn[-1]))
            lines += [Text(line) for line in (*drawn, title, "")]
    return lines


def _title(curves: Mapping[str, Sequence[Point]], unit: str, wide: int) -> str:
    ends = [x for points in curves.values() for x, _ in points]
    span = " to ".join(number(round(end, 1)) for end in (min(ends), max(ends)))
    names = "  ".join(
        f"{mark} {name}" if len(curves) > 1 else name
        for mark, name in zip(_MARKS, curves, strict=False)
    )
    scale = ", log scale" if _is_log([y for points in curves.values() for _, y in points]) else ""
    title = f"{names}, {unit} {span}{scale}"
    return title if len(title) <= wide else names[:wide]


def plot(*curves: Sequence[Point], width: int = 60, height: int = 9) -> list[str]:
    """Draw curves over each other: points joined by straight lines, each curve with its own mark.

    The y axis is logarithmic where most points would otherwise lie at its bottom.

    Args:
        curves: points (x, y) by ascending x; those that are not finite are left out.
        width: columns of the whole, labels included; at least 16.
        height: lines of the curves; the x axis adds one.

    Returns:
        The lines, or none where no curve has two points to join.
    """
    finite = [
        [(x, y) for x, y in curve if math.isfinite(x) and math.isfinite(y)] for curve in curves
    ]
    every = [point for points in finite for point in points]
    leftmost, rightmost = (end(x for x, _ in every) if every else 0.0 for end in (min, max))
    if leftmost == rightmost or all(len(points) < 2 for points in finite):
        return []
    log = _is_log([y for _, y in every])
    low, high = min(y for _, y in every), max(y for _, y in every)
    labels = {height - 1: number(low), 0: number(high)}
    if log and height > 4:
        labels[(height - 1) // 2] = number(math.sqrt(low) * math.sqrt(high))
    margin = max(map(len, labels.values()))
    columns = max(width, 16) - margin - 2
    rows = [[" "] * columns for _ in range(height)]

    def place(x: float, y: float) -> tuple[int, int]:
        """The column and row of a point; row 0 is the highest value."""
        top, value, bottom = map(math.log10, (high, y, low)) if log else (high, y, low)
        # Halved first: the difference of two floats may be more than a float can hold.
        down = (top / 2 - value / 2) / (top / 2 - bottom / 2 or 1.0) if high > low else 0.5
        across = (x - leftmost) / (rightmost - leftmost)
        return round(across * (columns - 1)), round(down * (height - 1))

    for mark, points in zip(cycle(_MARKS), finite, strict=False):
        for column, row in _line([place(x, y) for x, y in points]):
            rows[row][column] = mark
    lines = [
        f"{labels.get(index, ''):>{margin}} |{''.join(row)}".rstrip()
        for index, row in enumerate(rows)
    ]
    return [*lines, f"{'':>{margin}} +{'-' * columns}"]


def _is_log(values: Sequence[float]) -> bool:
    """Whether most values would lie in the lowest eighth of a linear axis, and all have a log."""
    values = [value for value in values if math.isfinite(value)]
    if len(values) < _FEW or min(values) <= 0:
        return False
    low, high = min(values), max(values)
    return statistics.median(values) - low < (high - low) / 8 and high > 10 * low


def _line(cells: Sequence[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """The cells on the straight lines between adjacent points."""
    yield from cells[:1]
    for before, after in pairwise(cells):
        across, along = after[0] - before[0], after[1] - before[1]
        steps = max(abs(across), abs(along), 1)
        for step in range(1, steps + 1):
            yield before[0] + round(across * step / steps), before[1] + round(along * step / steps)

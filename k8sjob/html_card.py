"""Cards: an object as a small piece of HTML, as notebooks show it below a cell.

Colors are the page's own, or readable on a light and on a dark one, and nothing is loaded. What
jobs and clusters have written is escaped here, once, and is never markup.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

from k8sjob.sanitize import safe_text

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from datetime import datetime

    from k8sjob.findings import Finding

_GREEN, _RED, _YELLOW, _BLUE = "#2e9e5b", "#dc4c4c", "#b8860b", "#3b8fd0"
_COLORS: Final = {"Succeeded": _GREEN, "Failed": _RED, "Running": _BLUE}
_MOST_ROWS: Final = 32
_MOST_CHARACTERS: Final = 20_000
_LINE: Final = "1px solid rgba(128,128,128,.35)"
_CELL: Final = "padding:1px 12px 1px 0;text-align:left;vertical-align:top;background:none"
_WIDTH, _HEIGHT, _MARGIN = 360, 90, 76


class HasCard:
    """An object that notebooks show as its card, which a view draws: see draw_cards_with."""

    __slots__ = ()

    def _repr_html_(self) -> str | None:
        """The name that notebooks call; they show the object's text where it returns None."""
        return _drawers[-1](self) if _drawers else None


_drawers: Final[list[Callable[[HasCard], str]]] = []


def draw_cards_with(drawer: Callable[[HasCard], str]) -> None:
    """Let a view draw the cards of all objects: statuses and results know no view."""
    _drawers[:] = [drawer]


class Html(str):
    """Markup that was made here; any other text is escaped."""

    __slots__ = ()


def card(
    title: str,
    rows: Mapping[str, object],
    *more: Html,
    subtitle: str = "",
    state: str = "",
) -> str:
    """An object as HTML.

    Args:
        title: its name.
        rows: values by label; empty ones and None are left out.
        more: what stands below the rows.
        subtitle: what kind of object it is.
        state: of a job; it is colored.
    """
    head = f"<b>{_escaped(title)}</b>"
    if state:
        head += f' <b style="color:{_color(state)}">{_escaped(state)}</b>'
    if subtitle:
        head += f' <span style="opacity:.7">{_escaped(subtitle)}</span>'
    shown = [[label, value] for label, value in rows.items() if value not in (None, "", (), {}, [])]
    body = table((), shown) if shown else ""
    return (
        f'<div style="border-left:3px solid {_color(state)};padding:2px 0 2px 10px;'
        f'margin:4px 0;max-width:60em;overflow-wrap:anywhere">{head}{body}{"".join(more)}</div>'
    )


def table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> Html:
    """A table; of many rows the first ones, and how many there are."""
    lines = []
    if header:
        cells = "".join(
            f'<th style="{_CELL};opacity:.7">{_escaped(title)}</th>' for title in header
        )
        lines.append(f'<tr style="background:none;border-bottom:{_LINE}">{cells}</tr>')
    for first, *values in rows[:_MOST_ROWS]:
        cells = f'<td style="{_CELL};min-width:6em">{_escaped(first)}</td>'
        cells += "".join(f'<td style="{_CELL}">{_escaped(value)}</td>' for value in values)
        lines.append(f'<tr style="background:none">{cells}</tr>')
    style = "border-collapse:collapse;border:0;margin:2px 0;font-size:90%"
    more = f"<div>and {len(rows) - _MOST_ROWS} more</div>" if len(rows) > _MOST_ROWS else ""
    return Html(f'<table style="{style}">{"".join(lines)}</table>{more}')


def folded(title: str, text: str, *, unfolded: bool = False) -> Html:
    """A long text that opens by a click; of a very long one the end."""
    cut = len(text) - _MOST_CHARACTERS
    shown = f"... ({cut} characters before)\n{text[-_MOST_CHARACTERS:]}" if cut > 0 else text
    style = (
        "margin:0;max-height:20em;overflow:auto;font-size:85%;background:none;white-space:pre-wrap"
    )
    return Html(
        f"<details{' open' * unfolded}><summary>{_escaped(title)}</summary>"
        f'<pre style="{style}">{_escaped(shown)}</pre></details>'
    )


def paragraph(label: str, text: str, *, bad: bool = False) -> Html:
    """A text with a word in front, in red where it is `bad`."""
    style = f' style="color:{_RED}"' if bad else ""
    return Html(f"<div><b{style}>{_escaped(label)}</b> {_escaped(text)}</div>")


def finding_parts(findings: Iterable[Finding]) -> list[Html]:
    """The findings, each with its next step."""
    parts = []
    for finding in findings:
        parts.append(paragraph("why:", finding.message or finding.id, bad=True))
        parts.append(paragraph("next:", finding.next_step))
    return parts


def bar(done: float) -> Html:
    """A progress bar; `done` is 0 to 1."""
    part = f"{min(max(done, 0.0), 1.0):.1%}"
    return Html(
        '<div style="background:rgba(128,128,128,.25);height:6px;border-radius:3px;'
        f'max-width:{_WIDTH}px;margin:4px 0"><div style="background:{_GREEN};height:6px;'
        f'border-radius:3px;width:{part}"></div></div>'
    )


def curve(
    points: Iterable[tuple[float, float]],
    title: str,
    *,
    axis: str = "",
    written: Callable[[float], str] = "{:.4g}".format,
) -> Html:
    """A line through points (x, y) by ascending x, as SVG; empty for fewer than two of them.

    Args:
        points: any numbers; those that are not finite are left out.
        title: what the line shows; it stands below, with the first, last and lowest y.
        axis: what x counts; its ends are written at the corners, with the bounds of y.
        written: a y with its unit.
    """
    points = list(points)
    finite = [(x, y) for x, y in points if math.isfinite(x) and math.isfinite(y)]
    if len(finite) < 2 or finite[0][0] == finite[-1][0]:
        return Html()
    step = -(-len(finite) // _WIDTH)
    finite = [*finite[:-1:step], finite[-1]]
    first, last = finite[0][0], finite[-1][0]
    low, high = min(y for _, y in finite), max(y for _, y in finite)
    # Halved first: the difference of two floats may be more than a float can hold.
    span = (high / 2 - low / 2) or 1.0
    path = " ".join(
        f"{(x - first) / (last - first) * _WIDTH:.1f},{(high / 2 - y / 2) / span * _HEIGHT:.1f}"
        for x, y in finite
    )
    label = f"{title}: {written(finite[0][1])} to {written(points[-1][1])}, lowest {written(low)}"
    marks = [(-6, 4, "end", written(high)), (-6, _HEIGHT + 4, "end", written(low))]
    if axis:
        ends = ((0, "start", f"{axis} {first:.2g}"), (_WIDTH, "end", f"{last:.4g}"))
        marks += [(x, _HEIGHT + 16, anchor, text) for x, anchor, text in ends]
    texts = "".join(
        f'<text x="{x}" y="{y}" text-anchor="{anchor}">{_escaped(text)}</text>'
        for x, y, anchor, text in marks
    )
    left, height = _MARGIN, _HEIGHT + 26
    return Html(
        f'<svg viewBox="-{left} -6 {left + _WIDTH + 4} {height}" width="{left + _WIDTH + 4}"'
        ' style="display:block;max-width:100%;height:auto" role="img" font-size="11"'
        f' fill="currentColor"><title>{_escaped(label)}</title>'
        f'<path d="M0 0H{_WIDTH}M0 {_HEIGHT}H{_WIDTH}" stroke="rgba(128,128,128,.35)"/>'
        f'<polyline points="{path}" fill="none" stroke="{_BLUE}" stroke-width="1.5"/>{texts}</svg>'
        f'<div style="opacity:.7;font-size:85%">{_escaped(label)}</div>'
    )


def moments(**times: datetime | None) -> dict[str, str]:
    """Times by label, as rows of a card."""
    return {
        label: f"{at:%Y-%m-%d %H:%M:%S %Z}".strip() for label, at in times.items() if at is not None
    }


def _color(state: str) -> str:
    return _COLORS.get(state, _YELLOW if state else "rgba(128,128,128,.6)")


def _escaped(value: object) -> str:
    if isinstance(value, float):
        value = f"{value:.6g}"
    from html import escape  # noqa: PLC0415 - of no use in a terminal

    return value if isinstance(value, Html) else escape(safe_text(str(value)))

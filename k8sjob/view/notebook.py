"""The card of a job that runs, below the cell of a notebook.

IPython is not imported: only a cell of a Jupyter kernel has one, and there it is loaded already.
"""

from __future__ import annotations

import sys
import time
from collections import deque
from typing import TYPE_CHECKING, Any, Final
from uuid import uuid4

from k8sjob.card import bar, card, curve, folded, paragraph, table
from k8sjob.view.filters import ShownEvents
from k8sjob.view.lines import LinePrinter, costs, duration, position, started

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from k8sjob.contract import Event

EVERY_S: Final = 0.5
"""Seconds between two drawings: each is a message to the page."""
_LINES: Final = 100
"""Last lines of output on the card; the result's `logs` have all of them."""
_CURVES: Final = 3
_FEW: Final = 20
"""So many lines stay unfolded when the job has succeeded."""
_LINE: Final = 500
"""Characters of a line that the card shows."""


def notebook() -> Callable[..., object] | None:
    """What shows an object below the running cell; None outside a Jupyter kernel."""
    shell: Any = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    publish: Callable[..., object] | None = None
    if hasattr(shell, "kernel"):
        publish = shell.display_pub.publish
    return publish


class NotebookView:
    """One card, drawn again in its place while the job runs."""

    def __init__(self, publish: Callable[..., object], job: str = "") -> None:
        self._events = ShownEvents(job)
        self.summary = self._events.summary
        self._publish = publish
        self._id = uuid4().hex
        self._lines: deque[str] = deque(maxlen=_LINES)
        self._printer = LinePrinter()
        self._began, self._drawn, self._ended = time.time(), 0.0, False
        self._html = ""

    def show(self, events: Sequence[Event]) -> None:
        """Take the events in, and draw the card if its last drawing is a while ago."""
        self._add(self._events.take(events))
        if time.monotonic() - self._drawn >= EVERY_S:
            self._draw()

    def close(self) -> None:
        """Draw the card as it stays."""
        self._add(self._events.rest())
        self._ended = True
        self._draw()

    def _add(self, events: Iterable[Event]) -> None:
        lines = (self._printer.line(event) for event in events)
        self._lines += [line.plain[:_LINE] for line in lines if line]

    def _draw(self) -> None:
        html, self._drawn = self._card(), time.monotonic()
        if html == self._html:
            return
        summary = self.summary
        bundle: dict[str, Any] = {
            "text/html": html,
            "text/plain": f"{summary.job} {summary.state or 'Starting'}",
        }
        self._publish(bundle, {}, transient={"display_id": self._id}, update=bool(self._html))
        self._html = html

    def _card(self) -> str:
        summary = self.summary
        progress = summary.progress
        state = summary.shown_state
        took = summary.seconds
        if took is None:
            took = max(time.time() - (summary.created or self._began), 0)
        subtitle = f"{duration(took)}  {started(summary.group) if summary.group else ''}"
        parts = []
        if progress.fraction is not None and not self._ended:
            parts.append(bar(progress.fraction))
        now = [summary.starting, *position(progress), *costs(progress)]
        if any(now):
            parts.append(paragraph("", "  ".join(one for one in now if one)))
        curves = {"loss": summary.curve, **summary.curves}
        parts += [curve(points, name) for name, points in list(curves.items())[:_CURVES]]
        for found in summary.findings:
            parts.append(paragraph("why:", found.message or found.cause, bad=True))
            parts.append(paragraph("next:", found.next_step))
        odd = {n: one for n, one in summary.replicas.items() if one.restarts or one.exit_code}
        if odd:
            rows = [
                [n, one.phase, one.restarts, one.exit_code, one.reason] for n, one in odd.items()
            ]
            parts.append(table(("replica", "state", "restarts", "exit code", "reason"), rows))
        if self._lines:
            unfolded = not self._ended or state != "Succeeded" or len(self._lines) <= _FEW
            parts.append(folded("output", "\n".join(self._lines), unfolded=unfolded))
        return card(summary.job, {}, *parts, subtitle=subtitle.rstrip(), state=state)

"""The views of one job or of many, and which of them suits the output.

A terminal gets a live screen, a cell of a notebook a card, a pipe or a build log plain lines, a
program JSON lines. IPython is not imported: only a cell of a Jupyter kernel has one, and there it
is loaded already.
"""

from __future__ import annotations

import json
import math
import sys
import time
from collections import deque
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Final, Literal, TextIO, Union
from uuid import uuid4

from rich.console import Console
from rich.text import Text

from k8sjob.contract import LOG, Event, EventKind
from k8sjob.environment import allows_live_screen, locale
from k8sjob.html_card import bar, card, curve, finding_parts, folded, paragraph, table
from k8sjob.sanitize import safe_json
from k8sjob.view.filters import ShownEvents
from k8sjob.view.final_report import report
from k8sjob.view.formats import THEN, costs, duration, position, started, timeline
from k8sjob.view.lines import JobClock, JobRows, LinePrinter, unstyled
from k8sjob.view.live import LiveView
from k8sjob.view.summary import JobSummary

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from k8sjob.view.lines import Line

EVERY_S: Final = 10.0
"""Seconds between two lines about the progress, or about missing processes."""
_WAITING: Final = "waiting for "
DRAW_S: Final = 0.5
"""Seconds between two drawings of a card: each is a message to the page."""
_CARD_LINES: Final = 100
"""Last lines of output on the card; the result's `logs` have all of them."""
_CURVES: Final = 3
_FEW: Final = 20
"""Lines that stay unfolded when the job has succeeded."""
_CARD_LINE: Final = 500
"""Characters of a line that the card shows."""
Format = Literal["auto", "plain", "json"]
Output = Union[Format, "Callable[[Event], object]"]
"""A name of a view, or a function that is called with each event."""


class PlainView:
    """One line per event, with its replica in front; one per epoch, progress now and then."""

    def __init__(self, out: TextIO, job: str = "", *, verbose: bool = False) -> None:
        self._events = ShownEvents(job, pace=True, verbose=verbose)
        self.summary = self._events.summary
        self._out = out
        self._printer = LinePrinter()
        self._progress_shown = -math.inf
        self._start_shown: tuple[str, float] = ("", -math.inf)

    def show(self, events: Sequence[Event]) -> None:
        """Write a line for each event that has one."""
        self._write(self._events.take(events))

    def close(self) -> None:
        """Write what was held back."""
        self._write(self._events.rest())

    def _write(self, events: Iterable[Event]) -> None:
        # All at once: each write gives way to the threads that read, for up to 5 ms.
        if lines := [unstyled(line) + "\n" for line in self._lines(events)]:
            self._out.write("".join(lines))
            self._out.flush()

    def _lines(self, events: Iterable[Event]) -> Iterator[Line]:
        for event in events:
            if event.kind == LOG:
                line = self._printer.line(event)
            elif event.kind == EventKind.PROGRESS:
                line = self._progress(event)
            else:
                starts = event.kind in {EventKind.STARTING, EventKind.STARTED}
                line = (self._start(event) if starts else None) or self._printer.line(event)
            if event.kind == EventKind.METRICS:  # the line of an epoch says the same
                self._progress_shown = event.time
            if line is not None:
                yield line

    def _start(self, event: Event) -> Line | None:
        """The reason why the job does not train yet, if it changed; missing processes at times.

        It is reported for the first replica that reaches it: all go the same way.
        """
        now, (before, at) = self.summary.starting, self._start_shown
        if now == before:
            return None
        again = before.startswith(_WAITING) and now.startswith(_WAITING)
        if again and 0 <= event.time - at < EVERY_S:
            return None
        self._start_shown = now, event.time
        return [self._printer.prefix(event.replica), (now, "")] if now else None

    def _progress(self, event: Event) -> Line | None:
        now = self.summary.progress
        if 0 <= event.time - self._progress_shown < EVERY_S:
            return None
        self._progress_shown = event.time
        numbers = "  ".join([*position(now), *costs(now)])
        return [self._printer.prefix(event.replica), (numbers, "")]


class CallbackView:
    """Hands each event to a function."""

    def __init__(self, callback: Callable[[Event], object], job: str = "") -> None:
        self.summary = JobSummary(job=job)
        self._callback = callback

    def show(self, events: Sequence[Event]) -> None:
        """Call the function with each of the events."""
        for event in events:
            self.summary.add(event)
            self._callback(event)

    def close(self) -> None:
        """Nothing is left open."""


def notebook() -> Callable[..., object] | None:
    """The function that shows an object below the running cell; None outside a Jupyter kernel."""
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
        self._lines: deque[str] = deque(maxlen=_CARD_LINES)
        self._printer = LinePrinter()
        self._clock, self._drawn, self._ended = JobClock(), 0.0, False
        self._html = ""

    def show(self, events: Sequence[Event]) -> None:
        """Take the events in, and draw the card if its last drawing is a while ago."""
        self._add(self._events.take(events))
        if time.monotonic() - self._drawn >= DRAW_S:
            self._draw()

    def close(self) -> None:
        """Draw the card as it stays."""
        self._add(self._events.rest())
        self._ended = True
        self._draw()

    def _add(self, events: Iterable[Event]) -> None:
        lines = (self._printer.line(event) for event in events)
        self._lines += [unstyled(line)[:_CARD_LINE] for line in lines if line]

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
        took = self._clock.age(summary) if summary.seconds is None else summary.seconds
        subtitle = f"{duration(took)}  {started(summary.group) if summary.group else ''}"
        parts = []
        if progress.fraction is not None and not self._ended:
            parts.append(bar(progress.fraction))
        pieces = [summary.starting, *position(progress), *costs(progress)]
        if any(pieces):
            parts.append(paragraph("", "  ".join(filter(None, pieces))))
        curves = {"loss": summary.curve, **summary.test_curves}
        parts += [curve(points, name) for name, points in list(curves.items())[:_CURVES]]
        parts += finding_parts(summary.findings)
        if rows := [
            [name, replica.phase, replica.restarts, replica.exit_code, replica.reason]
            for name, replica in summary.replicas.items()
            if replica.restarts or replica.exit_code
        ]:
            parts.append(table(("replica", "state", "restarts", "exit code", "reason"), rows))
        if self._lines:
            unfolded = not self._ended or state != "Succeeded" or len(self._lines) <= _FEW
            parts.append(folded("output", "\n".join(self._lines), unfolded=unfolded))
        return card(summary.job, {}, *parts, subtitle=subtitle.rstrip(), state=state)


View = LiveView | NotebookView | PlainView | CallbackView
"""Shows the events of one job as they come, and has a summary of them. `show` is called several
times a second, with no events too; `close` leaves the terminal as it was found."""


def json_view(out: TextIO, job: str = "") -> CallbackView:
    """One JSON object an event: see `record`."""

    def write(event: Event) -> None:
        out.write(safe_json(record(event), default=str) + "\n")
        out.flush()

    return CallbackView(write, job)


def record(event: Event) -> dict[str, Any]:
    """The event as the JSON object of `-o json`: kind, time, replica, data.

    Numbers that JSON cannot express (NaN, infinities) become null, so that every parser can read
    the line; text stays as it is, since JSON escapes what is not printable ASCII.
    """
    document: dict[str, Any] = json.loads(
        json.dumps(asdict(event), default=str), parse_constant=lambda _: None
    )
    del document["printed"]
    return document


def viewer(kind: Output, *, job: str, verbose: bool = False) -> View:
    """The view on stdout, to be closed at the end.

    "plain" is plain lines, "json" JSON lines, and "auto" a live screen where the output is a
    terminal, a card below the cell of a notebook, and plain lines elsewhere; a function is called
    with each event.
    """
    out = sys.stdout
    if callable(kind):
        return CallbackView(kind, job)
    if kind == "json":
        return json_view(out, job)
    if kind == "auto" and (publish := notebook()):
        return NotebookView(publish, job)
    if kind == "auto" and is_live(out):
        return LiveView(console_for(out), job, verbose=verbose, ascii_only=ascii_only(out))
    return PlainView(out, job, verbose=verbose)


def board(kind: Format) -> JobRows | CallbackView:
    """The view of many jobs on stdout: JSON lines, or a row for each change."""
    return json_view(sys.stdout) if kind == "json" else JobRows(sys.stdout)


def close_with_report(view: View, *, more: Mapping[str, str] | None = None) -> None:
    """End a view and write the report of what it showed, for a terminal or a pipe."""
    view.close()
    if isinstance(view, CallbackView | NotebookView):
        return
    console = console_for(sys.stdout)
    if isinstance(view, LiveView):  # what was on the screen before its panel went
        stages = timeline(view.summary.stages, view.summary.reported_at)
        more = {"stages": THEN.join(stages), **(more or {})}
    lines = report(view.summary, more=more)
    console.print(Text("\n").join([Text(), *lines]), soft_wrap=True)


def console_for(out: TextIO) -> Console:
    """A console that takes text as text: no markup, no emoji codes, no highlighting."""
    return Console(file=out, markup=False, emoji=False, highlight=False)


def is_live(out: TextIO) -> bool:
    """Whether the output is a terminal that a person looks at, and not a build's log."""
    return out.isatty() and allows_live_screen()


def ascii_only(out: TextIO) -> bool:
    """Whether the output can show only ASCII, by its encoding or the locale."""
    return not (out.encoding or "").lower().startswith("utf") or locale() in {"C", "POSIX"}

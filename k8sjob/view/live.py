"""The live screen of a terminal: lines scroll by, above the state of the job."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Final

from rich.cells import cell_len
from rich.text import Text

from k8sjob.contract import Event, counted
from k8sjob.view.filters import ShownEvents
from k8sjob.view.formats import costs, duration, position, started
from k8sjob.view.lines import NAME_WIDTH, STATE_STYLE, JobClock, LinePrinter, color

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from rich.console import Console

    from k8sjob.observe.status import ReplicaStatus
    from k8sjob.view.summary import JobSummary

# A terminal that knows synchronised output shows all between the two at once; others pass it over.
_BEGIN, _END = "\x1b[?2026h", "\x1b[?2026l"
_HIDE_CURSOR, _SHOW_CURSOR = "\x1b[?25l", "\x1b[?25h"
_ERASE_BELOW: Final = "\x1b[J"
_ERASE_REST_OF_LINE: Final = "\x1b[K"


MAX_LINE: Final = 4000
"""Characters of one log line that a screen shows; the log itself keeps them all."""
_BAR: Final = 40
"""Columns of the progress bar, where there is room for them."""


class LiveView:
    """Lines above, a panel below that is redrawn where it changed."""

    def __init__(
        self, console: Console, job: str = "", *, verbose: bool = False, ascii_only: bool = False
    ) -> None:
        self._events = ShownEvents(job, verbose=verbose)
        self.summary = self._events.summary
        self._console = console
        self._printer = LinePrinter()
        self._panel = Panel(self.summary, ascii_only=ascii_only)
        self._region = Region(console)

    def show(self, events: Sequence[Event]) -> None:
        """Print a line for each event that has one and draw the panel, in one write."""
        self._draw(self._events.take(events))

    def close(self) -> None:
        """Take the panel away; the lines stay."""
        self._draw(self._events.rest())
        self._region.close()

    def _draw(self, events: Iterable[Event]) -> None:
        lines = [_shortened(line) for event in events if (line := self._printer.line(event))]
        above = Text("\n").join(lines) if lines else None
        size = self._console.size
        self._region.draw(self._panel.lines(size.width, size.height), above)


class Panel:
    """The state of a job in as many lines as the terminal has to spare."""

    def __init__(self, summary: JobSummary, *, ascii_only: bool = False) -> None:
        self._summary = summary
        self._clock = JobClock()
        self._ascii = ascii_only

    def lines(self, columns: int, rows: int) -> list[Text]:
        """The lines for a terminal of that size: narrower than it by one column, and lower."""
        room, width = max(rows - 3, 1), max(columns - 1, 1)
        lines = [self._title()]
        if self._summary.starting:
            lines.append(Text(self._summary.starting, style="yellow"))
        progress = self._summary.progress
        if progress.fraction is not None:
            lines.append(self._bar(progress.fraction, max(min(width - len(" 100%"), _BAR), 1)))
        for pieces, style in ((position(progress), ""), (costs(progress), "dim")):
            if pieces:
                lines.append(Text(_joined(pieces, width), style))
        lines += self._replicas(max(min(room // 2, room - len(lines)), 0))
        for line in lines:
            line.truncate(width, overflow="crop" if self._ascii else "ellipsis")
        return lines[:room]

    def _title(self) -> Text:
        summary = self._summary
        state = summary.shown_state
        title = Text(summary.job, style="bold").append("  ")
        title.append(state, style=f"not bold {STATE_STYLE.get(state, 'yellow')}")
        age = self._clock.now(summary.reported_at) - (summary.created or self._clock.began)
        title.append(f"  {duration(max(age, 0))}", style="not bold")
        if summary.group:
            title.append(f"  {started(summary.group)}", style="not bold dim")
        return title

    def _bar(self, done: float, width: int) -> Text:
        full, empty = ("#", ".") if self._ascii else ("━", "─")  # differ without colors, too
        filled = int(done * width)
        bar = Text(full * filled, style="green")
        bar.append(empty * (width - filled), style="dim" if self._ascii else "grey37")
        return bar.append(f" {done:4.0%}")

    def _replicas(self, rows: int) -> Iterator[Text]:
        """One line per replica; of too many, only unusual ones, and counts."""
        replicas = self._summary.replicas
        if len(replicas) <= rows:
            shown, others_by_state = list(replicas), Counter[str]()
        else:
            odd = [name for name, replica in replicas.items() if replica.situation != "Running"]
            shown = odd[: max(rows - 1, 0)]
            others_by_state = Counter(
                replica.situation for name, replica in replicas.items() if name not in shown
            )
        width = max([NAME_WIDTH, *map(len, shown)])
        for name in shown:
            yield Text(f"{name:{width}}  ", style=color(name)).append_text(_replica(replicas[name]))
        if others_by_state and rows:
            counts = ", ".join(
                f"{count} {phase or 'Unknown'}" for phase, count in others_by_state.items()
            )
            yield Text(f"and {counts}" if shown else counts)


def _replica(replica: ReplicaStatus) -> Text:
    phase = replica.phase or "Unknown"
    line = Text(f"{phase:9}", style=STATE_STYLE.get(phase, "yellow"))
    if replica.restarts:
        line.append(f"  {counted(replica.restarts, 'restart')}", style="yellow")
    if replica.reason not in {"", phase, "Error"}:
        line.append(f"  {replica.reason}")
    if replica.exit_code is not None:
        which = "last exit code" if phase == "Running" else "exit code"
        line.append(f"  {which} {replica.exit_code}")
    if replica.node:
        line.append(f"  {replica.node}", style="dim")
    return line


def _joined(pieces: list[str], width: int) -> str:
    """As many of the pieces as fit, at least the first one."""
    shown = list(pieces)
    while len(shown) > 1 and len("  ".join(shown)) > width:
        shown.pop()
    return "  ".join(shown)


def _shortened(line: Text) -> Text:
    over = len(line) - MAX_LINE
    if over <= 0:
        return line
    return line[:MAX_LINE].append(f" ({over:,} more characters)", style="dim")


class Region:
    """Draws lines at the bottom of a terminal; one write each time, none where nothing changed."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._lines: list[Text] = []
        self._frame = ""
        self._width = console.width
        self._open = True
        self._write(_HIDE_CURSOR)

    def draw(self, lines: Sequence[Text], above: Text | None = None) -> None:
        """Replace the region, and print what stands above it from now on.

        Args:
            lines: none wider than the terminal less one column: a character in the last one makes
                terminals disagree about where the cursor is.
            above: may be of any width and number of lines.
        """
        frame = self._rendered(lines)
        width = self._console.width
        if above is None and frame == self._frame and width == self._width:
            return
        # From here on the terminal is written to: the cursor goes back to the region's first line.
        back = self._back(width)
        if above is None and width == self._width:
            # Written over, not erased first: there is nothing to flicker.
            body = frame.replace("\n", f"{_ERASE_REST_OF_LINE}\n") + _ERASE_BELOW
        else:
            body = _ERASE_BELOW + (self._rendered([above]) if above is not None else "") + frame
        self._lines, self._frame, self._width = list(lines), frame, width
        self._write(f"{_BEGIN}{back}{body}{_END}")

    def close(self) -> None:
        """Erase the region and show the cursor again; once."""
        if self._open:
            self._write(f"{self._back(self._console.width)}{_ERASE_BELOW}{_SHOW_CURSOR}")
            self._open = False

    def _back(self, width: int) -> str:
        """Moves the cursor to the region's first column and line, as the terminal holds it now."""
        # A terminal that became narrower has wrapped the lines that it showed.
        rows = sum(max(-(-cell_len(line.plain) // max(width, 1)), 1) for line in self._lines)
        return f"\r\x1b[{rows}A" if rows else "\r"

    def _rendered(self, lines: Sequence[Text]) -> str:
        with self._console.capture() as captured:
            for line in lines:
                self._console.print(line, soft_wrap=True)
        return captured.get()

    def _write(self, written: str) -> None:
        self._console.file.write(written)
        self._console.file.flush()

"""The live screen of a terminal: lines scroll by, above the state of the job."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Final

from rich.cells import cell_len
from rich.text import Text

from k8sjob.contract import Event, EventKind, counted
from k8sjob.view.filters import ShownEvents, Versions
from k8sjob.view.formats import THEN, costs, duration, position, started, timeline
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
# tmux moves a screen that is erased from its first line into the history, with the old panel.
_ERASE_FROM_HERE: Final = f"{_ERASE_REST_OF_LINE}\n{_ERASE_BELOW}\x1b[1A"


MAX_LINE: Final = 4000
"""Characters of one log line that a screen shows; the log itself keeps them all."""
_BAR: Final = 100
"""Columns of the progress bar at most."""
_NARROWEST: Final = 16
"""Columns beside a name in which a line is broken; in fewer the terminal breaks it."""
_GAP: Final = "  "


class LiveView:
    """Lines above, a panel below that is redrawn where it changed."""

    def __init__(
        self, console: Console, job: str = "", *, verbose: bool = False, ascii_only: bool = False
    ) -> None:
        self._events = ShownEvents(job, verbose=verbose)
        self.summary = self._events.summary
        self._versions = None if verbose else Versions()
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
        size = self._console.size
        shown = self._versions.take(events) if self._versions else events
        lines = [line for event in shown for line in self._lines(event, size.width)]
        above = Text("\n").join(lines) if lines else None
        self._region.draw(self._panel.lines(size.width, size.height), above)

    def _lines(self, event: Event, columns: int) -> list[Text]:
        """An event's line in as many rows as it needs, all beside the name in front."""
        pieces = self._printer.line(event)
        if pieces is None:
            return []
        line = _shortened(Text.assemble(*pieces))
        if event.kind == EventKind.METRICS:  # a row of a table: the report has all of them
            end = line.plain.rfind(_GAP, 0, columns + 1)
            return [line if cell_len(line.plain) <= columns or end < 0 else line[:end]]
        room = columns - self._printer.width
        if cell_len(line.plain) <= columns or room < _NARROWEST:
            return [line]
        name, text = line.divide([self._printer.width])
        rows = text.wrap(self._console, room, tab_size=4)
        gap = Text(" " * (len(name) - 2) + "| ", "dim")
        return [(name if row is rows[0] else gap).copy().append_text(row) for row in rows]


class Panel:
    """The state of a job in as many lines as the terminal has to spare."""

    def __init__(self, summary: JobSummary, *, ascii_only: bool = False) -> None:
        self._summary = summary
        self._clock = JobClock()
        self._ascii = ascii_only

    def lines(self, columns: int, rows: int) -> list[Text]:
        """The lines for a terminal of that size: narrower than it by one column, and lower."""
        room, width = max(rows - 3, 1), max(columns - 1, 1)
        summary, progress = self._summary, self._summary.progress
        waiting = Text(summary.waiting[1], style="yellow")
        situations = {name: _situation(pod) for name, pod in summary.replicas.items()}
        usual = Counter(line.plain for line in situations.values()).most_common(1)
        group = self._group(usual)
        lines = _packed([self._title(), self._timeline(width), group, waiting], width)
        if progress.fraction is not None:
            lines.append(self._bar(progress.fraction, max(min(width - len(" 100%"), _BAR), 1)))
        numbers = ((position(progress), ""), (costs(progress), "dim"))
        lines += _packed([Text(_joined(pieces, width), style) for pieces, style in numbers], width)
        common = dict(usual)
        different = {name: line for name, line in situations.items() if line.plain not in common}
        lines += self._named(different, max(min(room // 2, room - len(lines)), 0))
        for line in lines:
            line.truncate(width, overflow="crop" if self._ascii else "ellipsis")
        return lines[:room]

    def _title(self) -> Text:
        state = self._summary.shown_state
        title = Text(self._summary.job, style="bold").append(_GAP)
        title.append(state, style=f"not bold {STATE_STYLE.get(state, 'yellow')}")
        age = self._clock.age(self._summary)
        return title.append(f"{_GAP}{duration(age)}", style="not bold")

    def _timeline(self, width: int) -> Text:
        """The stages so far; of too many the last ones."""
        stages = timeline(self._summary.stages, self._clock.now(self._summary.reported_at))
        line = THEN.join(stages)
        while len(line) > width and len(stages) > 1:
            stages = stages[1:]
            line = THEN.join(["...", *stages])
        return Text(line)

    def _group(self, usual: Sequence[tuple[str, int]]) -> Text:
        """The group, how most of its replicas are (nothing without any), and where all are."""
        pieces = [started(self._summary.group)] if self._summary.group else []
        for situation, count in usual:
            nodes = sorted({pod.node for pod in self._summary.replicas.values() if pod.node})
            where = f" on {f'{len(nodes)} nodes' if nodes[1:] else nodes[0]}" if nodes else ""
            pieces.append(f"{count} {' '.join(situation.split())}{where}")
        return Text(_GAP.join(pieces), style="dim")

    def _bar(self, done: float, width: int) -> Text:
        full, empty = ("#", ".") if self._ascii else ("━", "─")  # differ without colors, too
        filled = int(done * width)
        bar = Text(full * filled, style="green")
        bar.append(empty * (width - filled), style="dim" if self._ascii else "grey37")
        return bar.append(f" {done:4.0%}")

    def _named(self, different: dict[str, Text], rows: int) -> Iterator[Text]:
        """A line for each replica that is not as most are, of too many for the first ones."""
        shown = list(different)[: rows if len(different) <= rows else max(rows - 1, 0)]
        width = max([NAME_WIDTH, *map(len, shown)])
        for name in shown:
            line = Text(f"{name:{width}}  ", style=color(name)).append_text(different[name])
            node = self._summary.replicas[name].node
            yield line.append(f"  {node}", style="dim") if node else line
        if rows and len(different) > len(shown):
            yield Text(f"and {len(different) - len(shown)} more that differ")


def _situation(replica: ReplicaStatus) -> Text:
    phase = replica.phase or "Unknown"
    line = Text(f"{phase:9}", style=STATE_STYLE.get(phase, "yellow"))
    if replica.restarts:
        line.append(f"  {counted(replica.restarts, 'restart')}", style="yellow")
    if replica.reason not in {"", phase, "Error"}:
        line.append(f"  {replica.reason}")
    if replica.exit_code is not None:
        which = "last exit code" if phase == "Running" else "exit code"
        line.append(f"  {which} {replica.exit_code}")
    return line


def _packed(lines: Sequence[Text], width: int) -> list[Text]:
    """The lines, joined where two of them fit into one; without empty ones."""
    packed: list[Text] = []
    for line in filter(None, lines):
        if packed and packed[-1].cell_len + len(_GAP) + line.cell_len <= width:
            packed[-1] = Text(_GAP).join([packed[-1], line])
        else:
            packed.append(line)
    return packed


def _joined(pieces: list[str], width: int) -> str:
    """As many of the pieces as fit, at least the first one."""
    while len(pieces) > 1 and len(_GAP.join(pieces)) > width:
        pieces = pieces[:-1]
    return _GAP.join(pieces)


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
            body = _ERASE_FROM_HERE + (self._rendered([above]) if above is not None else "") + frame
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

"""Many jobs on the screen: a table of those that run in a terminal, a line a change elsewhere."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, TextIO

from rich.cells import cell_len
from rich.text import Text

from k8sjob.contract import Event, EventKind
from k8sjob.sanitize import integer, real, text
from k8sjob.view.lines import STATE_STYLE, duration
from k8sjob.view.live import Region

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import Console, OverflowMethod


_NAME_WIDTH: Final = 24
_STATE_WIDTH: Final = 10
_COUNTS_WIDTH: Final = 22
_ENDED: Final = frozenset({"Succeeded", "Failed", "Stopped", "Deleted"})
_FIRST: Final = ("Failed", "Restarting", "Deleting", "Suspended", "Queued", "Created", "Running")


@dataclass(frozen=True, slots=True)
class Job:
    """A job as last reported."""

    name: str
    state: str
    counts: str
    created: float | None
    started: float | None
    finished: float | None
    message: str

    @classmethod
    def of(cls, event: Event) -> Job:
        """The job in a JOB event of many jobs."""
        data = event.data
        counts = data.get("counts")
        pairs = counts.items() if isinstance(counts, dict) else ()
        state = text(data.get("state"))
        return cls(
            name=f"{text(data.get('namespace'))}/{text(data.get('name'))}",
            state=state,
            counts=", ".join(f"{integer(n) or 0} {text(phase)}" for phase, n in pairs),
            created=real(data.get("created")),
            started=real(data.get("started")),
            finished=real(data.get("finished")),
            message=text(data.get("message")) if state in {"Failed", "Restarting"} else "",
        )

    @property
    def ended(self) -> bool:
        """Whether it has ended, or is gone."""
        return self.state in _ENDED

    @property
    def took(self) -> str:
        """How long it has been running, or ran; empty before."""
        if self.started is None:
            return ""
        return duration(max((self.finished or time.time()) - self.started, 0))

    def line(self, width: int, cut: OverflowMethod = "ignore") -> Text:
        """The job as a row, its name in `width` columns at least; at most, where it is cut."""
        row = Text(self.name)
        row.truncate(width, overflow=cut)
        row = Text(_padded(row.plain, width) + "  ")
        row.append(_padded(self.state, _STATE_WIDTH), style=STATE_STYLE.get(self.state, "yellow"))
        row.append(f"  {_padded(self.counts, _COUNTS_WIDTH)}  {self.took:>8}")
        if self.message:
            row.append(f"  {self.message}")
        row.rstrip()
        return row


class PlainBoard:
    """One row a change."""

    def __init__(self, out: TextIO) -> None:
        self._out = out
        self._width = _NAME_WIDTH

    def show(self, events: Sequence[Event]) -> None:
        """Write what changed; nothing for none."""
        for event in events:
            if event.kind == EventKind.JOB:
                job = Job.of(event)
                self._width = max(self._width, cell_len(job.name))
                self._out.write(job.line(self._width).plain + "\n")
            elif event.kind == EventKind.WARNING:
                self._out.write(f"warning: {text(event.data.get('message'))}\n")
        if events:
            self._out.flush()

    def close(self) -> None:
        """Nothing is left open."""


class LiveBoard:
    """A table of the jobs that have not ended; those that end scroll by above it."""

    def __init__(self, console: Console, *, ascii_only: bool = False) -> None:
        self._console = console
        self._jobs: dict[str, Job] = {}
        self._ended = Counter[str]()
        self._region = Region(console)
        self._overflow: Final[OverflowMethod] = "crop" if ascii_only else "ellipsis"

    def show(self, events: Sequence[Event]) -> None:
        """Take in what changed and draw the table, in one write."""
        above = []
        for event in events:
            if event.kind == EventKind.WARNING:
                above.append(Text(f"warning: {text(event.data.get('message'))}", "yellow"))
            elif event.kind == EventKind.JOB:
                job = Job.of(event)
                self._add(job)
                if job.ended:
                    above.append(job.line(_NAME_WIDTH))
        size = self._console.size
        rows = self._rows(size.width, size.height)
        self._region.draw(rows, Text("\n").join(above) if above else None)

    def close(self) -> None:
        """Take the table away; the lines above stay."""
        self._region.close()

    def _add(self, job: Job) -> None:
        """Of a job that has ended only the state is counted."""
        known = self._jobs.pop(job.name, None)
        if not job.ended:
            self._jobs[job.name] = job
        elif known or job.state != "Deleted":
            self._ended[job.state] += 1

    def _rows(self, columns: int, rows: int) -> list[Text]:
        room = max(rows - 3, 1)
        # Those that do not run come first, then by name.
        order = {state: place for place, state in enumerate(_FIRST)}
        ranked = sorted(self._jobs.values(), key=lambda j: (order.get(j.state, 0), j.name))
        shown = ranked[: room - 1]
        width = max([_NAME_WIDTH, *(cell_len(job.name) for job in shown)])
        # Where there is little room, the state is worth more than the end of a name.
        width = max(min(width, columns - 1 - 2 - _STATE_WIDTH), 1)
        rest = len(ranked) - len(shown)
        more = f"; {rest} more" if rest else ""
        totals = (Counter(job.state for job in ranked) + self._ended).most_common()
        counts = ", ".join(f"{count} {state}" for state, count in totals)
        title = Text(counts or "no jobs", style="bold")
        title.truncate(max(columns - 1 - len(more), 1), overflow=self._overflow)
        title.append(more)
        lines = [title, *(job.line(width, self._overflow) for job in shown)]
        for line in lines:
            line.truncate(max(columns - 1, 1), overflow=self._overflow)
        return lines


def _padded(value: str, width: int) -> str:
    return value + " " * max(width - cell_len(value), 0)

"""Events as lines: for a pipe, and above the live part of a screen."""

from __future__ import annotations

import re
import time
from collections import defaultdict, deque
from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING, Final, TextIO

from rich.cells import cell_len
from rich.text import Text

from k8sjob.contract import LOG, Event, EventKind
from k8sjob.observe.training import STARTING, waiting
from k8sjob.sanitize import flat, integer, real, text
from k8sjob.view.formats import duration, file_name, last_line, started, values
from k8sjob.view.summary import REPEATS

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from k8sjob.findings import Finding
    from k8sjob.view.summary import JobSummary

Piece = tuple[str, str]
"""A part of a line and its style."""
Line = list[Piece]
"""A line of a screen. To make one of rich's texts takes longer than to read and write a line."""
STATE_STYLE: Final = {
    "Running": "cyan",
    "Succeeded": "green",
    "Failed": "red",
    "Stopped": "yellow",
    "Restarting": "yellow",
    "Suspended": "yellow",
    "Deleting": "yellow",
    "Deleted": "yellow",
}
"""Color of a job's state and of a replica's phase."""

_REPLICA_COLORS: Final = ("cyan", "magenta", "blue", "green", "yellow", "bright_cyan")
_SELF: Final = "k8sjob"
"""The name in front of lines that are not of a replica."""
_USUAL_REASONS: Final = re.compile(r"ContainerCreating|PodInitializing|Init:\d+/\d+|Completed")
"""Reasons that every replica has for a while."""
_AGENT_LINE: Final = "k8sjob: rank "
_RECENT: Final = 32
"""Last lines of the agents that are compared with the message of a replica's end."""
_MAX_SAME: Final = 5
"""Replicas for which the same line is shown; the others are left out."""
_MAX_MESSAGES: Final = 1000
NAME_WIDTH: Final = len("worker-0")
"""Columns of a name, at least."""


class JobClock:
    """The time by the clock of a job's stamps, a server's, which may differ from this machine's.

    Attributes:
        began: when this clock was made, by that of this machine.
    """

    def __init__(self) -> None:
        self.began = self._reported_at = time.time()
        self._at = time.monotonic()

    def now(self, reported_at: float = 0.0) -> float:
        """The time now; `reported_at` is that of the newest event about the job, just come."""
        if reported_at and reported_at != self._reported_at:
            self._reported_at, self._at = reported_at, time.monotonic()
        return self._reported_at + time.monotonic() - self._at

    def age(self, summary: JobSummary) -> float:
        """Seconds since the job was created, or since this clock was made if it is not known."""
        return max(self.now(summary.reported_at) - (summary.created or self.began), 0)


class LinePrinter:
    """Turns events into lines with a name in front.

    All that a container wrote has its replica's name, events of the runtime included; only lines of
    k8sjob itself have its name.
    """

    def __init__(self) -> None:
        self._width = NAME_WIDTH
        self._state = ""
        self._replicas_by_message: dict[str, set[str]] = defaultdict(set)
        self._closing: deque[str] = deque(maxlen=_RECENT)

    def line(self, event: Event) -> Line | None:
        """The event as a line, or None if it has none, or nothing new.

        Progress and the start are for the panel, findings are for the report.
        """
        message = phrase(event)
        if event.kind == LOG and message:
            if message[0][0].startswith(_AGENT_LINE):
                self._closing.append(message[0][0])
            return None if REPEATS in event.data else [self.prefix(event.replica), *message]
        if message is None or event.kind == EventKind.STARTING:
            return None
        if event.kind == EventKind.JOB:
            before, self._state = self._state, unstyled(message)
            if self._state == before:
                return None
            if before.startswith("Suspended") and self._state in {"Created", "Running"}:
                message = [("Resumed: ", ""), *message]
        if event.kind == EventKind.REPLICA:
            detail = last_line(event.data.get("message"))
            if detail and any(detail in line for line in self._closing):
                message = phrase(replace(event, data={**event.data, "message": ""})) or message
            prefix = self._prefix(event.replica, message)
            return prefix and [*prefix, *message]
        return [self.prefix(event.replica), *message]

    def _prefix(self, replica: str, message: Line) -> Line | None:
        """The name in front of a replica's line; None where many others had the same line.

        Hundreds of replicas lose the same node at once: a line for each would hide the rest.
        """
        if len(self._replicas_by_message) > _MAX_MESSAGES:
            self._replicas_by_message.clear()
        replicas = self._replicas_by_message[unstyled(message)]
        if replica in replicas or len(replicas) < _MAX_SAME:
            replicas.add(replica)
            return [self.prefix(replica)]
        if len(replicas) > _MAX_SAME:
            return None
        replicas.add("")  # "more replicas" is shown once
        return [self.prefix(), ("more replicas: ", "")]

    @property
    def width(self) -> int:
        """Columns in front of a line now."""
        return self._width + len(" | ")

    def prefix(self, replica: str = "") -> Piece:
        """The name in front of a line; k8sjob's own where there is no replica."""
        name = text(replica)
        self._width = max(self._width, len(name))
        return f"{name or _SELF:{self._width}} | ", color(name) if name else "dim"


def unstyled(line: Line) -> str:
    """A line without its styles."""
    return "".join([part for part, _ in line])


def phrase(event: Event) -> Line | None:
    """An event's line without the name in front; None if it has none."""
    line = _PHRASES[event.kind](event) if event.kind in _PHRASES else None
    return [(line, "")] if isinstance(line, str) else line


def finding_lines(finding: Finding) -> list[Text]:
    """A finding as one paragraph and its next step as another."""
    head = Text("why: ", style="bold red")
    if finding.replica and not finding.message.startswith(finding.replica):
        head.append(f"{finding.replica}: ")
    first, *following = (finding.message or finding.id).splitlines() or [""]
    lines = [head.append(first, style="default"), *(Text("     " + more) for more in following)]
    steps = finding.next_step.splitlines()
    return lines + [Text("next: ", style="bold").append(step, style="not bold") for step in steps]


def _state(event: Event) -> Line:
    state, reason, message = (text(event.data.get(key)) for key in ("state", "reason", "message"))
    usual = state in {"Created", "Running", "Succeeded"}
    detail = "" if usual else message or (reason if reason != state else "")
    line = [(state, f"bold {STATE_STYLE.get(state, '')}".strip())]
    return [*line, (f": {detail}", "")] if detail else line


def _replica(event: Event) -> Line | None:
    """Only what is worth a line of its own: a bad end, a restart, a reason to wait."""
    phase, reason = text(event.data.get("phase")), text(event.data.get("reason"))
    restarts, code = integer(event.data.get("restarts")), integer(event.data.get("exit_code"))
    if phase == "Stopped":
        return [("stopped", STATE_STYLE[phase])]
    if phase in {"Succeeded", "Terminating"} or not (restarts or reason or phase == "Failed"):
        return None
    if _USUAL_REASONS.fullmatch(reason) and not restarts:
        return None
    special = reason if reason not in {phase, "Error"} else ""
    if restarts and phase in {"Running", "Pending"}:
        headline = special or f"restart {restarts}"
        headline += f" after exit code {code}" if code is not None else ""
    else:
        ended = f"exit code {code}" if code is not None else ""
        headline = ", ".join(part for part in (phase, special, ended) if part)
    detail = last_line(event.data.get("message"))
    line = f"{headline}: {detail}" if detail else headline
    return [(line, STATE_STYLE.get(phase, "yellow"))]


def _stopping(event: Event) -> Line:
    signal = text(event.data.get("signal"))
    return [(f"stopping after {signal}" if signal else "stopping", "yellow")]


def _starting(event: Event) -> str:
    phase = text(event.data.get("phase"))
    if phase == "waiting":
        return waiting(event.data) or "all processes have joined"
    return STARTING.get(phase, "the script runs" if phase == "running" else phase)


@lru_cache(1024)
def color(replica: str) -> str:
    """A replica's color: the Master's own, the Workers' in turn."""
    digits = replica.rpartition("-")[2]
    index = int(digits) if digits.isascii() and digits.isdigit() and len(digits) < 9 else 0
    if not replica.startswith("master"):
        index += 1
    return _REPLICA_COLORS[index % len(_REPLICA_COLORS)]


_PHRASES: Final[dict[str, Callable[[Event], Line | str | None]]] = {
    EventKind.LOG: lambda event: text(event.data.get("text")),
    EventKind.JOB: _state,
    EventKind.REPLICA: _replica,
    EventKind.STARTING: _starting,
    EventKind.STARTED: lambda event: started(flat(event.data)),
    EventKind.METRICS: lambda event: [(values(flat(event.data)), "bold")],
    EventKind.CHECKPOINT: lambda event: [(f"checkpoint {file_name(event)}", "dim")],
    EventKind.RESUMED: lambda event: f"resumed from {text(event.data.get('path'))}",
    EventKind.WARNING: lambda event: [(f"warning: {text(event.data.get('message'))}", "yellow")],
    EventKind.STOPPING: _stopping,
}


# --- many jobs ----------------------------------------------------------------------------------

_JOB_WIDTH: Final = 24
_STATE_WIDTH: Final = 10
_COUNTS_WIDTH: Final = 22


class JobRows:
    """A row for each change of one of many jobs."""

    def __init__(self, out: TextIO) -> None:
        self._out = out
        self._width = _JOB_WIDTH
        self._clock = JobClock()

    def show(self, events: Sequence[Event]) -> None:
        """Write what changed; nothing for none."""
        for event in events:
            if event.kind == EventKind.JOB:
                self._out.write(self._row(event) + "\n")
            elif event.kind == EventKind.WARNING:
                self._out.write(f"warning: {text(event.data.get('message'))}\n")
        if events:
            self._out.flush()

    def close(self) -> None:
        """Nothing is left open."""

    def _row(self, event: Event) -> str:
        data, now = event.data, self._clock.now(event.time)
        name = f"{text(data.get('namespace'))}/{text(data.get('name'))}"
        self._width = max(self._width, cell_len(name))
        state, phases = text(data.get("state")), data.get("counts")
        pairs = phases.items() if isinstance(phases, dict) else ()
        counts = ", ".join(f"{integer(count) or 0} {text(phase)}" for phase, count in pairs)
        begin, end = real(data.get("started")), real(data.get("finished")) or now
        took = "" if begin is None else duration(max(end - begin, 0))
        message = text(data.get("message")) if state in {"Failed", "Restarting"} else ""
        columns = _padded(name, self._width), _padded(state, _STATE_WIDTH)
        row = [*columns, _padded(counts, _COUNTS_WIDTH), f"{took:>8}", message]
        return "  ".join(row).rstrip()


def _padded(value: str, width: int) -> str:
    return value + " " * max(width - cell_len(value), 0)

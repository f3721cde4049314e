"""One event as one line: what a pipe gets, and what stands above the live part of a screen."""

from __future__ import annotations

import re
from collections import defaultdict, deque
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from rich.text import Text

from k8sjob.contract import Event, EventKind
from k8sjob.view.plot import number
from k8sjob.view.story import STARTING, flat, integer, text, waiting

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from k8sjob.view.story import Finding, Progress

__all__ = [
    "NAME_WIDTH",
    "STATE_STYLE",
    "Speaker",
    "colour",
    "costs",
    "duration",
    "finding_lines",
    "last_words",
    "phrase",
    "position",
    "started",
    "values",
]

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
"""Colour of a job's state and of a replica's phase."""

_REPLICA_COLOURS: Final = ("cyan", "magenta", "blue", "green", "yellow", "bright_cyan")
_SELF: Final = "k8sjob"
"""Who speaks where it is not a replica."""
_ORDINARY: Final = re.compile(r"ContainerCreating|PodInitializing|Init:\d+/\d+|Completed")
"""What every replica goes through."""
_OF_AN_AGENT: Final = "k8sjob: rank "
_RECENT: Final = 32
"""So many of the agents' last lines are compared with what a replica's end says."""
_ALIKE: Final = 5
"""So many replicas say the same before the others are left out."""
_MOST_SAYINGS: Final = 1000
_WAITING: Final = 0.05
"""The part of the time lost to the slowest rank from which on it is worth a word."""
NAME_WIDTH: Final = len("worker-0")
"""Columns of a speaker's name, at least."""


class Speaker:
    """Turns events into lines with the speaker's name in front.

    What came out of a container bears its replica's name, events of the runtime included: only
    k8sjob itself speaks as k8sjob.
    """

    def __init__(self) -> None:
        self._width = NAME_WIDTH
        self._state = ""
        self._said_by: dict[str, set[str]] = defaultdict(set)
        self._closing: deque[str] = deque(maxlen=_RECENT)

    def line(self, event: Event) -> Text | None:
        """The event as a line, or None where it says nothing by itself or nothing new.

        Progress and the start are for the panel, findings are for the summary.
        """
        message = phrase(event)
        if message is None or event.kind == EventKind.STARTING:
            return None
        if event.kind == EventKind.JOB:
            if message.plain == self._state:
                return None
            self._state = message.plain
        if event.kind == EventKind.LOG and message.plain.startswith(_OF_AN_AGENT):
            self._closing.append(message.plain)
        if event.kind == EventKind.REPLICA:
            detail = last_words(event.data.get("message"))
            if detail and any(detail in line for line in self._closing):
                message = phrase(replace(event, data={**event.data, "message": ""})) or message
            prefix = self._replica_prefix(event.replica, message.plain)
            return prefix.append_text(message) if prefix else None
        return self.prefix(event.replica).append_text(message)

    def _replica_prefix(self, replica: str, said: str) -> Text | None:
        """What stands in front of a replica's line; None where many others said the same before it.

        Hundreds of replicas lose the same node at once: a line for each would hide the rest.
        """
        if len(self._said_by) > _MOST_SAYINGS:
            self._said_by.clear()
        others = self._said_by[said]
        if replica in others or len(others) < _ALIKE:
            others.add(replica)
            return self.prefix(replica)
        if len(others) > _ALIKE:
            return None
        others.add("")  # told that there are more
        return self.prefix().append("more replicas: ")

    def prefix(self, replica: str = "") -> Text:
        """The name in front of a line; k8sjob's own where there is no replica."""
        name = text(replica)
        self._width = max(self._width, len(name))
        style = colour(name) if name else "dim"
        return Text().append(f"{name or _SELF:{self._width}} | ", style)


def phrase(event: Event) -> Text | None:
    """What an event says, without its speaker; None for nothing."""
    if event.kind == EventKind.LOG:
        return Text(text(event.data.get("text")))
    if event.kind in _PHRASES:
        return _PHRASES[EventKind(event.kind)](event)
    return None


def position(progress: Progress) -> list[str]:
    """Where a training stands, as the pieces of a line, the most telling first."""
    pieces = []
    if progress.epoch:
        pieces.append(f"epoch {_of(progress.epoch, progress.epochs)}")
    if progress.step:
        pieces.append(f"step {_of(progress.step, progress.steps)}")
    if progress.loss is not None:
        pieces.append(f"loss {number(progress.loss)}")
    if progress.samples_per_s is not None:
        pieces.append(f"{number(round(progress.samples_per_s, 1))} samples/s")
    if progress.eta_s is not None:
        pieces.append(f"ETA {duration(progress.eta_s)}")
    return pieces


def costs(progress: Progress) -> list[str]:
    """What a training costs, as the pieces of a line, what is out of order first."""
    pieces = []
    if progress.waited is not None and progress.waited >= _WAITING:
        pieces.append(f"{progress.waited:.0%} waiting for rank {progress.slowest}")
    if progress.step_s is not None and 0 < progress.step_s < 1e6:
        pieces.append(f"{number(progress.step_s * 1e3)} ms/step")
    if progress.grad_norm is not None:
        pieces.append(f"gradient norm {number(progress.grad_norm)}")
    if progress.memory_bytes is not None and 0 <= progress.memory_bytes < 2**60:
        pieces.append(f"memory {progress.memory_bytes / 2**30:.2f} GiB")
    return pieces


def duration(seconds: float) -> str:
    """Seconds as `0:07`, `12:34` or `3:04:05`; `?` for what is no duration."""
    if not 0 <= seconds < 1e9:
        return "?"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def values(metrics: Mapping[str, str | float]) -> str:
    """Metrics as `loss 0.31  accuracy 0.94`."""
    return "  ".join(
        f"{name} {value if isinstance(value, str) else number(value)}"
        for name, value in metrics.items()
    )


def finding_lines(found: Finding) -> list[Text]:
    """A finding as one paragraph and its next step as another."""
    head = Text("why: ", style="bold red")
    if found.replica and not found.message.startswith(found.replica):
        head.append(f"{found.replica}: ")
    first, *rest = (found.message or found.cause).splitlines() or [""]
    lines = [head.append(first, style="default"), *(Text("     " + more) for more in rest)]
    steps = found.next_step.splitlines()
    return lines + [Text("next: ", style="bold").append(step, style="not bold") for step in steps]


def started(group: Mapping[str, str | float]) -> str:
    """`4 processes met: ddp over gloo on cpu`, with what is known of it."""
    size = integer(group.get("world_size"))
    met = f"{size} process{'es met' if size != 1 else ''}" if size else "started"
    over = [
        f"{word}{value}"
        for word, key in (("", "strategy"), ("over ", "backend"), ("on ", "device"))
        if (value := group.get(key))
    ]
    restart = integer(group.get("restart"))
    return " ".join([f"{met}:" if over else met, *over]) + (
        f", restart {restart}" if restart else ""
    )


def _state(event: Event) -> Text:
    state, reason, message = (text(event.data.get(key)) for key in ("state", "reason", "message"))
    line = Text(state, style=f"bold {STATE_STYLE.get(state, '')}".strip())
    plain = state in {"Created", "Running", "Succeeded"}  # what there is to say, the state says
    detail = "" if plain else message or (reason if reason != state else "")
    return line.append(f": {detail}", style="not bold default") if detail else line


def _checkpoint(event: Event) -> Text:
    """The file's name alone: the folder is the same each time, and the summary has it."""
    return Text(f"checkpoint {text(event.data.get('path')).rstrip('/').rpartition('/')[2]}", "dim")


def _replica(event: Event) -> Text | None:
    """Only what is worth a line of its own: a bad end, a restart, a reason to wait."""
    phase, reason = text(event.data.get("phase")), text(event.data.get("reason"))
    restarts, code = integer(event.data.get("restarts")), integer(event.data.get("exit_code"))
    if phase == "Stopped":
        return Text("stopped", style=STATE_STYLE[phase])
    if phase in {"Succeeded", "Terminating"} or not (restarts or reason or phase == "Failed"):
        return None
    if _ORDINARY.fullmatch(reason) and not restarts:
        return None
    special = reason if reason not in {phase, "Error"} else ""
    if restarts and phase in {"Running", "Pending"}:
        said = special or f"restart {restarts}"
        said += f" after exit code {code}" if code is not None else ""
    else:
        ended = f"exit code {code}" if code is not None else ""
        said = ", ".join(part for part in (phase, special, ended) if part)
    detail = last_words(event.data.get("message"))
    return Text(f"{said}: {detail}" if detail else said, style=STATE_STYLE.get(phase, "yellow"))


def last_words(message: object) -> str:
    """The last line of a termination message: some are the end of a log, events included."""
    lines = str(message or "").splitlines()
    said = [line for line in lines if line.strip() and Event.decode(line) is None]
    return text(said[-1]) if said else ""


def _stopping(event: Event) -> Text:
    signal = text(event.data.get("signal"))
    return Text(f"stopping after {signal}" if signal else "stopping", style="yellow")


def _starting(event: Event) -> Text:
    phase = text(event.data.get("phase"))
    if phase == "waiting":
        return Text(waiting(event.data) or "all processes are here")
    return Text(STARTING.get(phase, "the script runs" if phase == "running" else phase))


def _of(count: int, whole: int) -> str:
    return f"{count}/{whole}" if whole else str(count)


def colour(replica: str) -> str:
    """A replica's colour: the Master's own, the Workers' in turn."""
    digits = replica.rpartition("-")[2]
    index = int(digits) if digits.isascii() and digits.isdigit() and len(digits) < 9 else 0
    if not replica.startswith("master"):
        index += 1
    return _REPLICA_COLOURS[index % len(_REPLICA_COLOURS)]


_PHRASES: Final[dict[str, Callable[[Event], Text | None]]] = {
    EventKind.JOB: _state,
    EventKind.REPLICA: _replica,
    EventKind.STARTING: _starting,
    EventKind.STARTED: lambda event: Text(started(flat(event.data))),
    EventKind.METRICS: lambda event: Text(values(flat(event.data)), style="bold"),
    EventKind.CHECKPOINT: _checkpoint,
    EventKind.RESUMED: lambda event: Text(f"resumed from {text(event.data.get('path'))}"),
    EventKind.WARNING: lambda event: Text(f"warning: {text(event.data.get('message'))}", "yellow"),
    EventKind.STOPPING: _stopping,
}

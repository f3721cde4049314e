"""One event as one line: what a pipe gets, and what stands above the live part of a screen."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from rich.text import Text

from k8sjob.contract import EventKind
from k8sjob.view.plot import number
from k8sjob.view.story import flat, integer, text

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from k8sjob.contract import Event
    from k8sjob.view.story import Finding, Progress

__all__ = ["STATE_STYLE", "duration", "finding_lines", "line", "position", "values"]

STATE_STYLE: Final = {
    "Running": "cyan",
    "Succeeded": "green",
    "Failed": "red",
    "Restarting": "yellow",
    "Suspended": "yellow",
    "Deleted": "yellow",
}
"""Colour of a job's state and of a replica's phase."""

_REPLICA_COLOURS: Final = ("cyan", "magenta", "blue", "green", "yellow", "bright_cyan")
_SELF: Final = "k8sjob"
"""Who speaks where it is not a replica."""


def line(event: Event, *, width: int = len(_SELF)) -> Text | None:
    """The event as a line with its speaker in front, or None where it says nothing by itself.

    Progress is for the panel, findings are for the summary.

    Args:
        event: any event; its text is made harmless here.
        width: columns of the speaker's name.
    """
    if event.kind == EventKind.LOG:
        return _prefix(text(event.replica), width).append(text(event.data.get("text")))
    say = _SAY.get(event.kind)
    message = say(event) if say else None
    if message is None:
        return None
    speaker = text(event.replica) if event.kind == EventKind.REPLICA else ""
    return _prefix(speaker, width).append_text(message)


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
    if found.replica:
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
    detail = message or (reason if reason != state else "")
    return line.append(f": {detail}", style="not bold default") if detail else line


def _replica(event: Event) -> Text | None:
    """Only what is worth a line of its own: a bad end, a restart, a reason to wait."""
    phase, reason = text(event.data.get("phase")), text(event.data.get("reason"))
    restarts, code = integer(event.data.get("restarts")), integer(event.data.get("exit_code"))
    if phase in {"Succeeded", "Terminating"} or not (restarts or reason or phase == "Failed"):
        return None
    parts = [phase, reason if reason != phase else ""]
    parts.append(f"exit code {code}" if code is not None else "")
    parts.append(f"restart {restarts}" if restarts else "")
    said = ", ".join(part for part in parts if part)
    detail = text(event.data.get("message"))
    return Text(f"{said}: {detail}" if detail else said, style=STATE_STYLE.get(phase, "yellow"))


def _stopping(event: Event) -> Text:
    signal = text(event.data.get("signal"))
    return Text(f"stopping after {signal}" if signal else "stopping", style="yellow")


def _of(count: int, whole: int) -> str:
    return f"{count}/{whole}" if whole else str(count)


def _prefix(speaker: str, width: int) -> Text:
    line = Text(no_wrap=True)
    if not speaker:
        return line.append(f"{_SELF:{width}} | ", style="dim")
    return line.append(f"{speaker:{width}} | ", style=colour(speaker))


def colour(replica: str) -> str:
    """A replica's colour: the Master's own, the Workers' in turn."""
    digits = replica.rpartition("-")[2]
    index = int(digits) if digits.isascii() and digits.isdigit() and len(digits) < 9 else 0
    if not replica.startswith("master"):
        index += 1
    return _REPLICA_COLOURS[index % len(_REPLICA_COLOURS)]


_SAY: Final[dict[str, Callable[[Event], Text | None]]] = {
    EventKind.JOB: _state,
    EventKind.REPLICA: _replica,
    EventKind.STARTED: lambda event: Text(started(flat(event.data))),
    EventKind.METRICS: lambda event: Text(values(flat(event.data)), style="bold"),
    EventKind.CHECKPOINT: lambda event: Text(f"checkpoint {text(event.data.get('path'))}", "dim"),
    EventKind.RESUMED: lambda event: Text(f"resumed from {text(event.data.get('path'))}"),
    EventKind.WARNING: lambda event: Text(f"warning: {text(event.data.get('message'))}", "yellow"),
    EventKind.STOPPING: _stopping,
}

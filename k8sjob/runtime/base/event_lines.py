"""Output of a job's processes: event lines for k8sjob's watch, plain lines for a terminal."""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final, TextIO

from k8sjob.contract import MAX_TERMINATION_BYTES, Event, EventKind, counted

if TYPE_CHECKING:
    from collections.abc import Collection

    from k8sjob.contract import Reason
    from k8sjob.runtime.base.heartbeat import Seen

_MAX_REASON: Final = MAX_TERMINATION_BYTES - 256
"""Bytes of a reason within an event; `why` shortens lines of more than 4096 characters."""


def log_line(line: str) -> None:
    """One line of the agent's in the container's log."""
    with suppress(OSError, ValueError):
        sys.stderr.write(f"k8sjob: {line}\n")
        sys.stderr.flush()


def write_event(kind: EventKind, **data: object) -> None:
    """One event of the agent's in the container's log."""
    with suppress(OSError, ValueError):
        sys.stdout.write(Event(kind, data, time.time()).encode() + "\n")
        sys.stdout.flush()


def write_restart(restart: int, reason: Reason) -> None:
    """The event of processes that start again in place."""
    body = reason.encode(_MAX_REASON)
    write_event(EventKind.RESTARTING, restart=restart, reason=json.loads(body))


def start_phase(ranks: Collection[Seen], before: str = "") -> str:
    """The phase of a node's start: that of the process that is furthest behind.

    `before` is the phase so far: processes may be forked after an import.
    """
    if not all(rank.runs for rank in ranks):
        return before or "python"
    return "importing" if any(rank.importing for rank in ranks) else "running"


Sink = Callable[[Event], None]
"""Takes the events of progress and metrics; it neither fails nor waits."""


class Reporter:
    """The output of a session: rank 0 writes, the other ranks do not.

    Attributes:
        sink: takes the events of progress and metrics, too.
    """

    def __init__(
        self,
        *,
        active: bool,
        events: bool,
        restart: int = 0,
        out: TextIO | None = None,
        printed: bool = False,
    ) -> None:
        """A reporter.

        Args:
            active: whether this process writes at all.
            events: write event lines (see contract.Event); else lines for people.
            restart: how often this process has been started again; progress has it.
            out: the stream; None is stdout as it is at each line, which notebooks replace.
            printed: whether the numbers are read from what the script prints.
        """
        self._active, self._events, self._restart, self._out = active, events, restart, out
        self._printed = printed
        self.sink: Sink | None = None
        self._diverged = False

    def emit(self, kind: EventKind, /, **data: Any) -> None:
        """Write one event; its keys are documented at EventKind."""
        if not self._active:
            return
        plain = {key: _plain(value) for key, value in data.items()}
        # No Pod shows that processes were started again within their container.
        if kind is EventKind.PROGRESS and self._restart:
            plain["restart"] = self._restart
        if kind in {EventKind.PROGRESS, EventKind.METRICS} and not self._diverged:
            counted = {"epoch": plain["epoch"] + 1} if kind is EventKind.PROGRESS else {}
            self._warn_of_divergence({**plain, **counted})  # metrics count as their user does
        event = Event(kind, plain, time.time(), printed=self._printed)
        self._line(event.encode() if self._events else _SENTENCES.get(kind, _pairs)(plain))
        if self.sink and kind in {EventKind.PROGRESS, EventKind.METRICS}:
            self.sink(event)

    def warn(self, message: str) -> None:
        """Report something that does not stop the run."""
        self.emit(EventKind.WARNING, message=message)

    def _warn_of_divergence(self, data: dict[str, Any]) -> None:
        """Warn once of a loss that is not finite: training continues and learns nothing."""
        bad = [
            key
            for key, value in data.items()
            if "loss" in key and isinstance(value, float) and not math.isfinite(value)
            # the lowest loss so far begins with inf in many scripts
            if math.isnan(value) or not any(word in key for word in ("best", "min", "lowest"))
        ]
        if bad:
            self._diverged = True
            at = f" in {position}" if (position := _position(data)) else ""
            self.warn(
                f"the {bad[0]} is {data[bad[0]]}{at}: lower the learning rate, or look for bad"
                " samples"
            )

    def _line(self, text: str) -> None:
        # One write: other threads and C++ share the stream, and a line must stay whole.
        out = self._out or sys.stdout
        out.write(text + "\n")
        out.flush()


def _plain(value: Any) -> Any:
    """A number that JSON has, for tensors and NumPy's scalars; everything else as it is."""
    if hasattr(value, "item") and getattr(value, "ndim", 0) == 0:
        # The host waits for the device here: only the rank that writes does, when it writes.
        return value.item()
    return value


def _pairs(data: dict[str, Any]) -> str:
    return "  ".join(f"{key} {_number(value)}" for key, value in data.items())


def _number(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _started(data: dict[str, Any]) -> str:
    world = data["world_size"]
    return (
        f"started: {counted(world, 'process', 'es')}, {data['backend']} on "
        f"{data['device']}, strategy {data['strategy']}"
    )


def _progress(data: dict[str, Any]) -> str:
    remaining = f"  {data['eta_s']:.0f} s left" if "eta_s" in data else ""
    return (
        f"epoch {data['epoch'] + 1}/{data['epochs']}  step {data['step']}/{data['steps']}  "
        f"loss {_number(data['loss'])}  {data['samples_per_s']:.0f} samples/s{remaining}"
    )


def _position(data: dict[str, Any]) -> str:
    return ", ".join(f"{key} {data[key]}" for key in ("epoch", "step") if key in data)


def _starting(data: dict[str, Any]) -> str:
    if not data["missing"]:
        return "all processes have joined"
    return f"waiting for {data['missing']} of {data['world_size']} processes: {data['ranks']}"


_SENTENCES: dict[str, Callable[[dict[str, Any]], str]] = {
    EventKind.STARTING: _starting,
    EventKind.STARTED: _started,
    EventKind.PROGRESS: _progress,
    EventKind.CHECKPOINT: lambda data: f"checkpoint {data['path']} ({_position(data)})",
    EventKind.RESUMED: lambda data: f"resumed from {data['path']} ({_position(data)})",
    EventKind.WARNING: lambda data: f"warning: {data['message']}",
    EventKind.STOPPING: lambda data: f"stopping after {data['signal']} ({_position(data)})",
    EventKind.FINISHED: lambda data: f"finished in {data['seconds']:.1f} s",
}

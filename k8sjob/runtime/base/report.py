"""Output of a job's processes: event lines for k8sjob's watch, plain lines for a terminal."""

from __future__ import annotations

import math
import sys
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final, TextIO

from k8sjob.contract import Event, EventKind

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from k8sjob.runtime.base.observer import Seen
    from k8sjob.runtime.base.tensorboard import ScalarFile

__all__ = ["Reporter", "StartPhase", "log_line", "write_event"]


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


class StartPhase:
    """Events for the phases of one start of a node's processes, until they run the user's code.

    The phase is that of the process that is furthest behind.
    """

    def __init__(self, processes: int) -> None:
        self._processes = processes
        self._phase = ""

    def update(self, seen: Mapping[int, Seen]) -> None:
        """Write an event where the phase has changed; `seen` has the processes' states by rank."""
        if not all(one.runs for one in seen.values()):
            phase = "python"
        else:
            phase = "importing" if any(one.importing for one in seen.values()) else "running"
        if phase != self._phase:
            self._phase = phase
            write_event(EventKind.STARTING, phase=phase, processes=self._processes)


class Reporter:
    """The output of a session: rank 0 writes, the other ranks do not."""

    def __init__(self, *, active: bool, events: bool, out: TextIO | None = None) -> None:
        """A reporter.

        Args:
            active: whether this process writes at all.
            events: write event lines (see contract.Event); else lines for people.
            out: the stream; None is stdout as it is at each line, which notebooks replace.
        """
        self._active, self._events, self._out = active, events, out
        self._scalars: ScalarFile | None = None
        self._step, self._diverged = 0, False

    def record(self, folder: Path) -> None:
        """Also write numbers to files for TensorBoard."""
        if self._active:
            from k8sjob.runtime.base.tensorboard import ScalarFile

            try:
                self._scalars = ScalarFile(folder)
            except OSError as error:
                self.warn(f"no files for TensorBoard: {error}; training continues without them")

    def emit(self, kind: EventKind, **data: Any) -> None:
        """Write one event; its keys are documented at EventKind."""
        if not self._active:
            return
        plain = {key: _plain(value) for key, value in data.items()}
        if kind in {EventKind.PROGRESS, EventKind.METRICS} and not self._diverged:
            self._warn_of_divergence(plain)
        if self._events:
            self._line(Event(kind, plain, time.time()).encode())
        else:
            self._line(_SENTENCES.get(kind, _pairs)(plain))
        if self._scalars and kind in {EventKind.PROGRESS, EventKind.METRICS}:
            self._draw(self._scalars, plain)

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
            at = ", ".join(f"{key} {data[key]}" for key in ("epoch", "step") if key in data)
            self.warn(
                f"the {bad[0]} is {data[bad[0]]}{f' in {at}' if at else ''}: lower the learning"
                " rate, or look for bad samples"
            )

    def _draw(self, scalars: ScalarFile, data: dict[str, Any]) -> None:
        """Record numbers by the steps of the whole run; metrics are of the step before them."""
        if "steps" in data:
            self._step = data["epoch"] * data["steps"] + data["step"]
        numbers = {key: float(v) for key, v in data.items() if type(v) in {int, float}}
        try:
            scalars.add(
                self._step, {k: v for k, v in numbers.items() if k not in _NO_CURVE}, time.time()
            )
        except OSError as error:
            self._scalars = None
            self.warn(f"no more files for TensorBoard: {error}; training continues without them")

    def _line(self, text: str) -> None:
        # One write: other threads and C++ share the stream, and a line must stay whole.
        out = self._out or sys.stdout
        out.write(text + "\n")
        out.flush()


_NO_CURVE: Final = frozenset({"epoch", "epochs", "step", "steps", "eta_s", "slowest"})


def _plain(value: Any) -> Any:
    """A number that JSON has, for tensors and NumPy's scalars; everything else as it is."""
    if hasattr(value, "item") and getattr(value, "ndim", 0) == 0:
        return value.item()
    return value


def _pairs(data: dict[str, Any]) -> str:
    return "  ".join(f"{key} {_number(value)}" for key, value in data.items())


def _number(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _started(data: dict[str, Any]) -> str:
    world = data["world_size"]
    return (
        f"started: {world} process{'es' if world > 1 else ''}, {data['backend']} on "
        f"{data['device']}, strategy {data['strategy']}"
    )


def _progress(data: dict[str, Any]) -> str:
    return (
        f"epoch {data['epoch'] + 1}/{data['epochs']}  step {data['step']}/{data['steps']}  "
        f"loss {_number(data['loss'])}  {data['samples_per_s']:.0f} samples/s  "
        f"{data['eta_s']:.0f} s left"
    )


def _position(data: dict[str, Any]) -> str:
    return ", ".join(f"{key} {data[key]}" for key in ("epoch", "step") if key in data)


def _starting(data: dict[str, Any]) -> str:
    if not data["missing"]:
        return "all processes are here"
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

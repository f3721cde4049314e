"""Output of a job's processes: event lines for k8sjob's watch, plain lines for a terminal."""

from __future__ import annotations

import math
import os
import socket
import struct
import sys
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final, TextIO

from k8sjob.contract import Event, EventKind

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping
    from pathlib import Path

    from k8sjob.runtime.base.observer import Seen

__all__ = ["Reporter", "ScalarFile", "crc32c", "log_line", "start_phase", "write_event"]


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


def start_phase(ranks: Collection[Seen]) -> str:
    """The phase of a node's start: that of the process that is furthest behind."""
    if not all(one.runs for one in ranks):
        return "python"
    return "importing" if any(one.importing for one in ranks) else "running"


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


# --- numbers for TensorBoard ---------------------------------------------------------------------

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
"""Wire types of protocol buffers."""


class ScalarFile:
    """One file of a run; every start makes another, and TensorBoard joins those of a folder.

    A file is a row of records (tensorflow/core/lib/io/record_writer.h), each an Event in the wire
    format of protocol buffers (tensorflow/core/util/event.proto, framework/summary.proto). Nothing
    stays open between two writes, so that what was written is on a shared volume too.
    """

    def __init__(self, folder: Path) -> None:
        """Begin a file; OSError where it cannot be made."""
        folder.mkdir(parents=True, exist_ok=True)
        name = f"events.out.tfevents.{int(time.time()):010d}.{socket.gethostname()}.{os.getpid()}"
        self.path = folder / name
        self._record(time.time(), _field(3, _BYTES, b"brain.Event:2"))

    def add(self, step: int, values: Mapping[str, float], at: float) -> None:
        """Write numbers by their names, and out to the disk; OSError where that fails.

        Args:
            step: where they stand along the axis.
            values: name -> number, in single precision.
            at: seconds since the epoch.
        """
        pairs = (
            _field(1, _BYTES, name.encode()) + _field(2, _FIXED32, struct.pack("<f", value))
            for name, value in values.items()
        )
        summary = b"".join(_field(1, _BYTES, pair) for pair in pairs)
        self._record(at, _field(2, _VARINT, _varint(step)) + _field(5, _BYTES, summary))

    def _record(self, at: float, rest: bytes) -> None:
        event = _field(1, _FIXED64, struct.pack("<d", at)) + rest
        length = struct.pack("<Q", len(event))
        with self.path.open("ab") as file:
            file.write(length + _checksum(length) + event + _checksum(event))


def crc32c(content: bytes) -> int:
    """The checksum of Castagnoli (RFC 3720, B.4), which zlib does not have."""
    value = 0xFFFFFFFF
    for byte in content:
        value ^= byte
        for _ in range(8):
            value = value >> 1 ^ 0x82F63B78 * (value & 1)
    return value ^ 0xFFFFFFFF


def _checksum(content: bytes) -> bytes:
    value = crc32c(content)  # rotated and shifted, so that a record may hold records
    return struct.pack("<I", ((value >> 15 | value << 17) + 0xA282EAD8) & 0xFFFFFFFF)


def _field(number: int, kind: int, content: bytes) -> bytes:
    length = _varint(len(content)) if kind == _BYTES else b""
    return _varint(number << 3 | kind) + length + content


def _varint(value: int) -> bytes:
    parts = bytearray()
    while value > 0x7F:
        parts.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*parts, value])

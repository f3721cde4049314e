"""The state of a training by the events of its runtime: one fold for screens, results and `why`.

Events come from containers, so no value in them is trusted: what is not of the expected shape is
left out, and text is made harmless on its way in.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Self

from k8sjob.contract import NO_PROGRESS, Event, EventKind
from k8sjob.sanitize import flat, integer, real, text

if TYPE_CHECKING:
    from collections.abc import Iterable

MAX_POINTS = 4096
"""Points of a curve that are kept; more than any screen has columns for."""
_MAX_CURVES: Final = 60
"""Curves that are kept of what a script logs, whose names are its own."""
_OF_A_TEST: Final = re.compile(r"(?:test|val|valid|validation|eval|dev)[_/-]", re.IGNORECASE)
_NUMBERS: Final = (
    "loss", "epoch_loss", "samples_per_s", "eta_s", "grad_norm", "memory_bytes", "step_s", "wait_s",
)  # fmt: skip
POSITION: Final = frozenset({"time", "epoch", "epochs", "step", "steps", "eta_s", "slowest"})
"""Numbers that say where a training is, and have no curve."""
_CURVES: Final = (
    "loss", "epoch_loss", "samples_per_s", "grad_norm", "memory_bytes", "wait_s",
)  # fmt: skip
"""Numbers of a report that have a curve."""
_SPEED: Final = frozenset({"samples_per_s", "wait_s"})
STARTING: Final = {"importing": "importing torch", "python": "starting Python"}
"""Phases of a start that a reader waits for, the most telling first."""
_NO_STEPS: Final = frozenset(
    {EventKind.WARNING, EventKind.STOPPING, EventKind.CHECKPOINT}
    | {EventKind.JOB, EventKind.REPLICA, EventKind.LOG, EventKind.FINDING}
)
"""Events that may come while a group waits: a thread of it may write a checkpoint."""


class Progress(NamedTuple):
    """A report of a training run: the current epoch, from 1, and the steps done in it.

    A zero says that something is not known.

    Attributes:
        time: when it was written, in seconds since the epoch.
        is_placed: whether it says which step it is of.
        step_s: seconds of a step; `wait_s` of these are lost to the rank `slowest`.
    """

    epoch: int = 0
    epochs: int = 0
    step: int = 0
    steps: int = 0
    loss: float | None = None
    epoch_loss: float | None = None
    samples_per_s: float | None = None
    eta_s: float | None = None
    grad_norm: float | None = None
    memory_bytes: float | None = None
    step_s: float | None = None
    wait_s: float | None = None
    slowest: int | None = None
    time: float = 0.0
    is_placed: bool = False

    @classmethod
    def of(cls, data: dict[str, Any], time: float = 0.0) -> Self:
        """The report in the data of a PROGRESS event."""
        epoch = integer(data.get("epoch"))
        numbers: dict[str, Any] = {name: real(data.get(name)) for name in _NUMBERS}
        numbers |= {name: _count(data.get(name)) for name in ("epochs", "step", "steps")}
        return cls(
            epoch=0 if epoch is None else max(epoch, 0) + 1,  # the runtime counts as range() does
            slowest=integer(data.get("slowest")),
            time=time,
            is_placed=epoch is not None and integer(data.get("step")) is not None,
            **numbers,
        )

    @property
    def position(self) -> tuple[int, int]:
        """The epoch, and the steps done in it, by which reports are ordered."""
        return self.epoch, self.step

    @property
    def ends_epoch(self) -> bool:
        """Whether it is of the last step of an epoch."""
        return 0 < self.steps == self.step

    @property
    def at(self) -> float:
        """Epochs that are behind, with the part of the one that runs."""
        part = min(self.step / self.steps, 1.0) if self.steps else 0.0
        return max(self.epoch - 1, 0) + part

    @property
    def waited(self) -> float | None:
        """The part of the time that ranks wait for the slowest, 0 to 1; None: not known."""
        step, wait = self.step_s, self.wait_s
        if not step or wait is None or not 0 <= wait <= step < math.inf:
            return None
        return wait / step

    @property
    def fraction(self) -> float | None:
        """The part of the whole that is done, 0 to 1; None if the whole is not known."""
        return min(self.at / self.epochs, 1.0) if self.epochs else None


@dataclass
class Training:
    """The state of a training by its events so far, of all replicas or of the one that reports.

    Attributes:
        group: the process group: world_size, backend, device, ...; empty until this start has one.
        last_group: the last one that was formed, by whichever start.
        restarts: how often the processes were started again, within their containers as well.
        progress: the last report of this start.
        at: the epochs behind at the last report of any start; without reports of epochs, how
            often the script has logged something.
        counts_epochs: whether `at` is in epochs.
        curves: name -> (at, value), ascending, of reports and of what is logged; finite values
            alone. What a restart repeats is replaced.
        times: the same of when these were written, seconds since the epoch.
        logged: the last value of each name that the script logged.
        metrics: the same, and the last loss.
        checkpoint: path of the newest one that was written or resumed.
        written: path of the newest one that was written.
        stopping: whether a stop was requested.
        hang: the last warning of a group that waits, and has not continued.
        phases: of the replicas that have not reached the user's code, see STARTING.
        waiting: the replica that waits for other processes to join, and the line about them.
        reported: when the group was formed, or its progress was written, seconds since the epoch.
    """

    group: dict[str, str | float] = field(default_factory=dict)
    last_group: dict[str, str | float] = field(default_factory=dict)
    restarts: int = 0
    progress: Progress = field(default_factory=Progress)
    at: float = 0.0
    counts_epochs: bool = False
    curves: dict[str, list[tuple[float, float]]] = field(default_factory=dict)
    times: list[tuple[float, float]] = field(default_factory=list)
    logged: dict[str, str | float] = field(default_factory=dict)
    metrics: dict[str, str | float] = field(default_factory=dict)
    checkpoint: str = ""
    written: str = ""
    stopping: bool = False
    hang: Event | None = None
    phases: dict[str, str] = field(default_factory=dict)
    waiting: tuple[str, str] = ("", "")
    reported: float = 0.0

    @classmethod
    def of(cls, events: Iterable[Event]) -> Self:
        """The state after some events."""
        training = cls()
        for event in events:
            training.add(event)
        return training

    def add(self, event: Event) -> None:
        """Take in one event; kinds that are not known are passed over."""
        data = event.data
        self._forget_earlier_start(event)
        if event.kind not in _NO_STEPS:
            self.hang = None
        match event.kind:
            case EventKind.STARTING:
                self._start(text(event.replica), data)
            case EventKind.STARTED:
                self.group = self.last_group = numbers_and_texts(data)
                self.end_start()
            case EventKind.PROGRESS:
                self._advance(Progress.of(data, event.time))
            case EventKind.METRICS:
                self._measure(numbers_and_texts(data), event.time)
            case EventKind.WARNING if data.get("reason") == NO_PROGRESS:
                self.hang = None if data.get("over") else event
                self.progress = self.progress._replace(eta_s=None)
            case EventKind.CHECKPOINT:
                self.checkpoint = self.written = text(data.get("path"))
            case EventKind.RESUMED:
                self.checkpoint = text(data.get("path"))
            case EventKind.STOPPING:
                self.stopping = True
            case _:
                pass

    @property
    def starting(self) -> str:
        """The known reason why the job does not train yet; empty if there is none."""
        phases = self.phases.values()
        shown = (line for phase, line in STARTING.items() if phase in phases)
        return self.waiting[1] or next(shown, "")

    @property
    def last_values(self) -> dict[str, str | float]:
        """`metrics` without positions, the loss first: what is cut off is never the loss."""
        names = sorted(self.metrics, key=lambda name: name != "loss")
        return {name: self.metrics[name] for name in names if name not in POSITION}

    @property
    def curve(self) -> list[tuple[float, float]]:
        """The curve of the loss; empty without one."""
        return self.curves.get("loss", [])

    @property
    def test_curves(self) -> dict[str, list[tuple[float, float]]]:
        """The curves of what is measured on data that is not trained on."""
        return {name: curve for name, curve in self.curves.items() if _OF_A_TEST.match(name)}

    def forget_start(self, replica: str) -> None:
        """Forget why a replica does not train yet: it does, or has ended."""
        self.phases.pop(replica, None)
        if replica == self.waiting[0]:
            self.waiting = "", ""

    def end_start(self) -> None:
        """Forget why the replicas do not train yet."""
        self.phases.clear()
        self.waiting = "", ""

    def _start(self, replica: str, data: dict[str, Any]) -> None:
        phase = text(data.get("phase"))
        if phase == "waiting":
            self.waiting = replica, waiting(data)
            return
        self.forget_start(replica)
        if phase in STARTING:
            self.phases[replica] = phase

    def _forget_earlier_start(self, event: Event) -> None:
        """Forget what does not hold for another start; replicas are read one after the other."""
        if event.kind != EventKind.METRICS:  # these have the user's keys
            self.restarts = max(self.restarts, _count(event.data.get("restart")))
        if event.kind in {EventKind.STARTED, EventKind.PROGRESS}:
            self.reported = event.time
        again = starts_processes(event) or event.kind == EventKind.RESTARTING
        if again and event.time >= self.reported:
            self.stopping, self.group, self.progress = False, {}, Progress()

    def _advance(self, progress: Progress) -> None:
        is_first = self.progress == Progress()
        # The bar of a script of its own has no loss; the last one is still the newest.
        loss = self.progress.loss if progress.loss is None else progress.loss
        self.progress = progress._replace(loss=loss)
        if progress.epoch:
            self.at, self.counts_epochs = progress.at, True
        if progress.loss is not None:
            self.metrics = {**self.metrics, "loss": progress.loss}
        for name in _CURVES:
            # The first steps of a start are slow: they would be a spike at each resume.
            value = None if is_first and name in _SPEED else getattr(progress, name)
            if value is not None:
                self._add_point(name, value)
        self._extend(self.times, progress.time)

    def _measure(self, logged: dict[str, str | float], time: float) -> None:
        self.logged |= logged
        self.metrics |= logged
        for name, value in logged.items():
            room = name in self.curves or len(self.curves) < _MAX_CURVES
            if room and isinstance(value, float | int) and name not in POSITION:
                self._add_point(name, value)
        self._extend(self.times, time)
        if not self.counts_epochs:
            self.at += 1

    def _add_point(self, name: str, value: float) -> None:
        if math.isfinite(value):
            self._extend(self.curves.setdefault(name, []), value)

    def _extend(self, curve: list[tuple[float, float]], value: float) -> None:
        # A group that was formed again repeats the steps since its checkpoint.
        while curve and curve[-1][0] >= self.at:
            curve.pop()
        curve.append((self.at, value))
        if len(curve) > MAX_POINTS:
            del curve[1:-1:2]


def starts_processes(event: Event) -> bool:
    """Whether an agent starts the processes of its replica, the first time or again."""
    return event.kind == EventKind.STARTING and event.data.get("phase") == "python"


def numbers_and_texts(data: dict[str, Any]) -> dict[str, str | float]:
    """The numbers and texts of an event; what was written as a whole number stays one."""
    return {
        name: int(value)
        if isinstance(value, float) and type(data.get(name)) is int and abs(value) < 2**53
        else value
        for name, value in flat(data).items()
    }


def waiting(data: dict[str, Any]) -> str:
    """`waiting for 2 of 4 processes: ranks 1, 3`; empty if none is missing."""
    missing, size, named = (data.get(key) for key in ("missing", "world_size", "ranks"))
    count = _count(missing)
    if not count:
        return ""
    numbers = map(integer, named if isinstance(named, list) else ())
    ranks = [str(rank) for rank in numbers if rank is not None]
    who = f": rank{'s' * (count > 1)} {', '.join(ranks)}" if ranks else ""
    more = ", ..." if 0 < len(ranks) < count else ""
    return f"waiting for {count} of {_count(size)} processes{who}{more}"


def _count(value: object) -> int:
    return max(integer(value) or 0, 0)

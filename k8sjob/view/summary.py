"""The summary of a job's events so far: what a screen or a report shows of it.

Events come from containers, so no value in them is trusted: what is not of the expected shape is
left out, and text is made harmless on its way in.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field, replace
from typing import Any, Final

from k8sjob.contract import NO_PROGRESS, Event, EventKind
from k8sjob.observe.diagnose import Diagnosis
from k8sjob.observe.status import ReplicaStatus
from k8sjob.sanitize import flat, integer, real, safe_text, text

MAX_POINTS = 4096
"""Points of a curve that are kept; more than any terminal has columns for."""
_MAX_CURVES: Final = 8
_OF_A_TEST: Final = re.compile(r"(?:test|val|valid|validation|eval|dev)[_/-]", re.IGNORECASE)
"""Beginning of the names of metrics whose curves are kept."""
_NUMBERS: Final = (
    "loss", "samples_per_s", "eta_s", "grad_norm", "memory_bytes", "step_s", "wait_s",
)  # fmt: skip
REPEATS: Final = "repeats"
"""Key in the data of an agent's LOG event: the error in it that a traceback has shown."""
STARTING: Final = {"importing": "importing torch", "python": "starting Python"}
"""Phases of a start that a reader waits for, the most telling first."""


@dataclass(frozen=True, slots=True)
class Progress:
    """The progress of a training run: the current epoch, from 1, and the steps done in it.

    A zero says that something is not known.
    """

    epoch: int = 0
    epochs: int = 0
    step: int = 0
    steps: int = 0
    loss: float | None = None
    samples_per_s: float | None = None
    eta_s: float | None = None
    grad_norm: float | None = None
    memory_bytes: float | None = None
    step_s: float | None = None
    wait_s: float | None = None
    slowest: int | None = None

    @property
    def at(self) -> float:
        """Epochs that are behind, with the part of the one that runs."""
        part = min(self.step / self.steps, 1.0) if self.steps else 0.0
        return max(self.epoch - 1, 0) + part

    @property
    def waited(self) -> float | None:
        """The part of the time that ranks wait for the slowest, 0 to 1; None: not known."""
        if self.step_s is None or self.wait_s is None or not 0 <= self.wait_s <= self.step_s:
            return None
        return self.wait_s / self.step_s if self.step_s else None

    @property
    def fraction(self) -> float | None:
        """The part of the whole that is done, 0 to 1; None if the whole is not known."""
        return min(self.at / self.epochs, 1.0) if self.epochs else None


@dataclass(slots=True)
class JobSummary:
    """The summary of a job by its events so far.

    Attributes:
        job: the job as its user calls it.
        state: as `k8sjob status` shows it; empty before it is known.
        created: when the job was accepted, seconds since the epoch; None if that is not known.
        started: when its replicas were first made, or made again after a resume.
        finished: when it ended.
        reported_at: when its state was last reported, by the clock of these stamps.
        replicas: by name as last reported, in the order in which they came.
        group: the process group: world_size, backend, device, ...
        restarts: how often the processes were started again, within their containers as well.
        curve: (epochs behind, loss), ascending; what a restart repeats is replaced.
        curves: by the name of a test metric the same of its values.
        metrics: the last values of what the script logged.
        checkpoint: path of the newest one.
        phases: of the replicas that have not reached the user's code, see STARTING.
        reported: when the group was formed, or its progress was written, seconds since the epoch.
        waiting: the replica that waits for other processes to join, and the line about them.
    """

    job: str = ""
    state: str = ""
    message: str = ""
    exit_code: int | None = None
    created: float | None = None
    started: float | None = None
    finished: float | None = None
    reported_at: float = 0.0
    replicas: dict[str, ReplicaStatus] = field(default_factory=dict)
    group: dict[str, str | float] = field(default_factory=dict)
    restarts: int = 0
    progress: Progress = field(default_factory=Progress)
    curve: list[tuple[float, float]] = field(default_factory=list)
    curves: dict[str, list[tuple[float, float]]] = field(default_factory=dict)
    metrics: dict[str, str | float] = field(default_factory=dict)
    checkpoint: str = ""
    findings: list[Diagnosis] = field(default_factory=list)
    stopping: bool = False
    reported: float = 0.0
    phases: dict[str, str] = field(default_factory=dict)
    waiting: tuple[str, str] = ("", "")

    def add(self, event: Event) -> None:  # noqa: C901 - one case a kind
        """Take in one event; kinds that are not known are passed over."""
        data = event.data
        self._forget_earlier_start(event)
        match event.kind:
            case EventKind.JOB:
                self.reported_at = event.time
                self._job(data)
            case EventKind.REPLICA:
                self._replica(text(event.replica), data)
            case EventKind.STARTING:
                self._starting(text(event.replica), data)
            case EventKind.WARNING if data.get("reason") == NO_PROGRESS:
                self.progress = replace(self.progress, eta_s=None)
            case EventKind.STARTED:
                self.group = flat(data)
                self._has_started()
            case EventKind.PROGRESS:
                self._advance(data)
            case EventKind.METRICS:
                self._measure(flat(data))
            case EventKind.CHECKPOINT:
                self.checkpoint = text(data.get("path"))
            case EventKind.STOPPING:
                self.stopping = True
            case EventKind.FINDING:
                self.findings.append(finding(event))
            case _:
                pass

    @property
    def shown_state(self) -> str:
        """The state for a screen: from "Starting" on, before anything is known."""
        return "Stopping" if self.stopping and self.state == "Running" else self.state or "Starting"

    @property
    def seconds(self) -> float | None:
        """The job's running time; None while it runs, or if it is not known."""
        if self.started is None or self.finished is None:
            return None
        return self.finished - self.started

    @property
    def starting(self) -> str:
        """The known reason why the job does not train yet; empty if there is none."""
        phases = self.phases.values()
        return self.waiting[1] or next((STARTING[one] for one in STARTING if one in phases), "")

    def _starting(self, replica: str, data: dict[str, Any]) -> None:
        phase = text(data.get("phase"))
        if phase == "waiting":
            self.waiting = replica, waiting(data)
            return
        self._forget_start(replica)
        if phase in STARTING:
            self.phases[replica] = phase

    def _forget_earlier_start(self, event: Event) -> None:
        """Forget what does not hold for another start; replicas are read one after the other."""
        if event.kind != EventKind.METRICS:  # these have the user's keys
            self.restarts = max(self.restarts, _count(event.data.get("restart")))
        if event.kind in {EventKind.STARTED, EventKind.PROGRESS}:
            self.reported = event.time
        starts = event.kind == EventKind.STARTING and event.data.get("phase") == "python"
        if (starts or event.kind == EventKind.RESTARTING) and event.time >= self.reported:
            self.stopping, self.group, self.progress = False, {}, Progress()

    def _forget_start(self, replica: str) -> None:
        self.phases.pop(replica, None)
        if replica == self.waiting[0]:
            self.waiting = "", ""

    def _has_started(self) -> None:
        self.phases.clear()
        self.waiting = "", ""

    def _job(self, data: dict[str, Any]) -> None:
        self.state = text(data.get("state"))
        self.message = text(data.get("message"))
        self.exit_code = integer(data.get("exit_code"))
        self.created, self.started, self.finished = (
            real(data.get(key)) for key in ("created", "started", "finished")
        )
        self.stopping = False
        if self.state not in {"Created", "Running", "Restarting"}:
            self._has_started()

    def _replica(self, name: str, data: dict[str, Any]) -> None:
        if not name:
            return
        role, _, index = name.rpartition("-")
        self.replicas[name] = ReplicaStatus(
            role=role,
            index=int(index) if index.isdecimal() else 0,
            restarts=integer(data.get("restarts")) or 0,
            exit_code=integer(data.get("exit_code")),
            waiting=data.get("waiting") is True,
            **{key: text(data.get(key)) for key in ("phase", "reason", "node", "message")},
        )
        if self.replicas[name].phase != "Running":
            self._forget_start(name)

    def _advance(self, data: dict[str, Any]) -> None:
        epoch = integer(data.get("epoch"))
        known: dict[str, Any] = {name: real(data.get(name)) for name in _NUMBERS}
        known |= {name: _count(data.get(name)) for name in ("epochs", "step", "steps")}
        now = Progress(
            epoch=0 if epoch is None else max(epoch, 0) + 1,  # the runtime counts as range() does
            slowest=integer(data.get("slowest")),
            **known,
        )
        self.progress = now
        if now.loss is not None:
            _add_point(self.curve, now.at, now.loss)

    def _measure(self, metrics: dict[str, str | float]) -> None:
        self.metrics.update(metrics)
        for name, value in metrics.items():
            room = name in self.curves or len(self.curves) < _MAX_CURVES
            if room and isinstance(value, float | int) and _OF_A_TEST.match(name):
                _add_point(self.curves.setdefault(name, []), self.progress.at, value)


def _add_point(curve: list[tuple[float, float]], at: float, value: float) -> None:
    if not math.isfinite(value):
        return
    # A group that was formed again repeats the steps since its checkpoint.
    while curve and curve[-1][0] >= at:
        curve.pop()
    curve.append((at, value))
    if len(curve) > MAX_POINTS:
        del curve[1:-1:2]


def waiting(data: dict[str, Any]) -> str:
    """`waiting for 2 of 4 processes: ranks 1, 3`; empty if none is missing."""
    missing, size, named = (data.get(key) for key in ("missing", "world_size", "ranks"))
    count = _count(missing)
    if not count:
        return ""
    known = map(integer, named if isinstance(named, list) else ())
    ranks = [str(rank) for rank in known if rank is not None]
    who = f": rank{'s' * (count > 1)} {', '.join(ranks)}" if ranks else ""
    more = ", ..." if 0 < len(ranks) < count else ""
    return f"waiting for {count} of {_count(size)} processes{who}{more}"


def finding(event: Event) -> Diagnosis:
    """The finding that an event of that kind carries."""
    cause, message, next_step = (
        safe_text(str(event.data.get(key) or "")) for key in ("cause", "message", "next_step")
    )
    return Diagnosis(cause, message, next_step, text(event.replica))


def _count(value: object) -> int:
    return max(integer(value) or 0, 0)

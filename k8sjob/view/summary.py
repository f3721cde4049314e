"""The summary of a job's events so far: what a screen or a report shows of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Final

from k8sjob.contract import LOG, Event, EventKind
from k8sjob.findings import Finding
from k8sjob.observe.status import TIMES, ReplicaStatus
from k8sjob.observe.training import Training
from k8sjob.sanitize import integer, real, safe_text, text

_MOST_STAGES: Final = 100
"""Last stages that are kept of a job whose processes start again and again."""
REPEATS: Final = "repeats"
"""Key in the data of an agent's LOG event: the error in it that a traceback has shown."""


@dataclass
class JobSummary(Training):
    """A job by its events so far: its training, its state, its replicas and what is wrong with it.

    Attributes:
        job: the job as its user calls it.
        state: as `k8sjob status` shows it; empty before it is known.
        created: when the job was accepted, seconds since the epoch; None if that is not known.
        started: when its replicas were first made, or made again after a resume.
        finished: when it ended.
        since: when it came into its state.
        reported_at: when its state was last reported, by the clock of these stamps.
        replicas: by name as last reported, in the order in which they came.
        stages: where the job was, from its creation on, and since when: see `stage`.
    """

    job: str = ""
    state: str = ""
    message: str = ""
    exit_code: int | None = None
    created: float | None = None
    started: float | None = None
    finished: float | None = None
    since: float | None = None
    reported_at: float = 0.0
    replicas: dict[str, ReplicaStatus] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)
    stages: list[tuple[str, float]] = field(default_factory=list)

    def add(self, event: Event) -> None:
        """Take in one event; kinds that are not known are passed over."""
        if event.kind == LOG:
            return
        super().add(event)
        match event.kind:
            case EventKind.JOB:
                self.reported_at = event.time
                self._job(event.data)
            case EventKind.REPLICA:
                self._replica(text(event.replica), event.data)
            case EventKind.FINDING:
                self.findings.append(finding(event))
            case _:
                pass
        self._enter_stage(event)

    @property
    def stage(self) -> str:
        """Where the job is on its way, by the last of its replicas; empty before that is known."""
        if self.state not in {"", "Created", "Running"} or self.stopping:
            return self.shown_state.lower()
        if self.group:
            return "training"
        if self.waiting[1]:
            return "joining"
        if self.phases:
            return "starting" if "python" in self.phases.values() else "importing"
        if not self.state:  # of a job that has ended, it comes after all of the output
            return "running" if self.stages else ""
        return self._stage_of_replicas()

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

    def _stage_of_replicas(self) -> str:
        replicas = self.replicas.values()
        if replicas and all(replica.phase != "Pending" for replica in replicas):
            return "running"
        # A node is chosen, and gets the image and the volumes.
        return "pulling" if any(replica.node for replica in replicas) else "queued"

    def _enter_stage(self, event: Event) -> None:
        stage, at = self.stage, event.time
        if event.kind == EventKind.JOB:
            # Of a job that is older than this summary, only its stamps say since when.
            at = self.finished or (at if self.stages else self.started) or at
            if self.created and not (self.stages and self.stages[0][1] <= self.created):
                self.stages.insert(0, ("queued", self.created))
        if not stage or (self.stages and self.stages[-1][0] == stage):
            return
        # Objects are read as they are now, and then output that was written long before.
        while self.stages and self.stages[-1][1] > at:
            self.stages.pop()
        if not self.stages or self.stages[-1][0] != stage:
            self.stages.append((stage, at))
        del self.stages[:-_MOST_STAGES]

    def _job(self, data: dict[str, Any]) -> None:
        self.state = text(data.get("state"))
        self.message = text(data.get("message"))
        self.exit_code = integer(data.get("exit_code"))
        self.created, self.started, self.finished, self.since = (
            real(data.get(key)) for key in TIMES
        )
        self.stopping = False
        if self.state not in {"Created", "Running", "Restarting"}:
            self.end_start()

    def _replica(self, name: str, data: dict[str, Any]) -> None:
        if not name:
            return
        self.replicas[name] = ReplicaStatus(
            name=name,
            restarts=integer(data.get("restarts")) or 0,
            exit_code=integer(data.get("exit_code")),
            waiting=data.get("waiting") is True,
            **{key: text(data.get(key)) for key in ("phase", "reason", "node", "message")},
        )
        if self.replicas[name].phase != "Running":
            self.forget_start(name)


def finding(event: Event) -> Finding:
    """The finding that an event of that kind carries."""
    cause, message, next_step = (
        safe_text(str(event.data.get(key) or "")) for key in ("cause", "message", "next_step")
    )
    replica = text(event.replica)
    return Finding(cause, message, next_step, replicas=(replica,) if replica else ())

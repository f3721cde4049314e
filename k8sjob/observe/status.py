"""The status of a job, from its objects: a PyTorchJob and its Pods. Pure.

The operator removes a condition that changed and appends it again, so the last condition of the
list is not always the current one (after a resume it is Suspended with status False). The state
follows from conditions whose status is "True", whatever their order.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Final

from k8sjob import strategies
from k8sjob.adopt.equivalence import config_of
from k8sjob.backends.api import JobRef
from k8sjob.contract import CONTAINER_NAME, Reason, Role, decode_object
from k8sjob.kube.labels import QUEUE, REPLICA_INDEX, REPLICA_TYPE
from k8sjob.kube.objects import moment, true_conditions

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from datetime import datetime

    from k8sjob.backends.api import Json, Snapshot

__all__ = [
    "STOPPED_REASON",
    "JobState",
    "JobStatus",
    "ReplicaStatus",
    "deletion",
    "job_status",
    "last_end",
    "processes",
    "replica_names",
    "speaker",
]

_NUMBER: Final = re.compile("[0-9]{1,4}")
STOPPED_REASON: Final = "PyTorchJobStopped"
"""Reason of the Failed condition of a job that its user stopped (this machine only)."""


class JobState(StrEnum):
    """The state of a job; see docs/reference/states.md."""

    CREATED = "Created"
    """Accepted; the Master does not run yet."""
    RUNNING = "Running"
    RESTARTING = "Restarting"
    """A failed replica is being recreated."""
    SUSPENDED = "Suspended"
    """Its replicas are stopped until `resume`."""
    QUEUED = "Queued"
    """Kueue keeps it suspended until its queue has room."""
    DELETING = "Deleting"
    """Its deletion was requested, and its pods or a finalizer still keep it."""
    SUCCEEDED = "Succeeded"
    FAILED = "Failed"
    STOPPED = "Stopped"
    """Ended on request (Ctrl-C), or because the process that had started it went away."""
    DELETED = "Deleted"
    """It no longer exists."""

    @property
    def finished(self) -> bool:
        """Whether nothing will change any more."""
        return self in _FINISHED

    @property
    def exit_code(self) -> int:
        """What a command that waited for the job exits with: 0, 100, 101 or 103."""
        return _EXIT_CODES.get(self, 101)


_FINISHED: Final = frozenset(
    {JobState.SUCCEEDED, JobState.FAILED, JobState.STOPPED, JobState.DELETED}
)
_EXIT_CODES: Final = {
    JobState.SUCCEEDED: 0,
    JobState.FAILED: 100,
    JobState.STOPPED: 103,
    JobState.SUSPENDED: 103,
    JobState.DELETING: 103,
    JobState.DELETED: 103,
}
_PRECEDENCE: Final = (
    JobState.FAILED,
    JobState.SUCCEEDED,
    JobState.SUSPENDED,
    JobState.RESTARTING,
    JobState.RUNNING,
    JobState.CREATED,
)


@dataclass(frozen=True, slots=True)
class ReplicaStatus:
    """One replica, as its Pod shows it.

    Attributes:
        role: Role of the replica.
        index: its index among the replicas of that role.
        phase: the Pod's phase; "Terminating" once its deletion was requested; "Stopped" where it
            ended because its job was stopped (this machine only).
        node: the machine it runs on; empty before it was scheduled.
        restarts: how often its container was started again, in this Pod or in a recreated one, as
            far back as the Events tell; while init containers run, how often they were.
        reason: why it waits or ended ("Unschedulable", "Init:0/1", "CrashLoopBackOff",
            "OOMKilled", "Error"); may be empty.
        exit_code: of the container, the last attempt's while a newer one runs; None before.
        message: its termination message, or the back end's about it.
        waiting: whether its training container does not run and has not ended; `reason` says why.
    """

    role: Role
    index: int
    phase: str
    node: str = ""
    restarts: int = 0
    reason: str = ""
    exit_code: int | None = None
    message: str = ""
    waiting: bool = False

    @property
    def name(self) -> str:
        """Role and index: "master-0", "worker-2"."""
        return f"{self.role.lower()}-{self.index}"

    @property
    def situation(self) -> str:
        """Its phase, or what it waits for where the phase hides that.

        A Pod whose container crashes again and again has the phase Running all the time.
        """
        hidden = self.waiting and self.reason and self.phase != "Terminating"
        return self.reason if hidden else self.phase


@dataclass(frozen=True, slots=True)
class JobStatus:
    """A job at one moment.

    Attributes:
        ref: the job.
        state: its state.
        reason: the reason of the condition that decided the state.
        message: its message; of a job that is being deleted what keeps it.
        exit_code: what a command that waited for the job exits with, see JobState.
        created: when it was accepted (UTC).
        started: when its replicas were first created, or created again after a resume (UTC).
        finished: when it ended (UTC).
        replicas: those that have a Pod, Master first.
        counts: how many replicas are in which situation; where no Pods were fetched, in which
            phase, as the operator counts them.
    """

    ref: JobRef
    state: JobState
    reason: str = ""
    message: str = ""
    exit_code: int = 101
    created: datetime | None = None
    started: datetime | None = None
    finished: datetime | None = None
    replicas: tuple[ReplicaStatus, ...] = ()
    counts: Mapping[str, int] = field(default_factory=dict)


def job_status(snapshot: Snapshot) -> JobStatus:
    """The status that the job's objects show."""
    job = snapshot.job
    meta, status = job.get("metadata") or {}, job.get("status") or {}
    state, condition = _state(status)
    if state is JobState.SUSPENDED and QUEUE in (meta.get("labels") or {}):
        state = JobState.QUEUED
    if meta.get("deletionTimestamp") and not state.finished:  # how it ended is worth more
        state, condition = JobState.DELETING, {"message": deletion(job)}
    made = _creations(snapshot.events)
    replicas = tuple(_replica(pod, made) for pod in snapshot.pods)
    return JobStatus(
        ref=JobRef.of(job),
        state=state,
        reason=condition.get("reason", ""),
        message=condition.get("message", ""),
        exit_code=state.exit_code,
        created=moment(meta.get("creationTimestamp")),
        started=moment(status.get("startTime")),
        # The operator leaves completionTime out where the ExitCode policy gives a replica up.
        finished=moment(status.get("completionTime") or condition.get("lastTransitionTime"))
        if state.finished
        else None,
        replicas=replicas,
        counts=Counter(replica.situation for replica in replicas) or _counted(job, state),
    )


def deletion(job: Json) -> str:
    """That a job is being deleted, and for which finalizers it stays until then."""
    names = ", ".join((job.get("metadata") or {}).get("finalizers") or ())
    return "the job is being deleted" + (f"; it waits for its finalizers: {names}" if names else "")


def replica_names(job: Json) -> tuple[str, ...]:
    """The names of all replicas that a PyTorchJob asks for: "master-0", "worker-0", ..."""
    specs = job.get("spec", {}).get("pytorchReplicaSpecs", {})
    return tuple(
        f"{role.lower()}-{index}"
        for role in Role
        if role in specs
        for index in range(specs[role].get("replicas", 1))
    )


def processes(job: Json) -> tuple[int, ...]:
    """How many processes each replica has, in the order of replica_names.

    `auto`, `gpu` and `cpu` count as one, as for the operator; a Master that only serves its Workers
    (see strategies.serving) has a number of its own.
    """
    each = str(job.get("spec", {}).get("nprocPerNode", ""))
    counts = [int(each) if _NUMBER.fullmatch(each) else 1] * len(replica_names(job))
    if serving := _serving(job):
        counts[0] = serving
    return tuple(counts)


def speaker(job: Json) -> str:
    """The name of the replica whose first process trains, and tells of it."""
    return replica_names(job)[1 if _serving(job) else 0]


def _serving(job: Json) -> int:
    if len(replica_names(job)) < 2:
        return 0
    try:
        config = decode_object(config_of(job) or "") or {}
        return strategies.serving(config["strategy"], config.get("options") or {})
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError):
        return 0  # not k8sjob's


def last_end(pod: Json) -> Json:
    """The newest `terminated` state of the Pod's training container; empty if it never ended."""
    container = _container((pod.get("status") or {}).get("containerStatuses"))
    now, before = container.get("state") or {}, container.get("lastState") or {}
    ended: Json = now.get("terminated") or before.get("terminated") or {}
    return ended


def _state(status: Json) -> tuple[JobState, Json]:
    true = true_conditions(status)
    for state in _PRECEDENCE:
        if state in true:
            stopped = state is JobState.FAILED and true[state].get("reason") == STOPPED_REASON
            return (JobState.STOPPED if stopped else state), true[state]
    return JobState.CREATED, {}


def _counted(job: Json, state: JobState) -> dict[str, int]:
    """The operator's own counts: of Pods that run or have ended; the others are Pending."""
    found: Counter[str] = Counter()
    for counts in ((job.get("status") or {}).get("replicaStatuses") or {}).values():
        for key, phase in (("active", "Running"), ("succeeded", "Succeeded"), ("failed", "Failed")):
            found[phase] += counts.get(key, 0)
    policy = ((job.get("spec") or {}).get("runPolicy") or {}).get("cleanPodPolicy")
    if state.finished and policy in {"Running", "All"}:
        del found["Running"]  # the operator has deleted them, and leaves its count as it was
    if state in (JobState.CREATED, JobState.RUNNING, JobState.RESTARTING):
        found["Pending"] = max(len(replica_names(job)) - found.total(), 0)
    return dict(+found)


def _creations(events: Sequence[Json]) -> Counter[str]:
    """How often each Pod was made: under ExitCode a container starts again in a new one."""
    found: Counter[str] = Counter()
    for event in events:
        if event.get("reason") == "SuccessfulCreatePod":
            name = event.get("message", "").removeprefix("Created pod: ")
            found[name] += (event.get("series") or {}).get("count") or event.get("count") or 1
    return found


def _replica(pod: Json, made: Mapping[str, int]) -> ReplicaStatus:
    meta, status = pod.get("metadata") or {}, pod.get("status") or {}
    labels = meta.get("labels") or {}
    role = labels.get(REPLICA_TYPE, "")
    container = _container(status.get("containerStatuses"))
    ended = last_end(pod)
    waiting, reason, message, restarts = _wait(pod)
    phase = "Terminating" if meta.get("deletionTimestamp") else status.get("phase", "Pending")
    stopped = phase == "Failed" and ended.get("reason") == "Stopped"
    return ReplicaStatus(
        role=Role.MASTER if role == "master" else Role.WORKER,
        index=int(labels.get(REPLICA_INDEX, 0)),
        phase="Stopped" if stopped else phase,
        node=(pod.get("spec") or {}).get("nodeName", ""),
        restarts=(restarts or int(container.get("restartCount", 0)))
        + max(made.get(meta.get("name", ""), 1) - 1, 0),
        reason=reason or ended.get("reason") or status.get("reason", ""),
        exit_code=ended.get("exitCode"),
        message=_message(ended.get("message") or message or status.get("message", "")),
        waiting=waiting,
    )


def _wait(pod: Json) -> tuple[bool, str, str, int]:
    """Whether the Pod waits, for what, the message, and the init containers' restarts."""
    status = pod.get("status") or {}
    for condition in status.get("conditions") or []:
        if condition.get("type") == "PodScheduled" and condition.get("status") == "False":
            return True, condition.get("reason", ""), condition.get("message", ""), 0
    inits: Sequence[Json] = status.get("initContainerStatuses") or []
    for done, init in enumerate(inits):
        state = init.get("state") or {}
        ended = state.get("terminated") or {}
        if ended.get("exitCode") == 0 or status.get("phase") != "Pending":
            continue
        waiting = state.get("waiting") or {}
        why = waiting.get("reason", "")
        why = why if why and why != "PodInitializing" else ended.get("reason", "")
        return (
            True,
            f"Init:{why or f'{done}/{len(inits)}'}",
            waiting.get("message") or ended.get("message", ""),
            int(init.get("restartCount", 0)),
        )
    waiting = (_container(status.get("containerStatuses")).get("state") or {}).get("waiting")
    if not waiting:
        return False, "", "", 0
    return True, waiting.get("reason", ""), waiting.get("message", ""), 0


def _container(statuses: Sequence[Json] | None) -> Json:
    for container in statuses or ():
        if container.get("name") == CONTAINER_NAME:
            return dict(container)
    return {}


def _message(message: str) -> str:
    """A termination message in one line: that of the runtime's Reason, or the last one there is."""
    reason = Reason.decode(message) if message else None
    lines = (reason.message if reason else message).strip().splitlines()
    return (lines[0] if reason else lines[-1]) if lines else ""

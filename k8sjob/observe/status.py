"""The status of a job, from its objects: the job itself and its Pods. Pure."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Final, NamedTuple

from k8sjob.backends.api import JobRef
from k8sjob.contract import CONTAINER_NAMES, Reason
from k8sjob.html_card import HasCard
from k8sjob.kube.gangs import is_queued, queue_of
from k8sjob.kube.objects import QUEUE, Object, Pod, event_time, moment
from k8sjob.targets.api import JobState
from k8sjob.targets.jobs import replica_names, settings_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from k8sjob.backends.api import Snapshot
    from k8sjob.kube.objects import Json
    from k8sjob.targets.api import Job

_CREATED_BEFORE: Final = timedelta(seconds=2)
"""Times are whole seconds, and Pods may be created just before the condition changes."""
_NUMBER: Final = "[0-9]{1,4}"
TIMES: Final = ("created", "started", "finished", "since")
"""The times of a JobStatus."""


class ReplicaStatus(NamedTuple):
    """One replica, as its Pod shows it.

    Attributes:
        name: role and index, "worker-2"; see k8sjob.targets.api.RoleReplicas.
        phase: the Pod's phase; "Terminating" once its deletion was requested; "Stopped" where it
            ended because its job was stopped (this machine only).
        node: the machine it runs on; empty before it was scheduled.
        restarts: how often its container was started again, in this Pod or in a recreated one, as
            far back as the Events tell, and since a resume where these are Events of their own;
            while init containers run, how often they were.
        reason: why it waits or ended ("Unschedulable", "Init:0/1", "CrashLoopBackOff",
            "OOMKilled", "Error"); may be empty.
        exit_code: of the container, the last attempt's while a newer one runs; None before.
        message: its termination message, or the back end's about it.
        waiting: whether its training container does not run although its Pod has not ended;
            `reason` says why.
    """

    name: str
    phase: str
    node: str = ""
    restarts: int = 0
    reason: str = ""
    exit_code: int | None = None
    message: str = ""
    waiting: bool = False

    @property
    def situation(self) -> str:
        """Its phase, or the reason why it waits.

        A Pod whose container crashes again and again has the phase Running all the time.
        """
        waits = self.waiting and self.reason and self.phase != "Terminating"
        return self.reason if waits else self.phase


@dataclass(frozen=True, slots=True)
class JobStatus(HasCard):
    """A job at one moment.

    Attributes:
        reason: the reason of the condition that decided the state.
        message: its message; of a job that is being deleted what keeps it.
        exit_code: what a command that waited for the job exits with, see JobState.
        created: when it was accepted (UTC).
        started: when its replicas were first created, or created again after a resume (UTC).
        finished: when it ended (UTC).
        since: when it came into its state (UTC); None: not known.
        replicas: those that have a Pod, Master first.
        counts: how many replicas are in which situation; where no Pods were fetched, in which
            phase, as the controller counts them.
    """

    ref: JobRef
    state: JobState
    reason: str = ""
    message: str = ""
    exit_code: int = 101
    created: datetime | None = None
    started: datetime | None = None
    finished: datetime | None = None
    since: datetime | None = None
    replicas: tuple[ReplicaStatus, ...] = ()
    counts: Mapping[str, int] = field(default_factory=dict)

    @property
    def times(self) -> dict[str, datetime | None]:
        """`created` to `since` by name."""
        return {name: getattr(self, name) for name in TIMES}


def job_state(snapshot: Snapshot) -> JobState:
    """The state alone, which of a list of many jobs takes a fraction of the time."""
    return _state(snapshot)[0]


def _state(snapshot: Snapshot) -> tuple[JobState, Json]:
    """The state, and the condition with its reason and message."""
    job = snapshot.job
    state, condition = job.state()
    if state is JobState.SUSPENDED and QUEUE in job.labels:
        state = JobState.QUEUED
    if group := next(filter(is_queued, snapshot.groups), None):
        text = f"its PodGroup waits in the queue {queue_of(group)!r}"
        state, condition = JobState.QUEUED, {"reason": "PodGroupPending", "message": text}
    if job.deleting and not state.finished:  # how it ended is worth more
        state, condition = JobState.DELETING, {"message": deletion(job)}
    # A very short training is over before its controller has counted a ready Pod.
    if state is JobState.CREATED and any(
        Pod(pod).terminated.get("exitCode") == 0 for pod in snapshot.pods
    ):
        state = JobState.RUNNING
    return state, condition


def job_status(snapshot: Snapshot) -> JobStatus:
    """The status that the job's objects show."""
    job = snapshot.job
    state, condition = _state(snapshot)
    started, finished = job.times()
    # Under restart policy ExitCode a container starts again in a new Pod; a resume is no restart.
    creations: Counter[str] = Counter()  # of Pods, by the name of the replica
    suspended = job.condition("Suspended")
    resumed = suspended.since if suspended.false else None
    for replica, event in job.created_pods(snapshot.events):
        if resumed and event_time(event) < resumed - _CREATED_BEFORE:
            continue
        # Kubernetes counts repeated Events in `series` (events.k8s.io/v1) or in `count`.
        creations[replica] += Object(event).part("series").get("count") or event.get("count") or 1
    replicas = tuple(_replica(job.replica_of(pod), Pod(pod), creations) for pod in snapshot.pods)
    since = moment(condition.get("lastTransitionTime"))
    return JobStatus(
        ref=JobRef.of(job),
        state=state,
        reason=condition.get("reason", ""),
        message=condition.get("message", ""),
        exit_code=state.exit_code,
        created=moment(job.created),
        started=moment(started),
        finished=(moment(finished) or since) if state.finished else None,
        since=since,
        replicas=replicas,
        counts=Counter(replica.situation for replica in replicas) or job.counts(state),
    )


def training_fields(job: Job) -> set[str]:
    """What Events about a Pod, or about its training container, name in it."""
    names = {*CONTAINER_NAMES, *(role.main.get("name", "") for role in job.replicas)}
    return {"", *(f"spec.containers{{{name}}}" for name in names)}


def deletion(job: Job) -> str:
    """That a job is being deleted, and for which finalizers it stays until then."""
    names = ", ".join(job.metadata.get("finalizers") or ())
    return "the job is being deleted" + (
        f"; it is waiting for its finalizers: {names}" if names else ""
    )


def processes(job: Job) -> tuple[int, int]:
    """How many processes the first replica has, and each other one.

    `auto`, `gpu` and `cpu` count as one, as for the training operator; a Master that only serves
    its Workers (see strategies.serving) has a number of its own.
    """
    asked = job.nproc_per_node
    each = int(asked) if re.fullmatch(_NUMBER, asked) else 1
    return _serving(job) or each, each


def reporting_replica(job: Job) -> str:
    """The name of the replica whose first process trains and reports; "" if there is none."""
    names = replica_names(job)
    return "".join(names[1:2] if _serving(job) else names[:1])


def _serving(job: Job) -> int:
    if len(replica_names(job)) < 2:
        return 0
    from k8sjob import strategies  # noqa: PLC0415 - a list of jobs that do not run needs none

    try:
        config = settings_of(job.document)
        return strategies.serving(config["strategy"], config.get("options") or {})
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError):
        return 0  # not k8sjob's


def _replica(name: str, pod: Pod, creations: Mapping[str, int]) -> ReplicaStatus:
    status = pod.status
    ended = pod.terminated or pod.terminated_before
    waiting, reason, message, restarts = _wait(pod)
    phase = "Terminating" if pod.deleting else pod.phase
    stopped = phase == "Failed" and ended.get("reason") == "Stopped"
    return ReplicaStatus(
        name=name,
        phase="Stopped" if stopped else phase,
        node=pod.node,
        restarts=(restarts or pod.restarts) + max(creations.get(name, 1) - 1, 0),
        reason=reason or ended.get("reason") or status.get("reason", ""),
        exit_code=ended.get("exitCode"),
        message=_message(ended.get("message") or message or status.get("message", "")),
        waiting=waiting,
    )


def _wait(pod: Pod) -> tuple[bool, str, str, int]:
    """Whether the Pod waits, for what, the message, and the init containers' restarts."""
    status = pod.status
    placed = pod.condition("PodScheduled")
    # What keeps a Pod from starting, in the order of its life: a node, then each init container,
    # then its own container.
    if pod.live and placed.false:
        return True, placed.reason, placed.message, 0
    inits: Sequence[Json] = status.get("initContainerStatuses") or []
    for done, init in enumerate(inits):
        ended = Object(init).part("state", "terminated")
        failed = pod.phase == "Failed" and bool(ended) and not pod.terminated
        if ended.get("exitCode") == 0 or not (failed or pod.phase == "Pending"):
            continue
        waiting = Object(init).part("state", "waiting")
        why = waiting.get("reason", "")
        # "PodInitializing" says only that it is its turn.
        why = why if why and why != "PodInitializing" else ended.get("reason", "")
        return (
            pod.live,
            f"Init:{why or f'{done}/{len(inits)}'}",
            waiting.get("message") or ended.get("message", ""),
            int(init.get("restartCount", 0)),
        )
    # A container that ended in a Pod that lives will be started again.
    waiting = pod.container.part("state", "waiting")
    if not pod.live or not (waiting or pod.terminated):
        return False, "", "", 0
    return True, waiting.get("reason", ""), waiting.get("message", ""), 0


def _message(message: str) -> str:
    """A termination message in one line: the message of the runtime's Reason, or the last line."""
    reason = Reason.decode(message) if message else None
    lines = (reason.message if reason else message).strip().splitlines()
    return (lines[0] if reason else lines[-1]) if lines else ""

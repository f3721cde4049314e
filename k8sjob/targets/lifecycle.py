"""A PyTorchJob and its replicas as a state machine; the operator's rules as a table.

Written after training-operator v1.9.4 (pkg/controller.v1/common/job.go and pod.go,
pkg/controller.v1/pytorch/pytorchjob_controller.go, pkg/util/status.go), its peculiarities included:
a condition that changes is removed and appended, so the last one is not always the true one; a
Failed job never changes its conditions again; a job that fails by the ExitCode policy has no
completionTime. docs/explanation/local-backend.md says what differs. Pure: whoever runs the
containers reports their starts and ends, and finds in each replica what is to be done.
"""

from __future__ import annotations

import copy
from collections import Counter
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any, Final

from k8sjob.contract import CONTAINER_NAME, ExitCode, Reason, Role, counted
from k8sjob.kube.objects import Object, moment, new_event, stamp, true_conditions
from k8sjob.targets.api import JobState, LocalReason
from k8sjob.targets.local_replica import Replica, ReplicaState
from k8sjob.targets.pytorchjob.operator import KIND
from k8sjob.targets.pytorchjob.target import PYTORCHJOB

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from k8sjob.kube.objects import Json

_LIVE: Final = frozenset({ReplicaState.PENDING, ReplicaState.RUNNING, ReplicaState.WAITING})
CLEAN_UP: Final = {
    "None": frozenset(),
    "Running": _LIVE,
    "All": {*ReplicaState} - {ReplicaState.GONE},
}
"""cleanPodPolicy: the states of the replicas whose Pods are deleted at the job's end."""
_STARTED: Final = frozenset({ReplicaState.RUNNING, ReplicaState.WAITING})
_CRASHED: Final = frozenset({ReplicaState.FAILED, ReplicaState.REPLACED})
_EXCLUSIVE_CONDITIONS: Final = {"Running": {"Restarting"}, "Restarting": {"Running"}}
_PERMANENT: Final = {ExitCode.USER_ERROR, ExitCode.CONFIG, ExitCode.RESTARTS_SPENT}
_MAX_EVENTS: Final = 500


class Lifecycle:
    """A job and its replicas.

    Args:
        job: the PyTorchJob, which is changed in place.
        events: what was recorded about it before.
        max_restarts: how often each replica is started again after a failure.
        node: the name of the machine.

    Attributes:
        state: of the job.
        replicas: of the job, Master first, and by index.
        deciding: the replicas whose states decide about the job's.
        stop_message: why the job is to be stopped; empty: it is not.
    """

    def __init__(
        self, job: Json, events: Sequence[Json] = (), *, max_restarts: int = 0, node: str = ""
    ) -> None:
        self.job, self.events, self.state = job, list(events), JobState.CREATED
        self.max_restarts, self._node, self.stop_message = max_restarts, node, ""
        self.replicas = tuple(
            Replica(group, index)
            for group in PYTORCHJOB.job(job).replicas
            for index in range(group.count)
        )
        self.name, namespace = Object(job).name, Object(job).namespace
        self.masters = tuple(
            replica for replica in self.replicas if replica.group.role == Role.MASTER
        )
        self.deciding = self.masters or self.replicas
        # The operator's messages name the namespace where there is no Master.
        self.title = f"{KIND} {'' if self.masters else f'{namespace}/'}{self.name}"

    @property
    def status(self) -> Json:
        """The job's status, to be changed in place."""
        status: Json = self.job.setdefault("status", {})
        return status

    @property
    def policy(self) -> Json:
        """The job's runPolicy, to be changed in place."""
        policy: Json = self.job["spec"].setdefault("runPolicy", {})
        return policy

    @property
    def is_busy(self) -> bool:
        """Whether any container runs."""
        return any(replica.state is ReplicaState.RUNNING for replica in self.replicas)

    def stop(self, message: str) -> None:
        """End the job, once its containers have ended; its Pods stay."""
        self.stop_message = self.stop_message or message or "on request"
        for replica in self.replicas:
            replica.halt()

    def delete(self, now: datetime) -> None:
        """Delete the job and its Pods."""
        Object(self.job).metadata.setdefault("deletionTimestamp", stamp(now))
        for replica in self.replicas:
            replica.delete(now)

    def ended(self, replica: Replica, end: Json, now: datetime) -> None:
        """A container ended; `end` is the `terminated` state of its status."""
        replica.stopped |= self.state.finished  # after the job's end nothing is started again
        replica.finish(end)
        if replica.stopped:
            return
        pod, code = self.pod_name(replica), end["exitCode"]
        if replica.state is ReplicaState.WAITING and code:
            # The Pod lives on, and forgets this end at the second start from now.
            message = f"Error pod {pod} container {CONTAINER_NAME} exitCode: {code} terminated"
            message = f"{message} message: {end.get('message', '')}"
            self.record("Warning", end.get("reason", ""), message, now)
        if replica.state is not ReplicaState.REPLACED:  # else with its new Pod: `why` counts them
            self._record_exit(replica, now)

    def advance(self, now: datetime) -> None:
        """Take the job to the state that follows from its replicas, its policy and the time."""
        if not self.status.get("conditions"):
            self._condition("Created", f"{KIND} {self.name} is created.", now)
        if self.state.finished or Object(self.job).deleting:
            return
        suspended = bool(self.policy.get("suspend"))
        if self.stop_message:
            self._end_on_request(now)
        elif suspended and self.state is not JobState.SUSPENDED:
            self._suspend(now)
        elif not suspended:
            if self.state is JobState.SUSPENDED:
                self._resume(now)
            self._apply_rules(now)

    def clean_up(self, now: datetime) -> None:
        """Delete the Pods of a job that has ended, as its cleanPodPolicy says."""
        for replica in self.replicas:
            if replica.state in CLEAN_UP[self.policy.get("cleanPodPolicy") or "None"]:
                self._delete_pod(replica, now)

    def fail(self, reason: LocalReason, message: str, now: datetime) -> None:
        """End the job for a reason that no operator has."""
        self.state = JobState.STOPPED if reason is LocalReason.STOPPED else JobState.FAILED
        self.job["status"] = fail(self.status, reason, message, now)

    # --- transitions ----------------------------------------------------------------------------

    def _apply_rules(self, now: datetime) -> None:
        for state, event, rule in RULES:
            if message := rule(self, now):
                self._enter(state, event, message, now)
                break
        if not self.state.finished:
            self._create_pods(now)
            self.status.setdefault("startTime", stamp(now))

    def _enter(self, state: JobState, event: str, message: str, now: datetime) -> None:
        if state is self.state:
            return
        self.state = state
        self._condition(state.value, message, now)
        if event:
            self.record(event, f"{KIND}{state.value}", message, now)
        if not state.finished:
            return
        if (state, event) != (JobState.FAILED, "Warning"):  # the operator forgets the time there
            self.status["completionTime"] = stamp(now)
        if state is JobState.FAILED:
            self.clean_up(now)
        else:
            self.status["replicaStatuses"] = self._counts()
        for replica in self.replicas:
            if replica.state is not ReplicaState.RUNNING:
                replica.halt()

    def _end_on_request(self, now: datetime) -> None:
        if self.is_busy:
            return
        if message := _succeeded(self, now):
            self._enter(JobState.SUCCEEDED, "Normal", message, now)
        else:
            message = f"{KIND} {self.name} was stopped: {self.stop_message}."
            self.fail(LocalReason.STOPPED, message, now)

    def _suspend(self, now: datetime) -> None:
        for replica in self.replicas:
            if replica.state is not ReplicaState.GONE:
                self._delete_pod(replica, now)
        message = f"{KIND} {self.name} is suspended."
        if "Running" in true_conditions(self.status):
            self._condition("Running", message, now, reason="Suspended", value=False)
        self._enter(JobState.SUSPENDED, "Normal", message, now)

    def _resume(self, now: datetime) -> None:
        message = f"{KIND} {self.name} is resumed."
        self._condition("Suspended", message, now, reason="Resumed", value=False)
        self.record("Normal", f"{KIND}Resumed", message, now)
        self.state, self.status["startTime"] = JobState.CREATED, stamp(now)

    def _create_pods(self, now: datetime) -> None:
        for replica in self.replicas:
            if replica.state is ReplicaState.REPLACED:
                self._record_exit(replica, now)
                self._delete_pod(replica, now)
            if replica.state is ReplicaState.GONE:
                replica.create(now)
                message = f"Created pod: {self.pod_name(replica)}"
                self.record("Normal", "SuccessfulCreatePod", message, now)

    def _delete_pod(self, replica: Replica, now: datetime) -> None:
        if not replica.deleted:
            message = f"Deleted pod: {self.pod_name(replica)}"
            self.record("Normal", "SuccessfulDeletePod", message, now)
        if self.state is JobState.FAILED:
            replica.halt()  # the operator deletes its end with it; here it is shown
        else:
            replica.delete(now)

    # --- what is written ------------------------------------------------------------------------

    def record(
        self, kind: str, reason: str, message: str, now: datetime, replica: Replica | None = None
    ) -> None:
        """Record an Event of the job, or of a replica's Pod: "Normal" or "Warning"."""
        about = replica.pod_reference(Object(self.job)) if replica else self.job
        event = new_event(about, kind, reason, message, now)
        self.events = [*self.events[-_MAX_EVENTS:], event]

    def _record_exit(self, replica: Replica, now: datetime) -> None:
        pod = f"{Object(self.job).namespace}.{self.pod_name(replica)}"
        message = f"Pod: {pod} exited with code {replica.end['exitCode']}"
        self.record("Normal", "ExitedWithCode", message, now)

    def _condition(
        self, kind: str, message: str, now: datetime, *, reason: str = "", value: bool = True
    ) -> None:
        set_condition(self.status, kind, f"{KIND}{reason or kind}", message, value=value, now=now)

    def _counts(self) -> dict[str, dict[str, int]]:
        """How many replicas of each role have failed; the others count as succeeded."""
        counts: dict[str, Counter[str]] = {}
        for replica in self.replicas:
            outcome = "failed" if replica.state in _CRASHED else "succeeded"
            counts.setdefault(replica.group.role, Counter())[outcome] += 1
        return {role: {**of_role} for role, of_role in counts.items()}

    def roles_of(self, state: ReplicaState, policy: str) -> Counter[str]:
        """How many replicas of each role are in a state and have a restart policy."""
        return Counter(
            replica.group.role
            for replica in self.replicas
            if (replica.state, replica.group.restart_policy) == (state, policy)
        )

    def pod_name(self, replica: Replica) -> str:
        """The name of a replica's Pod."""
        return f"{self.name}-{replica.name}"

    def pods(self) -> list[Json]:
        """The Pods as an apiserver would return them, Master first and by index."""
        job = Object(self.job)
        with_pod = (replica for replica in self.replicas if replica.state is not ReplicaState.GONE)
        return [replica.pod(job, self._node) for replica in with_pod]


# --- the rules of the job: each gives the message of the condition, or nothing --------------------


def _past_backoff_limit(job: Lifecycle, _now: datetime) -> str:
    limit = job.policy.get("backoffLimit")
    if limit is None:
        return ""
    restarts = sum(
        max(replica.starts - 1, 0)
        for replica in job.replicas
        if replica.group.restart_policy != "Never" and replica.state in _STARTED
    )
    # A limit of 0 also forbids replacing a failed Pod, whatever the restart policy.
    failed = limit == 0 and any(replica.state in _CRASHED for replica in job.replicas)
    if not failed and restarts < max(limit, 1):
        return ""
    return f"Job {job.name} has failed because it has reached the specified backoff limit"


def _past_deadline(job: Lifecycle, now: datetime) -> str:
    deadline = job.policy.get("activeDeadlineSeconds")
    start = moment(job.status.get("startTime"))
    if deadline is None or start is None or now - start < timedelta(seconds=deadline):
        return ""
    return f"Job {job.name} has failed because it was active longer than specified deadline"


def _failed_under_exit_code(job: Lifecycle, _now: datetime) -> str:
    for role in job.roles_of(ReplicaState.FAILED, "ExitCode"):
        return f'job "{job.name}" is failing because "{role}" replica(s) failed.'
    return ""


def _failed_under_never(job: Lifecycle, now: datetime) -> str:
    if job.masters and _succeeded(job, now):  # whatever the Workers did
        return ""
    for role, count in job.roles_of(ReplicaState.FAILED, "Never").items():
        return f"{KIND} {job.name} is failed because {count} {role} replica(s) failed."
    return ""


def _succeeded(job: Lifecycle, _now: datetime) -> str:
    successes = [replica.state is ReplicaState.SUCCEEDED for replica in job.deciding]
    elastic = not job.masters and Object(job.job).spec.get("elasticPolicy") is not None
    if not (any(successes) if elastic else all(successes)):
        return ""
    return f"{job.title}{' is' if job.masters else ''} successfully completed."


def _failed_for_good(job: Lifecycle, _now: datetime) -> str:
    """By the agent's own message: another start would end in the same way, and a user waits."""
    for replica in job.replicas:
        reason = Reason.decode(replica.end.get("message", ""))
        if reason and {replica.end["exitCode"], reason.exit_code} & _PERMANENT:
            return (
                f"Job {job.name} has failed because {replica.name} ended with exit code"
                f" {reason.exit_code}"
            )
    return ""


def _restarts_exhausted(job: Lifecycle, _now: datetime) -> str:
    """Of one replica; the operator's backoffLimit adds up those of all."""
    for replica in job.replicas:
        if replica.failures > job.max_restarts:
            return (
                f"Job {job.name} has failed because {replica.name} failed"
                f" {counted(replica.failures, 'time')} and max_restarts is {job.max_restarts}"
            )
    return ""


def _restarting(job: Lifecycle, _now: datetime) -> str:
    for role in job.roles_of(ReplicaState.REPLACED, "ExitCode"):
        return f"job {job.name} is restarting because {role} replica(s) failed."
    return ""


def _running(job: Lifecycle, _now: datetime) -> str:
    active = any(replica.state in _STARTED and not replica.deleted for replica in job.deciding)
    return f"{job.title} is running." if active else ""


RULES: Final[tuple[tuple[JobState, str, Callable[[Lifecycle, datetime], str]], ...]] = (
    (JobState.FAILED, "Normal", _past_backoff_limit),
    (JobState.FAILED, "Normal", _past_deadline),
    (JobState.FAILED, "Warning", _failed_under_exit_code),
    (JobState.FAILED, "Normal", _failed_under_never),
    (JobState.SUCCEEDED, "Normal", _succeeded),
    (JobState.FAILED, "Normal", _failed_for_good),
    (JobState.FAILED, "Normal", _restarts_exhausted),
    (JobState.RESTARTING, "Warning", _restarting),
    (JobState.RUNNING, "", _running),
)
"""The next state of a job that is neither suspended nor at its end, and the type of its Event.

The first rule decides that has a message. Without any the job stays in its state.
"""


# --- the status of a job, the operator's way ------------------------------------------------------


def fail(status: Json, reason: str, message: str, now: datetime) -> Json:
    """A copy of a job's status with the Failed condition and the time of its end."""
    changed: Json = copy.deepcopy(status)
    changed.setdefault("completionTime", stamp(now))
    set_condition(changed, "Failed", reason, message, value=True, now=now)
    return changed


def set_condition(
    status: Json, kind: str, reason: str, message: str, *, value: bool, now: datetime
) -> None:
    """Put a condition into a job's status, in place, as the operator does.

    One that changes is removed and appended; Running and Restarting replace each other; an end
    makes Running false; nothing changes a job that has failed.
    """
    if "Failed" in true_conditions(status):
        return
    before = status.get("conditions", [])
    old: dict[str, Any] = next((c for c in before if c.get("type") == kind), {})
    truth = "True" if value else "False"
    if old.get("status") == truth and old.get("reason") == reason:
        return
    replaced = {kind, *_EXCLUSIVE_CONDITIONS.get(kind, ())}
    conditions = [c for c in before if c.get("type") not in replaced]
    if kind in ("Failed", "Succeeded"):
        conditions = [{**c, "status": "False"} if c["type"] == "Running" else c for c in conditions]
    since = old["lastTransitionTime"] if old.get("status") == truth else stamp(now)
    new = {"type": kind, "status": truth, "reason": reason, "message": message}
    status["conditions"] = [*conditions, {**new, "lastTransitionTime": since}]


def is_expired(job: Json, now: datetime) -> bool:
    """Whether the operator would delete a job now: its time to live after its end is over."""
    policy = Object(job).part("spec", "runPolicy")
    end = moment(Object(job).status.get("completionTime"))
    ttl = policy.get("ttlSecondsAfterFinished")
    if ttl is None or end is None or policy.get("suspend"):
        return False
    return now > end + timedelta(seconds=ttl)

"""A replica of a job on this machine, and its Pod; the kubelet's rules as a table.

Written after training-operator v1.9.4 (pkg/controller.v1/common/pod.go) and the kubelet. Pure:
whoever runs the containers reports their starts and ends.
"""

from __future__ import annotations

import uuid
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from enum import StrEnum
from typing import TYPE_CHECKING, Final

from k8sjob.contract import CONTAINER_NAME
from k8sjob.kube.objects import Object, moment, stamp, training
from k8sjob.targets.pytorchjob.operator import JOB_NAME, REPLICA_INDEX, REPLICA_TYPE

if TYPE_CHECKING:
    from k8sjob.kube.objects import Json
    from k8sjob.targets.api import RoleReplicas


class ReplicaState(StrEnum):
    """The state of a replica; the phase of its Pod follows from it."""

    GONE = "Gone"
    """It has no Pod: not yet, no longer, or not while the job is suspended."""
    PENDING = "Pending"
    """Its container was not started yet."""
    RUNNING = "Running"
    WAITING = "Waiting"
    """Its container failed, and is started again in the same Pod after a pause."""
    SUCCEEDED = "Succeeded"
    FAILED = "Failed"
    REPLACED = "Replaced"
    """Its Pod failed, and a new one takes its place."""


AFTER_EXIT: Final = {
    # restartPolicy: after exit code 0, after 1 to 127, after 128 and above
    "Never": (ReplicaState.SUCCEEDED, ReplicaState.FAILED, ReplicaState.FAILED),
    "ExitCode": (ReplicaState.SUCCEEDED, ReplicaState.FAILED, ReplicaState.REPLACED),
    "OnFailure": (ReplicaState.SUCCEEDED, ReplicaState.WAITING, ReplicaState.WAITING),
    "Always": (ReplicaState.WAITING, ReplicaState.WAITING, ReplicaState.WAITING),
}
"""The next state of a replica whose container ended by itself."""
_PHASES: Final = {ReplicaState.WAITING: "Running", ReplicaState.REPLACED: "Failed"}
"""The phases that are not called as the state of the replica."""
_FIRST_PAUSE: Final = 1.0
_LONGEST_PAUSE: Final = 10.0
"""Seconds; a cluster's kubelet begins with 10 and goes up to 300."""
_LONG_ENOUGH: Final = timedelta(seconds=60)
"""How long a container runs that is restarted without a pause."""


@dataclass(slots=True)
class Replica:
    """A replica of a job, and its Pod while it has one.

    Attributes:
        group: the replicas of its role.
        index: its number in the role, from 0.
        failures: how often its container has failed by itself, over all its Pods.
        stopped: whether its container is to end, and not to be started again.
        deleted: since when its Pod is to be gone, which it is when its container has ended.
        starts: of the container of this Pod.
        pause: seconds from the end of its container to the next start.
        end: the `terminated` state of its container; empty while it runs.
        end_before: that of the start before; may be empty.
    """

    group: RoleReplicas
    index: int
    state: ReplicaState = ReplicaState.GONE
    failures: int = 0
    stopped: bool = False
    deleted: datetime | None = None
    starts: int = 0
    pause: float = 0.0
    end: Json = field(default_factory=dict)
    end_before: Json = field(default_factory=dict)
    uid: str = ""
    created: str = ""
    started: str = ""
    next_pause: float = 0.0

    @property
    def name(self) -> str:
        """Its name, as "worker-2"."""
        return self.group.name(self.index)

    @property
    def is_due(self) -> bool:
        """Whether its container is to be started, when its pause is over."""
        return self.state in {ReplicaState.PENDING, ReplicaState.WAITING} and not self.stopped

    def create(self, now: datetime) -> None:
        """Give it a new Pod."""
        self.state, self.uid, self.created = ReplicaState.PENDING, str(uuid.uuid4()), stamp(now)
        self.stopped, self.deleted, self.starts = False, None, 0
        self.pause, self.next_pause, self.end, self.end_before = 0.0, 0.0, {}, {}

    def begin(self, now: datetime) -> None:
        """Its container was started."""
        self.state, self.started = ReplicaState.RUNNING, stamp(now)
        self.starts += 1
        self.end, self.end_before = {}, self.end

    def finish(self, end: Json) -> None:
        """Its container ended."""
        code, self.end = int(end["exitCode"]), end
        if self.deleted:
            self.state = ReplicaState.GONE
        elif self.stopped:
            self.state = ReplicaState.FAILED if code else ReplicaState.SUCCEEDED
        else:
            self.failures += code > 0
            self.state = AFTER_EXIT[self.group.restart_policy][(code > 0) + (code >= 128)]
            began, ended = moment(end["startedAt"]), moment(end["finishedAt"])
            ran_long = bool(began and ended and ended - began >= _LONG_ENOUGH)
            self.pause = 0.0 if ran_long else self.next_pause
            self.next_pause = min(max(2 * self.pause, _FIRST_PAUSE), _LONGEST_PAUSE)

    def halt(self) -> None:
        """Stop it for good; its Pod stays, with how it ended."""
        self.stopped = True
        if self.state in {ReplicaState.WAITING, ReplicaState.REPLACED}:
            self.state = ReplicaState.FAILED if self.end["exitCode"] else ReplicaState.SUCCEEDED

    def delete(self, now: datetime) -> None:
        """Delete its Pod."""
        self.stopped, self.deleted = True, self.deleted or now
        if self.state is not ReplicaState.RUNNING:
            self.state = ReplicaState.GONE

    def pod(self, job: Object, node: str) -> Json:
        """Its Pod as an apiserver would return it, on a node of this name."""
        template, role = Object(self.group.template), self.group.role
        policy = self.group.restart_policy
        pod = self.pod_reference(job)
        pod["metadata"] |= {
            "creationTimestamp": self.created,
            "labels": {
                **template.labels,
                JOB_NAME: job.name,
                REPLICA_TYPE: role.lower(),
                REPLICA_INDEX: str(self.index),
            },
            "annotations": template.annotations,
        }
        if self.deleted:
            pod["metadata"]["deletionTimestamp"] = stamp(self.deleted)
        pod["spec"] = {
            **template.spec,
            "nodeName": node,
            "restartPolicy": "Never" if policy == "ExitCode" else policy,
        }
        phase = _PHASES.get(self.state, self.state.value)
        container = _container_status(self) if self.starts else {}
        pod["status"] = {"phase": phase, "startTime": self.created, **container}
        return pod

    def pod_reference(self, job: Object) -> Json:
        """Its Pod as Events refer to it."""
        meta = {"name": f"{job.name}-{self.name}", "namespace": job.namespace}
        return {"apiVersion": "v1", "kind": "Pod", "metadata": {**meta, "uid": self.uid}}


def _container_status(replica: Replica) -> Json:
    """The Ready condition of a Pod that was started, and the status of its container."""
    is_ready, last = replica.state is ReplicaState.RUNNING, replica.end_before
    state: Json = {"terminated": replica.end}
    if is_ready:
        state = {"running": {"startedAt": replica.started}}
    elif replica.state is ReplicaState.WAITING and replica.pause:
        message = f"back-off {replica.pause:.0f}s restarting failed container={CONTAINER_NAME}"
        state = {"waiting": {"reason": "CrashLoopBackOff", "message": message}}
        last = replica.end
    since = replica.started if is_ready else replica.end["finishedAt"]
    ready = {"type": "Ready", "status": str(is_ready), "lastTransitionTime": since}
    container = {
        "name": CONTAINER_NAME,
        "image": training(replica.group.pod.get("containers")).get("image", ""),
        "ready": is_ready,
        "started": is_ready,
        "restartCount": replica.starts - 1,
        "state": state,
        "lastState": {"terminated": last} if last else {},
    }
    return {"conditions": [ready], "containerStatuses": [container]}

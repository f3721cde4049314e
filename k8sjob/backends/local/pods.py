"""Pod objects as an apiserver would hold them: made by the operator, kept by the kubelet. Pure."""

from __future__ import annotations

import copy
import socket
import uuid
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from k8sjob.backends.local.conditions import stamp
from k8sjob.contract import CONTAINER_NAME, Role
from k8sjob.labels import JOB_NAME, JOB_ROLE, OPERATOR_NAME, REPLICA_INDEX, REPLICA_TYPE

if TYPE_CHECKING:
    from k8sjob.backends.api import Json

__all__ = ["End", "ended", "is_live", "last_end", "new_pod", "running", "waiting"]


@dataclass(frozen=True, slots=True)
class End:
    """How a container ended, as the kubelet tells it.

    Attributes:
        exit_code: 0 to 255; 128 + N for a signal N.
        reason: "Completed", "Error", "OOMKilled", "StartError", "Stopped".
        message: the termination message.
        started: when it was started.
        finished: when it ended.
    """

    exit_code: int
    reason: str
    message: str
    started: datetime
    finished: datetime

    def to_json(self) -> Json:
        """The `terminated` state of a containerStatus."""
        return {
            "exitCode": self.exit_code,
            "reason": self.reason,
            "message": self.message,
            "startedAt": stamp(self.started),
            "finishedAt": stamp(self.finished),
        }


def new_pod(job: Json, role: Role, index: int, now: datetime) -> Json:
    """The Pod of a replica: Pending, with its labels, from the replica's template."""
    meta, spec = job["metadata"], job["spec"]["pytorchReplicaSpecs"][role]
    template = copy.deepcopy(spec["template"])
    first = role is Role.MASTER or Role.MASTER not in job["spec"]["pytorchReplicaSpecs"]
    labels = {
        **(template.get("metadata", {}).get("labels") or {}),
        OPERATOR_NAME: "pytorchjob-controller",
        JOB_NAME: meta["name"],
        REPLICA_TYPE: role.lower(),
        REPLICA_INDEX: str(index),
        **({JOB_ROLE: "master"} if first and index == 0 else {}),
    }
    policy = spec.get("restartPolicy") or "OnFailure"
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": f"{meta['name']}-{role.lower()}-{index}",
            "namespace": meta.get("namespace", ""),
            "uid": str(uuid.uuid4()),
            "creationTimestamp": stamp(now),
            "labels": labels,
            "annotations": template.get("metadata", {}).get("annotations") or {},
            "ownerReferences": [{"kind": "PyTorchJob", "name": meta["name"], "uid": meta["uid"]}],
        },
        "spec": {
            **template["spec"],
            "nodeName": socket.gethostname(),
            "restartPolicy": "Never" if policy == "ExitCode" else policy,
        },
        "status": {"phase": "Pending", "startTime": stamp(now)},
    }


def is_live(pod: Json) -> bool:
    """Whether the Pod has not come to its end."""
    return pod["status"]["phase"] not in ("Succeeded", "Failed")


def last_end(pod: Json) -> tuple[int, str]:
    """Exit code and termination message of the container's newest end; 0 and empty before one."""
    for container in pod["status"].get("containerStatuses", []):
        ended = container["state"].get("terminated") or container["lastState"].get("terminated")
        return int((ended or {}).get("exitCode", 0)), str((ended or {}).get("message", ""))
    return 0, ""


def running(pod: Json, restarts: int, started: datetime) -> None:
    """The Pod's container runs, for the time `restarts` + 1."""
    state = {"running": {"startedAt": stamp(started)}}
    _set(pod, "Running", state, restarts, ready=True)


def waiting(pod: Json, restarts: int, reason: str, message: str) -> None:
    """The Pod's container has ended and will be started again."""
    _set(pod, "Running", {"waiting": {"reason": reason, "message": message}}, restarts)


def ended(pod: Json, restarts: int, end: End, *, final: bool) -> None:
    """The Pod's container has ended; if that is final, so has the Pod."""
    phase = "Running" if not final else "Succeeded" if end.exit_code == 0 else "Failed"
    _set(pod, phase, {"terminated": end.to_json()}, restarts)


def _set(pod: Json, phase: str, state: Json, restarts: int, *, ready: bool = False) -> None:
    status = pod["status"]
    old: dict[str, Any] = next(iter(status.get("containerStatuses", [])), {})
    # A state that was already the end of the container becomes the last one; else that stays.
    past = old.get("state", {}) if "terminated" not in state else {}
    last = past if "terminated" in past else old.get("lastState", {})
    container = next(c for c in pod["spec"]["containers"] if c["name"] == CONTAINER_NAME)
    status["phase"] = phase
    status["containerStatuses"] = [
        {
            "name": CONTAINER_NAME,
            "image": container.get("image", ""),
            "ready": ready,
            "started": ready,
            "restartCount": restarts,
            "state": state,
            "lastState": last,
        }
    ]
    truth = "True" if ready else "False"
    if [c["status"] for c in status.get("conditions", [])] != [truth]:
        now = stamp(datetime.now(UTC))
        status["conditions"] = [{"type": "Ready", "status": truth, "lastTransitionTime": now}]

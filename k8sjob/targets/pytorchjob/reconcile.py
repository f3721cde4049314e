"""The training operator's reconciliation of a PyTorchJob, as a pure function.

Written after training-operator v1.9.4 (pkg/controller.v1/common/job.go and pod.go,
pkg/controller.v1/pytorch/pytorchjob_controller.go, pkg/util/status.go), its peculiarities included:
a condition that changes is removed and appended, so the last one is not always the true one; a
Failed job never changes its conditions again; a job that fails by the ExitCode policy has no
completionTime. Two differences: events are recorded only when something changes, and the deadline
is checked every time, not only when something else happens.
"""

from __future__ import annotations

import copy
import uuid
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any, Final

from k8sjob.contract import CONTAINER_NAME, Role
from k8sjob.kube.objects import Object, Pod, is_true, moment, stamp, true_conditions
from k8sjob.targets.api import CreatePod, DeleteJob, DeletePod, RecordEvent
from k8sjob.targets.pytorchjob.operator import (
    COUNTED,
    JOB_NAME,
    JOB_ROLE,
    KIND,
    OPERATOR_NAME,
    REPLICA_INDEX,
    REPLICA_TYPE,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from k8sjob.kube.objects import Json
    from k8sjob.targets.api import Action

_EXCLUSIVE_CONDITIONS: Final = {"Running": {"Restarting"}, "Restarting": {"Running"}}


def finished(status: Json) -> bool:
    """Whether the status of a PyTorchJob is that of one that has succeeded or failed."""
    return not true_conditions(status).keys().isdisjoint(("Succeeded", "Failed"))


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
    if is_true(status, "Failed"):
        return
    before = status.get("conditions", [])
    old: dict[str, Any] = next((c for c in before if c.get("type") == kind), {})
    truth = "True" if value else "False"
    if old.get("status") == truth and old.get("reason") == reason:
        return
    kept = [c for c in before if c.get("type") not in {kind, *_EXCLUSIVE_CONDITIONS.get(kind, ())}]
    if kind in ("Failed", "Succeeded"):
        kept = [{**c, "status": "False"} if c.get("type") == "Running" else c for c in kept]
    same = old.get("status") == truth
    new = {
        "type": kind,
        "status": truth,
        "reason": reason,
        "message": message,
        "lastUpdateTime": stamp(now),
        "lastTransitionTime": old["lastTransitionTime"] if same else stamp(now),
    }
    status["conditions"] = [*kept, new]


def new_pod(job: Json, role: Role, index: int, now: datetime, node: str) -> Json:
    """The Pod of a replica as the operator makes it: Pending, from the replica's template."""
    meta, replicas = job["metadata"], job["spec"]["pytorchReplicaSpecs"]
    template = Object(copy.deepcopy(replicas[role]["template"]))
    first = role is Role.MASTER or Role.MASTER not in replicas
    policy = _restart_policy(replicas[role])
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": f"{meta['name']}-{role.lower()}-{index}",
            "namespace": meta.get("namespace", ""),
            "uid": str(uuid.uuid4()),
            "creationTimestamp": stamp(now),
            "labels": {
                **template.labels,
                OPERATOR_NAME: "pytorchjob-controller",
                JOB_NAME: meta["name"],
                REPLICA_TYPE: role.lower(),
                REPLICA_INDEX: str(index),
                **({JOB_ROLE: "master"} if first and index == 0 else {}),
            },
            "annotations": template.part("metadata", "annotations"),
            "ownerReferences": [{"kind": KIND, "name": meta["name"], "uid": meta["uid"]}],
        },
        "spec": {
            **template.spec,
            "nodeName": node,
            "restartPolicy": "Never" if policy == "ExitCode" else policy,
        },
        "status": {"phase": "Pending", "startTime": stamp(now)},
    }


def reconcile(
    job: Json, pods: Sequence[Json], now: datetime, *, trouble: str = ""
) -> tuple[Json, list[Action]]:
    """One reconciliation of a job.

    Args:
        job: the PyTorchJob, with its status as the last reconciliation left it.
        pods: the Pods of the job, with their status as the kubelet left it.
        now: the present moment, with a time zone.
        trouble: why the job must fail, whatever the operator's own limits say.

    Returns:
        The job's new status, and what to do, in order. Neither argument is changed. Repeated with
        the new status and nothing else changed, it asks for nothing more.
    """
    reconciliation = _Reconciliation(job, pods, now, trouble)
    reconciliation.run()
    return reconciliation.status, reconciliation.actions


class _Reconciliation:
    """The status in the making, and the actions so far."""

    def __init__(self, job: Json, pods: Sequence[Json], now: datetime, trouble: str) -> None:
        self.name, self.namespace = Object(job).name, Object(job).namespace
        specs = Object(job).part("spec", "pytorchReplicaSpecs")
        self.replicas: dict[Role, Json] = {role: specs[role] for role in Role if role in specs}
        self.policy: Json = job["spec"].get("runPolicy") or {}
        self.elastic = job["spec"].get("elasticPolicy") is not None
        self.pods, self.now, self.trouble = pods, now, trouble
        self.status: Json = copy.deepcopy(job.get("status") or {})
        self.actions: list[Action] = []

    def run(self) -> None:
        if not self.status.get("conditions"):
            self.condition("Created", "Created", f"PyTorchJob {self.name} is created.")
        if finished(self.status):
            self.clean_up_after_end()
        elif self.policy.get("suspend"):
            self.suspended()
        else:
            self.active()

    def active(self) -> None:
        if is_true(self.status, "Suspended"):
            self.resumed()
        self.record_abnormal()
        trouble = self.past_a_limit()
        if trouble:
            self.status.setdefault("completionTime", stamp(self.now))
            self.record("Normal", "Failed", trouble)
            self.condition("Failed", "Failed", trouble)
            self.clean_up()
            return
        for role, spec in self.replicas.items():
            self.reconcile_pods(role, spec)
        self.status.setdefault("startTime", stamp(self.now))
        for role, spec in self.replicas.items():
            if self.judge(role, spec):
                return

    # --- the end, suspension --------------------------------------------------------------------

    def clean_up_after_end(self) -> None:
        self.clean_up()
        if is_true(self.status, "Succeeded"):
            for counts in self.status.get("replicaStatuses", {}).values():
                if counts.get("active"):
                    counts["succeeded"] = counts.get("succeeded", 0) + counts.pop("active")

    def clean_up(self) -> None:
        """Delete Pods as cleanPodPolicy says, or all of them while the job has not ended."""
        policy = self.policy.get("cleanPodPolicy") or "None"
        for pod in self.pods:
            kept = policy == "None" or (policy == "Running" and not Pod(pod).live)
            if not (finished(self.status) and kept):
                self.delete(pod)
        self.expire()

    def expire(self) -> None:
        ttl = self.policy.get("ttlSecondsAfterFinished")
        end = moment(self.status.get("completionTime"))
        if ttl is None or end is None or self.policy.get("suspend"):
            return
        if self.now > end + timedelta(seconds=ttl):
            self.actions.append(DeleteJob())

    def suspended(self) -> None:
        self.clean_up()
        for counts in self.status.get("replicaStatuses", {}).values():
            counts.pop("active", None)
        message = f"PyTorchJob {self.name} is suspended."
        if is_true(self.status, "Running"):
            self.condition("Running", "Suspended", message, value=False)
        if not is_true(self.status, "Suspended"):
            self.condition("Suspended", "Suspended", message)
            self.record("Normal", "Suspended", message)

    def resumed(self) -> None:
        message = f"PyTorchJob {self.name} is resumed."
        self.condition("Suspended", "Resumed", message, value=False)
        self.status["startTime"] = stamp(self.now)
        self.record("Normal", "Resumed", message)

    def record_abnormal(self) -> None:
        """A container that failed in a Pod that lives on: a record that outlasts the Pod."""
        for pod in map(Pod, filter(_active, self.pods)):
            ended = pod.terminated
            if ended and ended["exitCode"]:
                message = (
                    f"Error pod {pod.name} container {CONTAINER_NAME} "
                    f"exitCode: {ended['exitCode']} terminated message: {ended.get('message', '')}"
                )
                key = f"{pod.uid}/{pod.restarts}/abnormal"
                self.actions.append(RecordEvent("Warning", ended.get("reason", ""), message, key))

    # --- limits ---------------------------------------------------------------------------------

    def past_a_limit(self) -> str:
        if self.trouble:
            return self.trouble
        if self.past_backoff_limit():
            return f"Job {self.name} has failed because it has reached the specified backoff limit"
        deadline = self.policy.get("activeDeadlineSeconds")
        start = moment(self.status.get("startTime"))
        if deadline is None or start is None:
            return ""
        if (self.now - start).total_seconds() < deadline:
            return ""
        return f"Job {self.name} has failed because it was active longer than specified deadline"

    def past_backoff_limit(self) -> bool:
        limit = self.policy.get("backoffLimit")
        if limit is None:
            return False
        restarts = sum(
            pod.restarts
            for role, spec in self.replicas.items()
            if _restart_policy(spec) != "Never"
            for pod in map(Pod, self.pods_of(role))
            if pod.phase == "Running"
        )
        # A limit of 0 also forbids replacing a failed Pod, whatever the restart policy.
        failed = sum(Pod(pod).phase == "Failed" for pod in self.pods)
        known = sum(c.get("failed", 0) for c in self.status.get("replicaStatuses", {}).values())
        active = sum(map(_active, self.pods))
        total = sum(_count(spec) for spec in self.replicas.values())
        if limit == 0 and failed > known and active != total:
            return True
        return restarts > 0 if limit == 0 else restarts >= limit

    # --- pods -----------------------------------------------------------------------------------

    def reconcile_pods(self, role: Role, spec: Json) -> None:
        counts: dict[str, int] = {}
        present = {int(pod["metadata"]["labels"][REPLICA_INDEX]): pod for pod in self.pods_of(role)}
        for index in range(_count(spec)):
            pod = present.get(index)
            if pod is None:
                self.create(role, index)
                continue
            code = self.exit_code(pod)
            if Pod(pod).phase == "Failed":
                self.failed_pod(role, spec, pod, code)
            _tally(counts, pod)
        self.status.setdefault("replicaStatuses", {})[role.value] = {
            **counts,
            "selector": f"{JOB_NAME}={self.name},{OPERATOR_NAME}=pytorchjob-controller,"
            f"{REPLICA_TYPE}={role.lower()}",
        }

    def exit_code(self, raw: Json) -> int:
        """The training container's exit code; while it runs a number that is none."""
        pod = Pod(raw)
        if not pod.terminated:
            return 0xBEEF  # the operator's own choice
        code = int(pod.terminated["exitCode"])
        message = f"Pod: {pod.namespace}.{pod.name} exited with code {code}"
        key = f"{pod.uid}/{pod.restarts}"
        self.actions.append(RecordEvent("Normal", "ExitedWithCode", message, key))
        return code

    def failed_pod(self, role: Role, spec: Json, pod: Json, code: int) -> None:
        policy = _restart_policy(spec)
        if policy in ("OnFailure", "Always") or (policy == "ExitCode" and code >= 128):
            if self.delete(pod):
                message = f"job {self.name} is restarting because {role} replica(s) failed."
                self.record("Warning", "Restarting", message)
                self.condition("Restarting", "Restarting", message)
        elif policy == "ExitCode":
            message = f'job "{self.name}" is failing because "{role}" replica(s) failed.'
            if not finished(self.status):
                self.record("Warning", "Failed", message)
            self.condition("Failed", "Failed", message)

    def create(self, role: Role, index: int) -> None:
        message = f"Created pod: {self.name}-{role.lower()}-{index}"
        self.actions.append(CreatePod(role, index))
        self.actions.append(RecordEvent("Normal", "SuccessfulCreatePod", message))

    def delete(self, pod: Json) -> bool:
        """Delete a Pod unless it is being deleted; whether it was not."""
        if Object(pod).deleting:
            return False
        name = Object(pod).name
        message = f"Deleted pod: {name}"
        self.actions += [DeletePod(name), RecordEvent("Normal", "SuccessfulDeletePod", message)]
        return True

    # --- the job's state ------------------------------------------------------------------------

    def judge(self, role: Role, spec: Json) -> bool:
        """Conditions that follow from one replica type; whether the others no longer matter."""
        counts = self.status["replicaStatuses"][role.value]
        running, succeeded = counts.get("active", 0), counts.get("succeeded", 0)
        failed, total = counts.get("failed", 0), _count(spec)
        if Role.MASTER not in self.replicas:
            self.judge_workers(running, succeeded, total)
        elif role is Role.MASTER:
            if running:
                self.condition("Running", "Running", f"PyTorchJob {self.name} is running.")
            if succeeded == total:
                self.succeed(f"PyTorchJob {self.name} is successfully completed.")
                return True
        if failed and total > succeeded + running:
            self.judge_failed(role, spec, failed)
        return False

    def judge_workers(self, running: int, succeeded: int, total: int) -> None:
        """A job without a Master: all workers must succeed, or any one if it is elastic."""
        if succeeded == total or (self.elastic and succeeded):
            self.succeed(f"PyTorchJob {self.namespace}/{self.name} successfully completed.")
        elif running:
            message = f"PyTorchJob {self.namespace}/{self.name} is running."
            self.condition("Running", "Running", message)

    def judge_failed(self, role: Role, spec: Json, failed: int) -> None:
        why = f"because {failed} {role} replica(s) failed."
        if _restart_policy(spec) != "Never":
            message = f"PyTorchJob {self.name} is restarting {why}"
            if not is_true(self.status, "Restarting") and not finished(self.status):
                self.record("Warning", "Restarting", message)
            self.condition("Restarting", "Restarting", message)
            return
        message = f"PyTorchJob {self.name} is failed {why}"
        self.record("Normal", "Failed", message)
        self.status.setdefault("completionTime", stamp(self.now))
        self.condition("Failed", "Failed", message)

    def succeed(self, message: str) -> None:
        if not is_true(self.status, "Failed"):
            self.record("Normal", "Succeeded", message)
        self.status.setdefault("completionTime", stamp(self.now))
        self.condition("Succeeded", "Succeeded", message)

    # --- small things ---------------------------------------------------------------------------

    def pods_of(self, role: Role) -> Iterator[Json]:
        return (p for p in self.pods if p["metadata"]["labels"][REPLICA_TYPE] == role.lower())

    def condition(self, kind: str, reason: str, message: str, *, value: bool = True) -> None:
        set_condition(self.status, kind, f"PyTorchJob{reason}", message, value=value, now=self.now)

    def record(self, kind: str, reason: str, message: str) -> None:
        self.actions.append(RecordEvent(kind, f"PyTorchJob{reason}", message))


def _tally(counts: dict[str, int], pod: Json) -> None:
    key = COUNTED.get(Pod(pod).phase)
    if key == "active" and Object(pod).deleting:
        key = "failed"
    if key:
        counts[key] = counts.get(key, 0) + 1


def _active(pod: Json) -> bool:
    return Pod(pod).live and not Object(pod).deleting


def _count(spec: Json) -> int:
    return int(spec.get("replicas", 1))


def _restart_policy(spec: Json) -> str:
    return str(spec.get("restartPolicy") or "OnFailure")

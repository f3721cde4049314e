"""Replicas that lost their node, or had to leave it."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from k8sjob.contract import CONTAINER_NAMES
from k8sjob.kube.objects import event_time, moment
from k8sjob.observe.diagnose.finding import Cause, ReplicaFinding, grouped
from k8sjob.targets.api import JobState

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from datetime import datetime

    from k8sjob.kube.objects import Json
    from k8sjob.observe.diagnose.facts import End, Facts, Pod
    from k8sjob.observe.diagnose.finding import Finding

_RECREATED: Final = "it is created again; with checkpoints the job continues from the newest one"
_STOPPING: Final = tuple(f"Stopping container {name}" for name in CONTAINER_NAMES)
_EVICTED: Final = frozenset({"Evicted", "NodeShutdown", "Shutdown", "Terminated"})
_DISRUPTIONS: Final = {
    "EvictionByEvictionAPI": "its node was drained, or it was evicted by request",
    "TerminationByKubelet": "its node had to end it",
    "DeletionByPodGC": "its node is gone from the cluster",
    "DeletionByTaintManager": "its node got a taint that it does not tolerate",
}
_MAX_AGE_SECONDS: Final = 3600
"""What happened to a Pod that is gone is reported for so long."""
_STAMP_SECONDS: Final = 2.0
"""A Pod may be recreated in the second in which the end of the one before is written down."""
_GRACE_SECONDS: Final = 120.0
"""A container ends at most so long after its Pod was evicted or deleted, for most grace periods."""


def lost_or_displaced(facts: Facts) -> Iterator[Finding]:
    """Replicas whose node is lost, or that were evicted, preempted or rejected by it."""
    left = displaced(facts)
    lost = {one.replica: one for one in _lost(facts)} if not facts.status.state.finished else {}
    # A lost node's Pods are evicted at last; one that was preempted before has left it.
    preempted = {name for name, one in left.items() if one.cause is Cause.PREEMPTED}
    lost = {name: one for name, one in lost.items() if name not in preempted}
    newest = sorted(left.values(), key=_time, reverse=True)
    found = (*lost.values(), *(one for one in newest if one.replica not in lost))
    yield from grouped(found, facts.now)


def displaced(facts: Facts) -> dict[str, ReplicaFinding]:
    """What made each replica leave its node, the newest of it."""
    left: dict[str, ReplicaFinding] = {}
    present = (found for pod in facts.pods if (found := _displaced(pod)))
    for one in (*_displaced_before(facts), *present):
        if one.replica not in left or _time(left[one.replica]) <= _time(one):
            left[one.replica] = replace(one, over=facts.runs_again(one.replica))
    return left


def ended_by_displacement(facts: Facts, end: End, left: Mapping[str, ReplicaFinding]) -> bool:
    """Whether a container ended since its Pod had to leave, or was deleted."""
    pod = next((pod for pod in facts.pods if pod.replica == end.replica), None)
    # When a job has ended, its controller deletes the Pods that do not count as ended.
    deleted_before = pod and pod.deleting and not facts.status.state.finished
    if pod and (deleted_before or _displaced(pod)):
        return True
    found = left.get(end.replica)
    if found is None:
        return False
    newer = pod and pod.created_at and pod.created_at.timestamp() + _STAMP_SECONDS < end.time
    return not newer and end.time <= _time(found) + _GRACE_SECONDS


def _time(found: ReplicaFinding) -> float:
    return found.at.timestamp() if found.at else math.inf


def _lost(facts: Facts) -> Iterator[ReplicaFinding]:
    ready = {
        node["metadata"]["name"]: condition
        for node in facts.of_kind("Node")
        for condition in (node.get("status") or {}).get("conditions") or ()
        if condition.get("type") == "Ready"
    }
    gone = {
        status["details"]["name"]
        for status in facts.of_kind("Status")
        if status["details"].get("kind") == "nodes"
    }
    for pod in facts.pods:
        if not pod.node or pod.phase in ("Succeeded", "Failed"):
            continue
        what, since = _unreachable(pod, ready.get(pod.node))
        if pod.node in gone:
            what, since = "is gone from the cluster", None
        if what:
            yield ReplicaFinding(
                Cause.NODE_LOST,
                f"its node {pod.node} {what}",
                "after five minutes the cluster gives its pods up and they are created again;"
                f" have the node checked (kubectl describe node {pod.node}), and if it is really"
                f" off, kubectl delete pod --force -n {facts.namespace} for those on it",
                pod.replica,
                since,
            )


def _unreachable(pod: Pod, ready: Json | None) -> tuple[str, datetime | None]:
    """What is wrong with the Pod's node, and since when; empty if nothing is known."""
    if ready is not None:
        if ready.get("status") == "True":
            return "", None
        message = ready.get("message") or "it does not report"
        return f"is not ready: {message.rstrip('.')}", moment(ready.get("lastTransitionTime"))
    event = pod.last_event("NodeNotReady")
    if event and pod.condition("Ready").get("status") == "False":
        return "is not ready", event_time(event)
    return ("is lost" if pod.status.get("reason") == "NodeLost" else ""), None


def _displaced(pod: Pod) -> ReplicaFinding | None:
    """Why a Pod that is still there had to leave its node."""
    reason, message = pod.status.get("reason", ""), pod.status.get("message", "")
    target = pod.condition("DisruptionTarget")
    at = moment(target.get("lastTransitionTime"))
    if target.get("reason") == "PreemptionByScheduler":
        return replace(_preempted(pod.replica, target.get("message", "")), at=at)
    if pod.phase == "Failed" and reason in _EVICTED:
        return replace(_evicted(pod.replica, message), at=at)
    if target.get("status") == "True":
        why = _DISRUPTIONS.get(target.get("reason", ""), target.get("reason", ""))
        what = f"{why}: {target.get('message', '')}"
        return ReplicaFinding(Cause.EVICTED, what, _RECREATED, pod.replica, at=at)
    if pod.phase == "Failed" and reason and not pod.status.get("containerStatuses"):
        return ReplicaFinding(
            Cause.NODE_REFUSED,
            f"node {pod.node} rejected it: {reason}: {message}",
            f"{_RECREATED}; if it happens again, the node's devices or resources are not what it"
            f" says: kubectl describe node {pod.node}",
            pod.replica,
        )
    return None


def _displaced_before(facts: Facts) -> Iterator[ReplicaFinding]:
    """What Events say of Pods that the operator has replaced, one for each Pod."""
    present = {pod.uid for pod in facts.pods}
    messages = [event.get("message", "") for event in facts.job_events]
    found: dict[str, ReplicaFinding] = {}
    for event in facts.snapshot.events:
        subject = event.get("involvedObject") or {}
        uid = subject.get("uid", "")
        if subject.get("kind") != "Pod" or uid in present or not _matters(facts, event):
            continue
        name = subject.get("name", "")
        if _is_of_an_earlier_job(facts, name, messages):
            continue
        one = _of_event(event, facts.target.replica_named(facts.name, name) or name)
        # That it was killed follows from whatever else made it leave.
        if one and not (uid in found and one.cause is Cause.POD_DELETED):
            found[uid] = replace(one, at=event_time(event))
    yield from found.values()


def _is_of_an_earlier_job(facts: Facts, pod: str, messages: Sequence[str]) -> bool:
    """Whether no Pod of the job could be created for one of its name, and none was."""
    refused = any(f'"{pod}" already exists' in message for message in messages)
    _, _, created = facts.target.creations[0]
    return refused and f"{created}{pod}" not in messages


def _matters(facts: Facts, event: Json) -> bool:
    """Whether an Event about a Pod that is gone still matters.

    What happened before a suspended job was resumed does not; and the operator itself deletes
    the Pods of a job that is suspended or has ended.
    """
    at, status = event_time(event), facts.status
    too_old = (facts.now - at).total_seconds() > _MAX_AGE_SECONDS
    if too_old or (status.started and at < status.started):
        return False
    if event.get("reason") != "Killing":
        return True
    by_operator = status.state in (JobState.SUSPENDED, JobState.QUEUED) or (
        status.finished is not None and at >= status.finished
    )
    return not (facts.local or by_operator)


def _of_event(event: Json, replica: str) -> ReplicaFinding | None:
    reason, message = event.get("reason"), event.get("message", "")
    if reason == "Preempted":
        return _preempted(replica, message)
    if reason == "Evicted":
        return _evicted(replica, message)
    if reason == "TaintManagerEviction" and not message.startswith("Cancelling"):
        why = _DISRUPTIONS["DeletionByTaintManager"]
        return ReplicaFinding(Cause.EVICTED, why, _RECREATED, replica)
    if reason == "Killing" and message.startswith(_STOPPING):
        step = f"{_RECREATED}; a drain, an autoscaler or kubectl delete pod does this"
        return ReplicaFinding(Cause.POD_DELETED, "its pod was deleted while it ran", step, replica)
    return None


def _preempted(replica: str, message: str) -> ReplicaFinding:
    by = f" ({message.rstrip('.')})" if message.startswith("Preempted by") else ""
    return ReplicaFinding(
        Cause.PREEMPTED,
        f"a pod of higher priority took its place{by}",
        f"{_RECREATED} when there is room; priority_class in the job gives it a higher priority",
        replica,
    )


def _evicted(replica: str, message: str) -> ReplicaFinding:
    step = _RECREATED
    if re.search(r"ephemeral|EmptyDir", message):
        step = (
            "write less to the container's own disk, or ask for more (resources.extended:"
            f" ephemeral-storage; volumes[].empty_dir.size_limit); {_RECREATED}"
        )
    elif "low on resource: memory" in message:
        step = f"ask for the memory that it uses (resources.memory); {_RECREATED}"
    what = f"evicted by its node: {message.strip().rstrip('.')}"
    return ReplicaFinding(Cause.EVICTED, what, step, replica)

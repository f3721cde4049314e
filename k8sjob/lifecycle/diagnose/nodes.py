"""Replicas that lost their place: their node is silent, or they had to leave it."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from k8sjob.backends.events import event_time, moment
from k8sjob.contract import CONTAINER_NAME
from k8sjob.lifecycle.diagnose.finding import Cause, Seen, grouped
from k8sjob.lifecycle.status import JobState

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from datetime import datetime

    from k8sjob.backends.api import Json
    from k8sjob.lifecycle.diagnose.case import Case, Pod
    from k8sjob.lifecycle.diagnose.finding import Finding
    from k8sjob.lifecycle.evidence import End

__all__ = ["ended_with_its_place", "left_their_place", "lost_its_place"]

_AGAIN: Final = "the operator makes it anew; with checkpoints the job goes on from the newest one"
_EVICTED: Final = frozenset({"Evicted", "NodeShutdown", "Shutdown", "Terminated"})
_DISRUPTIONS: Final = {
    "EvictionByEvictionAPI": "its node was drained, or somebody evicted it",
    "TerminationByKubelet": "its node had to end it",
    "DeletionByPodGC": "its node is gone from the cluster",
    "DeletionByTaintManager": "its node got a taint that it does not tolerate",
}
_PAST_SECONDS: Final = 3600
"""What happened to a Pod that is gone is told for so long."""
_STAMPS: Final = 2.0
"""Seconds: a Pod is recreated in the second in which the end of the one before is written down."""
_GRACE_SECONDS: Final = 120.0
"""A container ends at most so long after its Pod was evicted or deleted, for most grace periods."""


def lost_its_place(case: Case) -> Iterator[Finding]:
    """Replicas whose node is lost, or that were evicted, preempted or turned away by it."""
    left = left_their_place(case)
    lost = {} if case.status.state.finished else {one.replica: one for one in _lost(case)}
    # A lost node's Pods are evicted at last; who was preempted before has left it.
    lost = {name: one for name, one in lost.items() if not _preempted_at(left.get(name))}
    newest = sorted(left.values(), key=_moment, reverse=True)
    seen = (*lost.values(), *(one for one in newest if one.replica not in lost))
    yield from grouped(seen, case.now)


def left_their_place(case: Case) -> dict[str, Seen]:
    """What made each replica leave its node, the newest of it."""
    left: dict[str, Seen] = {}
    for one in (*_past(case), *_present(case)):
        if one.replica not in left or _moment(left[one.replica]) <= _moment(one):
            left[one.replica] = replace(one, over=case.runs_again(one.replica))
    return left


def ended_with_its_place(case: Case, end: End, left: Mapping[str, Seen]) -> bool:
    """Whether a container ended since its Pod had to leave, or was deleted.

    Args:
        case: the job.
        end: how the container ended.
        left: see left_their_place.
    """
    pod = next((pod for pod in case.pods if pod.replica == end.replica), None)
    if pod and (pod.dying or _of_pod(pod)):
        return True
    seen = left.get(end.replica)
    if seen is None:
        return False
    newer = pod and pod.created and pod.created.timestamp() + _STAMPS < end.time
    return not newer and end.time <= _moment(seen) + _GRACE_SECONDS


def _moment(seen: Seen) -> float:
    return seen.at.timestamp() if seen.at else math.inf


def _preempted_at(seen: Seen | None) -> bool:
    return seen is not None and seen.cause is Cause.PREEMPTED


def _lost(case: Case) -> Iterator[Seen]:
    nodes = {
        node["metadata"]["name"]: condition
        for node in case.of_kind("Node")
        for condition in (node.get("status") or {}).get("conditions") or ()
        if condition.get("type") == "Ready"
    }
    gone = {
        status["details"]["name"]
        for status in case.of_kind("Status")
        if status["details"].get("kind") == "nodes"
    }
    for pod in case.pods:
        if not pod.node or pod.phase in ("Succeeded", "Failed"):
            continue
        told = "is gone from the cluster" if pod.node in gone else ""
        silence, since = (told, None) if told else _silence(pod, nodes.get(pod.node))
        if silence:
            yield Seen(
                Cause.NODE_LOST,
                f"its node {pod.node} {silence}",
                "after five minutes the cluster gives its pods up and the operator makes them anew;"
                f" have the node looked at (kubectl describe node {pod.node}), and if it is really"
                f" off, kubectl delete pod --force -n {case.namespace} for those on it",
                pod.replica,
                since,
            )


def _silence(pod: Pod, ready: Json | None) -> tuple[str, datetime | None]:
    """What is wrong with the Pod's node, and since when; empty if it is well or not known.

    Args:
        pod: the Pod.
        ready: the Ready condition of its node, where nodes may be read.
    """
    if ready is not None:
        if ready.get("status") == "True":
            return "", None
        told = ready.get("message") or "it does not report"
        return f"is not ready: {told.rstrip('.')}", moment(ready.get("lastTransitionTime"))
    event = pod.last_event("NodeNotReady")
    if event and pod.condition("Ready").get("status") == "False":
        return "is not ready", event_time(event)
    return ("is lost" if pod.status.get("reason") == "NodeLost" else ""), None


def _present(case: Case) -> Iterator[Seen]:
    for pod in case.pods:
        if seen := _of_pod(pod):
            yield seen


def _of_pod(pod: Pod) -> Seen | None:
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
        return Seen(Cause.EVICTED, what, _AGAIN, pod.replica, at=at)
    if pod.phase == "Failed" and reason and not pod.status.get("containerStatuses"):
        return Seen(
            Cause.NODE_REFUSED,
            f"node {pod.node} turned it away: {reason}: {message}",
            f"{_AGAIN}; if it happens again, the node's devices or resources are not what it says:"
            f" kubectl describe node {pod.node}",
            pod.replica,
        )
    return None


def _past(case: Case) -> Iterator[Seen]:
    """What Events still tell of Pods that the operator has replaced, one for each Pod."""
    present = {(pod.object.get("metadata") or {}).get("uid") for pod in case.pods}
    said = [event.get("message", "") for event in case.job_events]
    told: dict[str, Seen] = {}
    for event in case.snapshot.events:
        subject = event.get("involvedObject") or {}
        uid = subject.get("uid", "")
        if subject.get("kind") != "Pod" or uid in present or not _tells(case, event):
            continue
        name = subject.get("name", "")
        if _is_of_an_earlier_job(name, said):
            continue
        seen = _of_event(event, name.removeprefix(f"{case.name}-"))
        # That it was killed follows from whatever else made it go.
        if seen and not (uid in told and seen.cause is Cause.POD_DELETED):
            told[uid] = replace(seen, at=event_time(event))
    yield from told.values()


def _is_of_an_earlier_job(pod: str, said: Sequence[str]) -> bool:
    """Whether the operator could not make a Pod for one of its name, and never did."""
    refused = any(f'"{pod}" already exists' in message for message in said)
    return refused and not any(message == f"Created pod: {pod}" for message in said)


def _tells(case: Case, event: Json) -> bool:
    """Whether an Event about a Pod that is gone still matters.

    What happened before a suspended job was resumed does not; and the operator itself deletes
    the Pods of a job that is suspended or has ended.
    """
    at, status = event_time(event), case.status
    if (case.now - at).total_seconds() > _PAST_SECONDS or (status.started and at < status.started):
        return False
    if event.get("reason") != "Killing":
        return True
    by_operator = status.state in (JobState.SUSPENDED, JobState.QUEUED) or (
        status.finished is not None and at >= status.finished
    )
    return not (case.local or by_operator)


def _of_event(event: Json, replica: str) -> Seen | None:
    reason, message = event.get("reason"), event.get("message", "")
    if reason == "Preempted":
        return _preempted(replica, message)
    if reason == "Evicted":
        return _evicted(replica, message)
    if reason == "TaintManagerEviction" and not message.startswith("Cancelling"):
        why = _DISRUPTIONS["DeletionByTaintManager"]
        return Seen(Cause.EVICTED, why, _AGAIN, replica)
    if reason == "Killing" and message.startswith(f"Stopping container {CONTAINER_NAME}"):
        step = f"{_AGAIN}; a drain, an autoscaler or kubectl delete pod does this"
        return Seen(Cause.POD_DELETED, "its pod was deleted while it ran", step, replica)
    return None


def _preempted(replica: str, message: str) -> Seen:
    return Seen(
        Cause.PREEMPTED,
        "a pod of higher priority took its place"
        + (f" ({message.rstrip('.')})" if message.startswith("Preempted by") else ""),
        f"{_AGAIN} when there is room; priority_class in the job gives it a higher priority",
        replica,
    )


def _evicted(replica: str, message: str) -> Seen:
    if re.search(r"ephemeral|EmptyDir", message):
        step = "write less to the container's own disk, or ask for more (resources.extended:"
        step += " ephemeral-storage; volumes[].empty_dir.size_limit); " + _AGAIN
    elif "low on resource: memory" in message:
        step = f"ask for the memory that it uses (resources.memory); {_AGAIN}"
    else:
        step = _AGAIN
    return Seen(Cause.EVICTED, f"its node put it out: {message.strip().rstrip('.')}", step, replica)

"""Replicas that lost their place: their node is silent, or they had to leave it."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

from k8sjob.backends.events import event_time, moment
from k8sjob.lifecycle.diagnose.finding import Cause, Seen, grouped

if TYPE_CHECKING:
    from collections.abc import Iterator
    from datetime import datetime

    from k8sjob.backends.api import Json
    from k8sjob.lifecycle.diagnose.case import Case, Pod
    from k8sjob.lifecycle.diagnose.finding import Finding

__all__ = ["lost_its_place", "replicas_that_left"]

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


def lost_its_place(case: Case) -> Iterator[Finding]:
    """Replicas whose node is lost, or that were evicted, preempted or turned away by it."""
    left = {one.replica: one for one in (*_past(case), *_present(case))}
    lost = {} if case.status.state.finished else {one.replica: one for one in _lost(case)}
    # A lost node's Pods are evicted at last; who was preempted before has left it.
    lost = {name: one for name, one in lost.items() if not _preempted_at(left.get(name))}
    yield from grouped((*lost.values(), *(left[n] for n in left if n not in lost)), case.now)


def _preempted_at(seen: Seen | None) -> bool:
    return seen is not None and seen.cause is Cause.PREEMPTED


def replicas_that_left(case: Case) -> set[str]:
    """Those replicas: how their containers ended then is a consequence."""
    return {one.replica for one in (*_past(case), *_present(case))}


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
    if target.get("reason") == "PreemptionByScheduler":
        return _preempted(pod.replica, target.get("message", ""))
    if pod.phase == "Failed" and reason in _EVICTED:
        return _evicted(pod.replica, message)
    if target.get("status") == "True":
        why = _DISRUPTIONS.get(target.get("reason", ""), target.get("reason", ""))
        return Seen(Cause.EVICTED, f"{why}: {target.get('message', '')}", _AGAIN, pod.replica)
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
    """What Events still tell of Pods that the operator has replaced."""
    present = {(pod.object.get("metadata") or {}).get("uid") for pod in case.pods}
    for event in case.snapshot.events:
        subject = event.get("involvedObject") or {}
        name = subject.get("name", "")
        if subject.get("kind") != "Pod" or subject.get("uid") in present:
            continue
        if (case.now - event_time(event)).total_seconds() > _PAST_SECONDS:
            continue
        if seen := _of_event(event, name.removeprefix(f"{case.name}-")):
            yield seen


def _of_event(event: Json, replica: str) -> Seen | None:
    reason, message = event.get("reason"), event.get("message", "")
    if reason == "Preempted":
        return _preempted(replica, message)
    if reason == "Evicted":
        return _evicted(replica, message)
    if reason == "TaintManagerEviction" and not message.startswith("Cancelling"):
        why = _DISRUPTIONS["DeletionByTaintManager"]
        return Seen(Cause.EVICTED, why, _AGAIN, replica)
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

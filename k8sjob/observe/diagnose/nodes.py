"""Replicas that lost their node, or had to leave it."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from datetime import timedelta
from typing import TYPE_CHECKING, Final

from k8sjob.kube.objects import Condition, Object, event_time, moment
from k8sjob.observe.diagnose.facts import GRACE_SECONDS, SIGKILLED
from k8sjob.observe.diagnose.finding import (
    Cause,
    Explanation,
    age,
    best_match,
    grouped,
    load_rules,
)
from k8sjob.targets.api import JobState

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from datetime import datetime

    from k8sjob.findings import Finding
    from k8sjob.kube.objects import Json
    from k8sjob.observe.diagnose.facts import Facts, Failure, ReplicaPod

_RECREATED: Final = "it is recreated; with checkpoints the job continues from the newest one"
_SUBMIT_AGAIN: Final = "submit the job again; with checkpoints it continues from the newest one"
_EVICTED: Final = frozenset({"Evicted", "NodeShutdown", "Shutdown", "Terminated"})
_DISRUPTIONS: Final = {
    "EvictionByEvictionAPI": "its node was drained, or it was evicted by request",
    "TerminationByKubelet": "its node had to end it",
    "DeletionByPodGC": "its node is gone from the cluster",
    "DeletionByTaintManager": "its node got a taint that it does not tolerate",
}
_MAX_AGE_SECONDS: Final = 3600
"""How long the end of a Pod that is gone is reported."""
_TAKEN: Final = re.compile(r'"([^"]*)" already exists')
_STAMP_SECONDS: Final = 2.0
"""A Pod may be recreated in the second in which the end of the one before is written down."""


def lost_or_displaced(facts: Facts) -> Iterator[Finding]:
    """Replicas whose node is lost, or that were evicted, preempted or rejected by it."""
    displacements = sorted(displaced(facts).values(), key=_time, reverse=True)
    if facts.status.state.finished:
        for n, displacement in enumerate(displacements):
            step = displacement.next_step.replace(_RECREATED, _SUBMIT_AGAIN)
            displacements[n] = displacement._replace(next_step=step)
        yield from grouped(displacements, facts.now)
        return
    # A lost node's Pods are evicted at last; one that was preempted before has left it.
    preempted = {d.replica for d in displacements if d.cause is Cause.PREEMPTED}
    lost = {loss.replica: loss for loss in _lost(facts) if loss.replica not in preempted}
    displacements = [d for d in displacements if d.replica not in lost]
    yield from grouped([*lost.values(), *displacements], facts.now)


def displaced(facts: Facts) -> dict[str, Explanation]:
    """The newest reason why each replica left its node."""
    newest: dict[str, Explanation] = {}
    present = filter(None, map(_displaced, facts.pods))
    moments: defaultdict[tuple[str, Cause], list[datetime]] = defaultdict(list)
    for displacement in (*_displaced_before(facts), *present):
        replica, at = displacement.replica, displacement.at
        if at:
            moments[replica, displacement.cause].append(at)
        if replica not in newest or _time(newest[replica]) <= _time(displacement):
            newest[replica] = displacement._replace(over=facts.runs_again(replica))
    for replica, displacement in newest.items():
        if len(times := moments[replica, displacement.cause]) > 1:
            often = f"{len(times)} times in {age(min(times), facts.now)}"
            newest[replica] = displacement._replace(problem=f"{displacement.problem}, {often}")
    return newest


def ended_by_displacement(facts: Facts, end: Failure, newest: Mapping[str, Explanation]) -> bool:
    """Whether a container ended since its Pod had to leave, or was deleted; see displaced."""
    pod = facts.pod(end.replica)
    if pod and (_displaced(pod) or (pod.deleting and _ended_by_deletion(facts, pod, end))):
        return True
    displacement = newest.get(end.replica)
    if displacement is None:
        return False
    newer = pod and pod.created_at and pod.created_at.timestamp() + _STAMP_SECONDS < end.time
    return not newer and end.time <= _time(displacement) + GRACE_SECONDS


def _ended_by_deletion(facts: Facts, pod: ReplicaPod, end: Failure) -> bool:
    """Whether a container was killed after its Pod's deletion had been requested."""
    # When a job has ended, its controller deletes the Pods that do not count as ended.
    if not facts.status.state.finished:
        return True
    until = moment(pod.metadata["deletionTimestamp"])  # the end of the grace period
    grace = timedelta(seconds=pod.metadata.get("deletionGracePeriodSeconds", 0))
    killed = end.exit_code == SIGKILLED and end.why != "OOMKilled"
    return killed and until is not None and end.time > (until - grace).timestamp()


def _time(displacement: Explanation) -> float:
    return displacement.at.timestamp() if displacement.at else math.inf


def _lost(facts: Facts) -> Iterator[Explanation]:
    nodes = map(Object, facts.of_kind("Node"))
    ready = {node.name: node.condition("Ready") for node in nodes}
    for pod in facts.pods:
        if not pod.node or pod.phase in ("Succeeded", "Failed"):
            continue
        problem, since = _unreachable(pod, ready.get(pod.node, Condition()))
        if ("nodes", pod.node) in facts.not_found:
            problem, since = "is gone from the cluster", None
        if problem:
            yield Explanation(
                Cause.NODE_LOST,
                f"its node {pod.node} {problem}",
                "after five minutes the cluster evicts its pods and they are recreated;"
                f" have the node checked (kubectl describe node {pod.node}), and if it is really"
                f" down, kubectl delete pod --force -n {facts.namespace} for those on it",
                pod.replica,
                since,
            )


def _unreachable(pod: ReplicaPod, ready: Condition) -> tuple[str, datetime | None]:
    """The problem of the Pod's node, and since when; empty if none is known."""
    if ready.true:
        return "", None
    if ready:
        message = ready.message or "it does not report its status"
        return f"is not ready: {message.rstrip('.')}", ready.since
    # Many users cannot read nodes; the node controller tells each Pod on them, too.
    event = pod.last_event("NodeNotReady")
    if event and pod.condition("Ready").false:
        return "is not ready", event_time(event)
    return ("is lost" if pod.status.get("reason") == "NodeLost" else ""), None


def _displaced(pod: ReplicaPod) -> Explanation | None:
    """Why a Pod that is still there had to leave its node."""
    reason, message = pod.status.get("reason") or "", pod.status.get("message") or ""
    target = pod.condition("DisruptionTarget")
    # The scheduler sets this condition first; the Pod may run on for its grace period.
    if target.reason == "PreemptionByScheduler":
        return _preempted(pod.replica, target.message)._replace(at=target.since)
    if pod.phase == "Failed" and reason in _EVICTED:
        return _evicted(pod.replica, message)._replace(at=target.since)
    if target.true:
        problem = f"{_DISRUPTIONS.get(target.reason, target.reason)}: {target.message}"
        return Explanation(Cause.EVICTED, problem, _RECREATED, pod.replica, at=target.since)
    # A kubelet that rejects a Pod fails it before any container starts; after its restart it may
    # reject one whose containers have a status.
    rejected = reason == "UnexpectedAdmissionError" or reason.startswith("OutOf")
    if pod.phase == "Failed" and reason and (rejected or not pod.status.get("containerStatuses")):
        return Explanation(
            Cause.NODE_REFUSED,
            f"node {pod.node} rejected it: {reason}: {message}",
            f"{_RECREATED}; if it happens again, the node reports devices or resources that it does"
            f" not have: kubectl describe node {pod.node}",
            pod.replica,
        )
    return None


def _displaced_before(facts: Facts) -> Iterator[Explanation]:
    """The displacements of replaced Pods, as Events report them, one for each Pod."""
    present = {pod.uid for pod in facts.pods}
    earlier = _names_of_an_earlier_job(facts)
    restarts = [e for e in facts.job_events if facts.target.pods.restarts_all(e)]
    displacements: dict[str, Explanation] = {}  # by the uid of the Pod
    kills: defaultdict[str, list[Json]] = defaultdict(list)  # by the name of the Pod
    for event in facts.snapshot.events:
        if event.get("reason") == "Killing":
            kills[Object(event).part("involvedObject").get("name", "")].append(event)
    for event in facts.snapshot.events:
        subject = Object(event).part("involvedObject")
        name, uid = subject.get("name", ""), subject.get("uid", "")
        if not uid:
            # The taint manager's Events have none: the kubelet's, about the end that follows, has.
            ends = (kill for kill in kills[name] if event_time(kill) >= event_time(event))
            uid = Object(next(ends, event)).part("involvedObject").get("uid", name)
        if subject.get("kind") != "Pod" or uid in present or name in earlier:
            continue
        if not _matters(facts, event, restarts):
            continue
        displacement = _of_event(event, facts.job.replica_named(name) or name)
        # The kill follows from another reason for leaving the node.
        follows = uid in displacements and displacement and displacement.cause is Cause.POD_DELETED
        if displacement and not follows:
            displacements[uid] = displacement._replace(at=event_time(event))
    yield from displacements.values()


def _names_of_an_earlier_job(facts: Facts) -> set[str]:
    """The names for which no Pod of the job could be created, and none was."""
    messages = {event.get("message", "") for event in facts.job_events}
    _, _, created = facts.target.pods.creations[0]
    refused = {name for message in messages for name in _TAKEN.findall(message)}
    return {name for name in refused if f"{created}{name}" not in messages}


def _matters(facts: Facts, event: Json, restarts: Sequence[Json]) -> bool:
    """Whether an Event about a Pod that is gone still matters; `restarts` are those of all Pods.

    What happened before a suspended job was resumed does not; and the operator itself deletes
    the Pods of a job that is suspended or has ended.
    """
    at, status = event_time(event), facts.status
    too_old = (facts.now - at).total_seconds() > _MAX_AGE_SECONDS
    if too_old or (status.started and at < status.started):
        return False
    if event.get("reason") != "Killing":
        return True
    subject = Object(event).part("involvedObject")
    if subject.get("uid", "") in facts.kubelet_kills:
        return False  # a probe or a hook: see exits._ended_by_kubelet
    if subject.get("fieldPath", "") not in facts.training_fields:
        return False
    by_operator = (
        facts.ended_by_deadline
        or status.state in (JobState.SUSPENDED, JobState.QUEUED)
        or (status.finished is not None and at >= status.finished)
    )
    # A JobSet that restarts deletes the Pods of all of its Jobs.
    by_operator |= any(
        0 <= (at - event_time(restart)).total_seconds() + _STAMP_SECONDS <= GRACE_SECONDS
        for restart in restarts
    )
    return not (facts.local or by_operator)


def _of_event(event: Json, replica: str) -> Explanation | None:
    reason, message = event.get("reason"), event.get("message", "")
    if reason == "Preempted":
        return _preempted(replica, message)
    if reason == "Evicted":
        return _evicted(replica, message)
    # The same reason tells that a deletion is taken back, when the taint is gone in time.
    if reason == "TaintManagerEviction" and not message.startswith("Cancelling"):
        why = _DISRUPTIONS["DeletionByTaintManager"]
        return Explanation(Cause.EVICTED, why, _RECREATED, replica)
    if reason == "Killing" and message.startswith("Stopping container "):
        step = f"{_RECREATED}; a drain, an autoscaler or kubectl delete pod does this"
        return Explanation(Cause.POD_DELETED, "its pod was deleted while it ran", step, replica)
    return None


def _preempted(replica: str, message: str) -> Explanation:
    by = f" ({message.rstrip('.')})" if message.startswith("Preempted by") else ""
    return Explanation(
        Cause.PREEMPTED,
        f"it was preempted by a pod with a higher priority{by}",
        f"{_RECREATED} when there is room; priority_class in the job gives it a higher priority",
        replica,
    )


def _evicted(replica: str, message: str) -> Explanation:
    problem = f"evicted by its node: {message.strip().rstrip('.')}"
    explanation = best_match(load_rules("evicted"), message, problem=problem, recreated=_RECREATED)
    return explanation._replace(replica=replica)

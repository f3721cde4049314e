"""Replicas that no node takes, that lost their node, or had to leave it."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from dataclasses import replace
from datetime import timedelta
from decimal import Decimal
from typing import TYPE_CHECKING, Final

from k8sjob.contract import counted
from k8sjob.kube.capacity import as_text, nodes_of, pod_requests, requested_by_node, tolerates
from k8sjob.kube.objects import Condition, Object, event_time, moment
from k8sjob.observe.diagnose.facts import GRACE_SECONDS, SIGKILLED
from k8sjob.observe.diagnose.finding import Cause, Explanation, grouped, one_line
from k8sjob.observe.diagnose.volumes import unbound
from k8sjob.targets.api import JobState

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence
    from datetime import datetime

    from k8sjob.kube.capacity import Node
    from k8sjob.kube.objects import Json
    from k8sjob.observe.diagnose.facts import Facts, Failure, ReplicaPod
    from k8sjob.observe.diagnose.finding import Diagnosis

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
_STAMP_SECONDS: Final = 2.0
"""A Pod may be recreated in the second in which the end of the one before is written down."""
_NODES: Final = re.compile(r"^\d+/(\d+) nodes are available: ?")
_REASONS: Final = re.compile(r"(\d+) ((?:Insufficient|Too many|node\(s\)).*?)(?=, \d+ |\.? *$)")
_SHAPE: Final = ("schedulingGates", "tolerations", "nodeSelector", "affinity", "volumes")
"""Parts of a Pod's spec that decide where it may go."""
_CORE: Final = frozenset({"cpu", "memory", "ephemeral-storage"})
_SCALE_UP: Final = timedelta(minutes=15)
"""Time within which a node that an autoscaler adds joins the cluster."""
_ADDS: Final = "pod triggered scale-up: "
_ADDS_NONE: Final = "pod didn't trigger scale-up: "
_CHECK_PLUGIN: Final = "have the device plugin"
_TEMPORARY_TAINT: Final = re.compile(
    r"\bnode\.kubernetes\.io/|node\.cloudprovider\.kubernetes\.io/|ToBeDeletedByClusterAutoscaler"
    r"|\bkarpenter\.sh/"
)
"""Taints that Kubernetes and autoscalers set on nodes that are not ready, or have too little."""
_AFFINITY: Final = "wait until other pods have ended, or correct `affinity` in the job"
_SPREAD: Final = (
    "correct `topology_spread`: nodes need its topologyKey as a label (kubectl get nodes"
    " --show-labels), and whenUnsatisfiable: ScheduleAnyway only prefers it"
)
_OTHER_NODES: Final = (
    "its volume is bound to other nodes or another zone; use a volume that every node reaches"
)
_STEPS: Final = {
    "node(s) didn't have free ports for the requested pod ports": "with host_network each node"
    " takes one replica of a port; use fewer replicas or no host_network",
    "node(s) didn't match PersistentVolume's node affinity": _OTHER_NODES,
    "node(s) had volume node affinity conflict": _OTHER_NODES,
    "node(s) exceed max volume count": "wait until other pods have ended, or mount fewer volumes",
    "node(s) didn't satisfy existing pods anti-affinity rules": "wait until the pods that refuse"
    " others beside them have ended: it is their anti-affinity, not the job's",
    "node(s) didn't match pod anti-affinity rules": _AFFINITY,
    "node(s) didn't match pod affinity rules": _AFFINITY,
    "node(s) didn't match pod topology spread constraints": _SPREAD,
    "node(s) didn't match pod topology spread constraints (missing required label)": _SPREAD,
}


def unschedulable(facts: Facts, pod: ReplicaPod) -> Explanation | None:
    """Why the scheduler finds no node."""
    condition = pod.condition("PodScheduled")
    if not (pod.live and condition.false):
        return None
    # A thousand Pods of one template with the same scheduler message are examined once.
    shape = [pod.spec.get(field) for field in _SHAPE]
    key = repr([condition.message, *shape, pod_requests(pod.spec)])
    if key not in facts.unschedulable:
        facts.unschedulable[key] = _unschedulable(facts, pod, condition)
    return replace(_with_autoscaler(facts, pod, facts.unschedulable[key]), since=condition.since)


def _with_autoscaler(facts: Facts, pod: ReplicaPod, found: Explanation) -> Explanation:
    """The explanation together with what a node autoscaler has recently reported about the Pod.

    The Events are those of the cluster autoscaler; "Nominated" is Karpenter's.
    """
    event = pod.last_event("TriggeredScaleUp", "Nominated", "NotTriggerScaleUp")
    recent = bool(event) and facts.now - event_time(event) <= _SCALE_UP
    if not recent or found.cause is not Cause.UNSCHEDULABLE:
        return found
    message, step = one_line(event.get("message", "")), "wait: a new node takes some minutes"
    if event["reason"] == "NotTriggerScaleUp":
        action = f"adds no node: {message.removeprefix(_ADDS_NONE)}"
        # The nodes that it could add may have the devices.
        step = "have its limits raised" if _CHECK_PLUGIN in found.next_step else found.next_step
    elif event["reason"] == "TriggeredScaleUp":
        action = f"is adding a node ({message.removeprefix(_ADDS)})"
    else:
        action = f"has found a place for it ({message})"
    return replace(found, what=f"{found.what}; the autoscaler {action}", next_step=step)


def _unschedulable(facts: Facts, pod: ReplicaPod, condition: Condition) -> Explanation:
    if condition.reason == "SchedulingGated":
        gates = [gate.get("name", "") for gate in pod.spec.get("schedulingGates") or ()]
        return Explanation(
            Cause.UNSCHEDULABLE,
            f"scheduling gates hold it back: {', '.join(gates)}",
            "whoever set the gate (a queue, a topology controller) must remove it",
        )
    message = condition.message
    if claim := unbound(facts, pod, message):
        return claim
    what, steps = _explain(facts, pod, message)
    steps = steps or [f"for the full message: {_describe(facts)}"]
    return Explanation(Cause.UNSCHEDULABLE, what, "; ".join(steps))


def _explain(facts: Facts, pod: ReplicaPod, message: str) -> tuple[str, list[str]]:
    found = _NODES.match(message)
    # After the first sentence the scheduler speaks of preemption.
    rest = message[found.end() :] if found else ""
    first = re.split(r"\. (?:preemption:|no new claims)|, no new claims", rest)[0]
    reasons = [(int(count), reason) for count, reason in _REASONS.findall(first)]
    if not found or not reasons:
        what = first.rstrip(".") if found else message
        return f"no node accepts it: {what}", [f"for the full message: {_describe(facts)}"]
    explained = [_reason(facts, pod, count, reason) for count, reason in reasons]
    steps = list(dict.fromkeys(step for _, step in explained if step))
    running = sum(one.phase == "Running" for one in facts.pods)
    if running and any("Insufficient" in reason for _, reason in reasons):
        hold, have = ("s hold", "they have") if running > 1 else (" holds", "it has")
        steps.append(
            f"meanwhile {running} replica{hold} what {have}: kueue_queue or gang in the job starts"
            " all of them or none"
        )
    whole = int(found[1])
    none = f"none of {whole} nodes accepts it" if whole != 1 else "the only node does not accept it"
    return f"{none}: {'; '.join(what for what, _ in explained)}", steps


def _reason(facts: Facts, pod: ReplicaPod, count: int, reason: str) -> tuple[str, str]:
    """One reason of the scheduler's in plain words, and the step that removes it."""
    has, have = ("has", "is") if count == 1 else ("have", "are")
    if found := re.match(r"Insufficient (\S+)", reason):
        return _insufficient(facts, pod, count, found[1].rstrip(".,"))
    if reason.startswith("Too many pods"):
        return f"{count} {have} full of pods", "wait until other pods have ended"
    if "taint" in reason:
        taints = _taints(facts, pod) or reason.partition("taint")[2].strip(" (s)")
        what = f"{count} {has} a taint that it does not tolerate"
        step = "if the job may run there, add `tolerations` to it"
        if _TEMPORARY_TAINT.search(reason):
            step = "wait, or have these nodes checked: kubectl get nodes"
        return what + (f" ({taints})" if taints else ""), step
    if "node affinity/selector" in reason:
        return (
            f"{count} lack{'s' * (count == 1)} the labels that it requires{_selector(pod)}",
            "correct node_selector, gpu_type or affinity: kubectl get nodes --show-labels",
        )
    if "unschedulable" in reason:
        return f"{count} {have} cordoned", "wait, or have it uncordoned: kubectl uncordon NODE"
    return f"{count} {reason}", _STEPS.get(reason, "")


def _insufficient(facts: Facts, pod: ReplicaPod, count: int, resource: str) -> tuple[str, str]:
    wanted = pod_requests(pod.spec).get(resource, Decimal())
    asks = f"it requests {as_text(resource, wanted) if wanted else '?'}"
    has = "has" if count == 1 else "have"
    nodes = nodes_of(facts.of_kind("Node"), requested_by_node(facts.of_kind("Pod")))
    # If nodes may not be read, it is unknown whether they have any at all.
    short = f"{count} {has} too little {resource}{' free' if nodes else ''} ({asks})"
    largest = max((node.offers.get(resource, Decimal()) for node in nodes), default=wanted)
    if resource in _CORE:
        field = f"resources.{resource}" if resource != "ephemeral-storage" else "its request"
        if wanted > largest:
            most = as_text(resource, largest)
            never = f"{count} {has} too little {resource} ({asks}, and the largest node has {most})"
            return never, f"waiting will not help: lower {field}, or use more, smaller replicas"
        return short, f"lower {field}, or wait until others have ended"
    step = f"wait until others have ended, or request less (show all: {_describe(facts)})"
    if nodes and not largest:
        step = f"{_CHECK_PLUGIN} of {resource} checked, or correct resources.gpu_resource"
        if resource.startswith("hugepages-"):
            step = "request none, or have nodes reserve huge pages"
        return f"no node offers any {resource} ({asks})", step
    if not nodes:
        return short, step
    if wanted > largest:
        step = (
            f"no node has that many: request at most {largest:f} per replica, and use more replicas"
        )
    return f"{short}: {_offers(facts, nodes, resource)}", step


def _offers(facts: Facts, nodes: Iterable[Node], resource: str) -> str:
    """The amounts that kinds of nodes offer, and how much is free.

    How much is free is known only where the Pods of all namespaces could be read.
    """
    kinds: defaultdict[tuple[str, Decimal], list[Node]] = defaultdict(list)
    for node in nodes:
        if each := node.offers.get(resource):
            kinds[node.product or resource, each].append(node)
    table = []
    for (kind, each), alike in sorted(kinds.items()):
        of_kind = f"{counted(len(alike), 'node')} of {kind} with {each:f}"
        free = sum(node.free(resource) for node in alike)
        table.append(of_kind + (f", {free:f} free in all" if facts.of_kind("Pod") else ""))
    is_one = sum(map(len, kinds.values())) == 1
    return f"there {'is' if is_one else 'are'} {'; '.join(table)}"


def _taints(facts: Facts, pod: ReplicaPod) -> str:
    """The taints of the nodes that the Pod does not tolerate."""
    found = {
        _taint(taint)
        for node in facts.of_kind("Node")
        for taint in Object(node).spec.get("taints") or ()
        if not tolerates(pod.spec, taint)
    }
    return ", ".join(sorted(found)[:5])


def _taint(taint: Json) -> str:
    key = str(taint.get("key", ""))
    if key in ("node.kubernetes.io/not-ready", "node.kubernetes.io/unreachable"):
        return "not ready"
    return f"{key}={taint['value']}" if taint.get("value") else key


def _selector(pod: ReplicaPod) -> str:
    labels = pod.spec.get("nodeSelector") or {}
    asked = [f"{key}={value}" for key, value in labels.items()]
    if pod.part("spec", "affinity").get("nodeAffinity") is not None:
        asked.append("its node affinity")
    return f" ({', '.join(asked)})" if asked else ""


def _describe(facts: Facts) -> str:
    return f"kubectl describe {facts.pods_argument}"


# --- lost and displaced ---------------------------------------------------------------------------


def lost_or_displaced(facts: Facts) -> Iterator[Diagnosis]:
    """Replicas whose node is lost, or that were evicted, preempted or rejected by it."""
    left = displaced(facts)
    lost = {one.replica: one for one in _lost(facts)} if not facts.status.state.finished else {}
    # A lost node's Pods are evicted at last; one that was preempted before has left it.
    preempted = {name for name, one in left.items() if one.cause is Cause.PREEMPTED}
    lost = {name: one for name, one in lost.items() if name not in preempted}
    newest = sorted(left.values(), key=_time, reverse=True)
    found = [*lost.values(), *(one for one in newest if one.replica not in lost)]
    if facts.status.state.finished:
        steps = (one.next_step.replace(_RECREATED, _SUBMIT_AGAIN) for one in found)
        found = [replace(one, next_step=step) for one, step in zip(found, steps, strict=True)]
    yield from grouped(found, facts.now)


def displaced(facts: Facts) -> dict[str, Explanation]:
    """The newest reason why each replica left its node."""
    left: dict[str, Explanation] = {}
    present = (found for pod in facts.pods if (found := _displaced(pod)))
    for one in (*_displaced_before(facts), *present):
        if one.replica not in left or _time(left[one.replica]) <= _time(one):
            left[one.replica] = replace(one, over=facts.runs_again(one.replica))
    return left


def ended_by_displacement(facts: Facts, end: Failure, left: Mapping[str, Explanation]) -> bool:
    """Whether a container ended since its Pod had to leave, or was deleted."""
    pod = facts.pod(end.replica)
    # When a job has ended, its controller deletes the Pods that do not count as ended.
    deleted_before = pod and pod.deleting and not facts.status.state.finished
    if pod and (deleted_before or _displaced(pod) or _ended_by_deletion(pod, end)):
        return True
    found = left.get(end.replica)
    if found is None:
        return False
    newer = pod and pod.created_at and pod.created_at.timestamp() + _STAMP_SECONDS < end.time
    return not newer and end.time <= _time(found) + GRACE_SECONDS


def _ended_by_deletion(pod: ReplicaPod, end: Failure) -> bool:
    """Whether a container was killed after its Pod's deletion had been requested."""
    meta = pod.metadata
    if end.exit_code != SIGKILLED or end.why == "OOMKilled" or not pod.deleting:
        return False
    asked = moment(meta["deletionTimestamp"])  # the end of the grace period
    return asked is not None and end.time > asked.timestamp() - meta.get(
        "deletionGracePeriodSeconds", 0
    )


def _time(found: Explanation) -> float:
    return found.at.timestamp() if found.at else math.inf


def _lost(facts: Facts) -> Iterator[Explanation]:
    nodes = map(Object, facts.of_kind("Node"))
    ready = {node.name: node.condition("Ready") for node in nodes}
    for pod in facts.pods:
        if not pod.node or pod.phase in ("Succeeded", "Failed"):
            continue
        what, since = _unreachable(pod, ready.get(pod.node, Condition()))
        if ("nodes", pod.node) in facts.not_found:
            what, since = "is gone from the cluster", None
        if what:
            yield Explanation(
                Cause.NODE_LOST,
                f"its node {pod.node} {what}",
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
    event = pod.last_event("NodeNotReady")
    if event and pod.condition("Ready").false:
        return "is not ready", event_time(event)
    return ("is lost" if pod.status.get("reason") == "NodeLost" else ""), None


def _displaced(pod: ReplicaPod) -> Explanation | None:
    """Why a Pod that is still there had to leave its node."""
    reason, message = pod.status.get("reason") or "", pod.status.get("message") or ""
    target = pod.condition("DisruptionTarget")
    if target.reason == "PreemptionByScheduler":
        return replace(_preempted(pod.replica, target.message), at=target.since)
    if pod.phase == "Failed" and reason in _EVICTED:
        return replace(_evicted(pod.replica, message), at=target.since)
    if target.true:
        what = f"{_DISRUPTIONS.get(target.reason, target.reason)}: {target.message}"
        return Explanation(Cause.EVICTED, what, _RECREATED, pod.replica, at=target.since)
    known = reason == "UnexpectedAdmissionError" or reason.startswith("OutOf")
    if pod.phase == "Failed" and reason and (known or not pod.status.get("containerStatuses")):
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
    messages = [event.get("message", "") for event in facts.job_events]
    found: dict[str, Explanation] = {}
    for event in facts.snapshot.events:
        subject = Object(event).part("involvedObject")
        uid = subject.get("uid", "")
        if subject.get("kind") != "Pod" or uid in present or not _matters(facts, event):
            continue
        name = subject.get("name", "")
        if _is_of_an_earlier_job(facts, name, messages):
            continue
        one = _of_event(event, facts.target.replica_named(facts.job.raw, name) or name)
        # The kill follows from another reason for leaving the node.
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
    subject = Object(event).part("involvedObject")
    if subject.get("uid", "") in facts.kubelet_kills:
        return False
    if subject.get("fieldPath", "") not in facts.training_fields:
        return False
    by_operator = status.state in (JobState.SUSPENDED, JobState.QUEUED) or (
        status.finished is not None and at >= status.finished
    )
    return not (facts.local or by_operator)


def _of_event(event: Json, replica: str) -> Explanation | None:
    reason, message = event.get("reason"), event.get("message", "")
    if reason == "Preempted":
        return _preempted(replica, message)
    if reason == "Evicted":
        return _evicted(replica, message)
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
    step = _RECREATED
    if re.search(r"ephemeral|EmptyDir", message):
        step = (
            "write less to the container's disk, or request more (resources.extended:"
            f" ephemeral-storage; volumes[].empty_dir.size_limit); {_RECREATED}"
        )
    elif "low on resource: memory" in message:
        step = f"request the memory that it uses (resources.memory); {_RECREATED}"
    what = f"evicted by its node: {message.strip().rstrip('.')}"
    return Explanation(Cause.EVICTED, what, step, replica)

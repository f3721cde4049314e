"""Replicas for which the scheduler finds no node."""

from __future__ import annotations

import re
from collections import defaultdict
from datetime import timedelta
from decimal import Decimal
from typing import TYPE_CHECKING, Final

from k8sjob.contract import counted
from k8sjob.kube.capacity import (
    as_text,
    excluded_nodes,
    nodes_of,
    pod_requests,
    requested_by_node,
    tolerates,
)
from k8sjob.kube.objects import Condition, Object, event_time
from k8sjob.observe.diagnose.finding import Cause, Explanation, best_match, load_rules, one_line
from k8sjob.observe.diagnose.gang import OF_GANG, own_reason
from k8sjob.observe.diagnose.volumes import unbound

if TYPE_CHECKING:
    from collections.abc import Iterable

    from k8sjob.kube.capacity import Node
    from k8sjob.kube.objects import Json
    from k8sjob.observe.diagnose.facts import Facts, ReplicaPod

_NODES: Final = re.compile(r"^\d+/(\d+) nodes are (?:un)?available: ?")
_REASONS: Final = re.compile(r"(?<!\d)(\d++) ((?:Insufficient|Too many|node\(s\)).*?)(?=, \d+ |$)")
_SHAPE: Final = ("schedulingGates", "tolerations", "nodeSelector", "affinity", "volumes")
"""Parts of a Pod's spec that decide where it may go."""
_CORE: Final = frozenset({"cpu", "memory", "ephemeral-storage"})
_SCALE_UP: Final = timedelta(minutes=15)
"""Time within which a node that an autoscaler adds joins the cluster."""
_ADDS: Final = "pod triggered scale-up: "
_ADDS_NONE: Final = "pod didn't trigger scale-up: "
_CHECK_PLUGIN: Final = "have the device plugin"


def unschedulable(facts: Facts, pod: ReplicaPod) -> Explanation | None:
    """Why the scheduler finds no node."""
    condition = pod.condition("PodScheduled")
    if not (pod.live and condition.false):
        return None
    # Pods that only wait for their gang say nothing: the one that fits no node has the reason.
    if OF_GANG.search(condition.message):
        reason, origin = own_reason(facts)
        if origin and _shape(origin) != _shape(pod):
            return None  # it would fit
        if not reason and facts.snapshot.groups:
            return None  # see gang_waits
        condition = condition._replace(message=reason or condition.message)
    # A thousand Pods of one template with the same scheduler message are examined once.
    key = condition.message + _shape(pod)
    if key not in facts.unschedulable:
        facts.unschedulable[key] = _unschedulable(facts, pod, condition)
    return _with_autoscaler(facts, pod, facts.unschedulable[key])._replace(since=condition.since)


def _shape(pod: ReplicaPod) -> str:
    """What decides where a Pod may go, as a key."""
    return repr([*(pod.spec.get(field) for field in _SHAPE), pod_requests(pod.spec)])


def _with_autoscaler(facts: Facts, pod: ReplicaPod, explanation: Explanation) -> Explanation:
    """The explanation together with what a node autoscaler has recently reported about the Pod.

    The Events are those of the cluster autoscaler; "Nominated" is Karpenter's.
    """
    event = pod.last_event("TriggeredScaleUp", "Nominated", "NotTriggerScaleUp")
    recent = bool(event) and facts.now - event_time(event) <= _SCALE_UP
    if not recent or explanation.cause is not Cause.UNSCHEDULABLE:
        return explanation
    message, step = one_line(event.get("message", "")), "wait: a new node takes some minutes"
    if event["reason"] == "NotTriggerScaleUp":
        action = f"adds no node: {message.removeprefix(_ADDS_NONE)}"
        # The nodes that it could add may have the devices.
        step = explanation.next_step
        if _CHECK_PLUGIN in step:
            step = "have its limits raised"
    elif event["reason"] == "TriggeredScaleUp":
        action = f"is adding a node ({message.removeprefix(_ADDS)})"
    else:
        action = f"has found a place for it ({message})"
    problem = f"{explanation.problem}; the autoscaler {action}"
    return explanation._replace(problem=problem, next_step=step)


def _unschedulable(facts: Facts, pod: ReplicaPod, condition: Condition) -> Explanation:
    if condition.reason == "SchedulingGated":
        gates = [gate.get("name", "") for gate in pod.spec.get("schedulingGates") or ()]
        return Explanation(
            Cause.UNSCHEDULABLE,
            f"scheduling gates hold it back: {', '.join(gates)}",
            "whoever set the gate (a queue, a topology controller) must remove it",
        )
    message = condition.message
    # The scheduler looks at claims before nodes: its message has no count and no reason then.
    if claim := unbound(facts, pod, message):
        return claim
    problem, steps = _explain(facts, pod, message)
    steps = steps or [f"for the full message: {_describe(facts)}"]
    return Explanation(Cause.UNSCHEDULABLE, problem, "; ".join(steps))


def _explain(facts: Facts, pod: ReplicaPod, message: str) -> tuple[str, list[str]]:
    nodes = _NODES.match(message)
    # After the first sentence the scheduler speaks of preemption.
    sentences = message[nodes.end() :] if nodes else ""
    sentence = re.split(r"\. (?:preemption:|no new claims)|, no new claims", sentences)[0]
    reasons = [(int(count), reason) for count, reason in _REASONS.findall(sentence.rstrip(". "))]
    if not nodes or not reasons:
        problem = sentence.rstrip(".") if nodes else message
        return f"no node accepts it: {problem}", [f"for the full message: {_describe(facts)}"]
    explained = [_reason(facts, pod, count, reason) for count, reason in reasons]
    steps = list(dict.fromkeys(step for _, step in explained if step))
    running = sum(replica.phase == "Running" for replica in facts.pods)
    if running and any("Insufficient" in reason for _, reason in reasons):
        hold, have = ("s hold", "they have") if running > 1 else (" holds", "it has")
        steps.append(
            f"meanwhile {running} replica{hold} what {have}: kueue_queue or gang in the job starts"
            " all of them or none"
        )
    total = int(nodes[1])
    none = f"none of {total} nodes accepts it" if total != 1 else "the only node does not accept it"
    return f"{none}: {'; '.join(problem for problem, _ in explained)}", steps


def _reason(facts: Facts, pod: ReplicaPod, count: int, reason: str) -> tuple[str, str]:
    """One reason of the scheduler's in plain words, and the step that removes it."""
    if shortage := re.match(r"Insufficient (\S+)", reason):
        return _insufficient(facts, pod, count, shortage[1].rstrip(".,"))
    taints = "taint" in reason and (
        _taints(facts, pod) or reason.partition("taint")[2].strip(" (s)")
    )
    has, are, lack = ("has", "is", "lacks") if count == 1 else ("have", "are", "lack")
    explanation = best_match(
        load_rules("scheduling"),
        reason,
        count=str(count),
        reason=reason,
        taints=f" ({taints})" if taints else "",
        selector=_selector(pod),
        has=has,
        are=are,
        lack=lack,
    )
    step = explanation.next_step
    if (excluded := excluded_nodes(pod.spec)) and "node affinity/selector" in reason:
        step = f"remove {', '.join(excluded)} from policy.avoid_nodes, or {step}"
    return explanation.problem, step


def _insufficient(facts: Facts, pod: ReplicaPod, count: int, resource: str) -> tuple[str, str]:
    request = pod_requests(pod.spec).get(resource, Decimal())
    asks = f"it requests {as_text(resource, request) if request else '?'}"
    has = "has" if count == 1 else "have"
    nodes = nodes_of(facts.of_kind("Node"), requested_by_node(facts.of_kind("Pod")))
    # If nodes may not be read, it is unknown whether they have any at all.
    short = f"{count} {has} too little {resource}{' free' if nodes else ''} ({asks})"
    largest = max((node.offers.get(resource, Decimal()) for node in nodes), default=request)
    if resource in _CORE:
        field = f"resources.{resource}" if resource != "ephemeral-storage" else "its request"
        if request > largest:
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
    if request > largest:
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
    taints = {
        _taint(taint)
        for node in facts.of_kind("Node")
        for taint in Object(node).spec.get("taints") or ()
        if not tolerates(pod.spec, taint)
    }
    return ", ".join(sorted(taints)[:5])


def _taint(taint: Json) -> str:
    key = str(taint.get("key", ""))
    if key in ("node.kubernetes.io/not-ready", "node.kubernetes.io/unreachable"):
        return "not ready"
    return f"{key}={taint['value']}" if taint.get("value") else key


def _selector(pod: ReplicaPod) -> str:
    labels = pod.spec.get("nodeSelector") or {}
    asked = [f"{key}={value}" for key, value in labels.items()]
    if pod.part("spec", "affinity").get("nodeAffinity") is not None:
        excluded = ", ".join(excluded_nodes(pod.spec))
        asked.append("its node affinity" + (f", which excludes {excluded}" if excluded else ""))
    return f" ({', '.join(asked)})" if asked else ""


def _describe(facts: Facts) -> str:
    return f"kubectl describe {facts.pods_argument}"

"""Replicas that no node takes: what is short, on how many nodes, and what there is."""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import replace
from decimal import Decimal
from typing import TYPE_CHECKING, Final

from k8sjob.kube.capacity import as_text, nodes_of, pod_requests, taken, tolerates
from k8sjob.kube.objects import moment
from k8sjob.observe.diagnose.finding import Cause, ReplicaFinding
from k8sjob.observe.diagnose.volumes import unbound

if TYPE_CHECKING:
    from collections.abc import Iterable

    from k8sjob.kube.capacity import Node
    from k8sjob.kube.objects import Json
    from k8sjob.observe.diagnose.facts import Facts, Pod

_NODES: Final = re.compile(r"^\d+/(\d+) nodes are available: ?")
_REASONS: Final = re.compile(r"(\d+) ((?:Insufficient|Too many|node\(s\)).*?)(?=, \d+ |\.? *$)")
_SHAPE: Final = ("schedulingGates", "tolerations", "nodeSelector", "affinity", "volumes")
"""Parts of a Pod's spec that decide where it may go."""
_CORE: Final = frozenset({"cpu", "memory", "ephemeral-storage"})
_STEPS: Final = {
    "node(s) didn't have free ports for the requested pod ports": "with host_network each node"
    " takes one replica of a port; use fewer replicas or no host_network",
    "node(s) didn't match PersistentVolume's node affinity": "its volume is bound to other nodes"
    " or another zone; use a volume that every node reaches",
}


def unschedulable(facts: Facts, pod: Pod) -> ReplicaFinding | None:
    """Why the scheduler finds no node."""
    condition = pod.condition("PodScheduled")
    if condition.get("status") != "False":
        return None
    # A thousand Pods of one template, of which the scheduler says the same, are examined once.
    shape = [pod.spec.get(field) for field in _SHAPE]
    key = repr([condition.get("message"), *shape, pod_requests(pod.spec)])
    if key not in facts.unschedulable:
        facts.unschedulable[key] = _unschedulable(facts, pod, condition)
    since = moment(condition.get("lastTransitionTime"))
    return replace(facts.unschedulable[key], replica=pod.replica, since=since)


def _unschedulable(facts: Facts, pod: Pod, condition: Json) -> ReplicaFinding:
    if condition.get("reason") == "SchedulingGated":
        gates = [gate.get("name", "") for gate in pod.spec.get("schedulingGates") or ()]
        return ReplicaFinding(
            Cause.UNSCHEDULABLE,
            f"it is held back by scheduling gates: {', '.join(gates)}",
            "whoever set the gate (a queue, a topology controller) must lift it",
            pod.replica,
        )
    message = condition.get("message", "")
    if claim := unbound(facts, pod, message):
        return claim
    what, steps = _explain(facts, pod, message)
    return ReplicaFinding(Cause.UNSCHEDULABLE, what, "; ".join(steps), pod.replica)


def _explain(facts: Facts, pod: Pod, message: str) -> tuple[str, list[str]]:
    found = _NODES.match(message)
    # After the first sentence the scheduler speaks of preemption.
    rest = message[found.end() :] if found else ""
    first = re.split(r"\. (?:preemption:|no new claims)|, no new claims", rest)[0]
    reasons = [(int(count), reason) for count, reason in _REASONS.findall(first)]
    if not found or not reasons:
        what = first.rstrip(".") if found else message
        return f"no node takes it: {what}", [f"see all of it: {_describe(facts)}"]
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
    none = f"none of {whole} nodes takes it" if whole != 1 else "the only node does not take it"
    return f"{none}: {'; '.join(what for what, _ in explained)}", steps


def _reason(facts: Facts, pod: Pod, count: int, reason: str) -> tuple[str, str]:
    """One reason of the scheduler's in plain words, and the step that removes it."""
    has, have = ("has", "is") if count == 1 else ("have", "are")
    if found := re.match(r"Insufficient (\S+)", reason):
        return _insufficient(facts, pod, count, found[1].rstrip(".,"))
    if reason.startswith("Too many pods"):
        return f"{count} {have} full of pods", "wait until other pods have ended"
    if "taint" in reason:
        taints = _taints(facts, pod) or reason.partition("taint")[2].strip(" (s)")
        return (
            f"{count} {has} a taint that it does not tolerate" + (f" ({taints})" if taints else ""),
            "if the job may run there, add `tolerations` to it",
        )
    if "node affinity/selector" in reason:
        return (
            f"{count} lack{'s' * (count == 1)} the labels that it asks for{_selector(pod)}",
            "correct node_selector, gpu_type or affinity: kubectl get nodes --show-labels",
        )
    if "unschedulable" in reason:
        return f"{count} {have} cordoned", "wait, or have it uncordoned: kubectl uncordon NODE"
    return f"{count} {reason}", _STEPS.get(reason, "")


def _insufficient(facts: Facts, pod: Pod, count: int, resource: str) -> tuple[str, str]:
    wanted = pod_requests(pod.spec).get(resource, Decimal())
    asks = f"it asks for {as_text(resource, wanted) if wanted else '?'}"
    has = "has" if count == 1 else "have"
    nodes = nodes_of(facts.of_kind("Node"), taken(facts.of_kind("Pod")))
    # Where nodes may not be read it is not known whether they have any at all.
    short = f"{count} {has} too little {resource}{' free' if nodes else ''} ({asks})"
    largest = max((node.offers.get(resource, Decimal()) for node in nodes), default=wanted)
    if resource in _CORE:
        field = f"resources.{resource}" if resource != "ephemeral-storage" else "what it asks for"
        if wanted > largest:
            most = as_text(resource, largest)
            never = f"{count} {has} too little {resource} ({asks}, and the largest node has {most})"
            return never, f"waiting will not help: lower {field}, or use more, smaller replicas"
        return short, f"lower {field}, or wait until others have ended"
    step = f"wait until others have ended, or ask for less (see all: {_describe(facts)})"
    if nodes and not largest:
        return (
            f"no node offers any {resource} ({asks})",
            f"have the device plugin of {resource} checked, or correct resources.gpu_resource",
        )
    if not nodes:
        return short, step
    if wanted > largest:
        step = f"no node is that large: at most {largest:f} a replica; use more replicas of fewer"
    return f"{short}: {_offers(facts, nodes, resource)}", step


def _offers(facts: Facts, nodes: Iterable[Node], resource: str) -> str:
    """What kinds of nodes offer, and how much of it is free.

    How much is free is known only where the Pods of all namespaces could be read.
    """
    kinds: defaultdict[tuple[str, Decimal], list[Node]] = defaultdict(list)
    for node in nodes:
        if each := node.offers.get(resource):
            kinds[node.product or resource, each].append(node)
    table = []
    for (kind, each), alike in sorted(kinds.items()):
        of_kind = f"{len(alike)} node{'s' * (len(alike) > 1)} of {kind} with {each:f}"
        free = sum(node.free(resource) for node in alike)
        table.append(of_kind + (f", {free:f} free in all" if facts.of_kind("Pod") else ""))
    is_one = sum(map(len, kinds.values())) == 1
    return f"there {'is' if is_one else 'are'} {'; '.join(table)}"


def _taints(facts: Facts, pod: Pod) -> str:
    """The taints of the nodes that the Pod does not tolerate."""
    found = {
        _taint(taint)
        for node in facts.of_kind("Node")
        for taint in (node.get("spec") or {}).get("taints") or ()
        if not tolerates(pod.spec, taint)
    }
    return ", ".join(sorted(found)[:5])


def _taint(taint: Json) -> str:
    key = str(taint.get("key", ""))
    if key in ("node.kubernetes.io/not-ready", "node.kubernetes.io/unreachable"):
        return "not ready"
    return f"{key}={taint['value']}" if taint.get("value") else key


def _selector(pod: Pod) -> str:
    labels = pod.spec.get("nodeSelector") or {}
    asked = [f"{key}={value}" for key, value in labels.items()]
    if ((pod.spec.get("affinity") or {}).get("nodeAffinity")) is not None:
        asked.append("its node affinity")
    return f" ({', '.join(asked)})" if asked else ""


def _describe(facts: Facts) -> str:
    return f"kubectl describe {facts.pods_argument}"

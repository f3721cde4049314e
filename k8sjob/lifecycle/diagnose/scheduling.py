"""Replicas that no node takes: what is short, on how many nodes, and what there is."""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import replace
from decimal import Decimal
from typing import TYPE_CHECKING, Final

from k8sjob.backends.capacity import nodes_of, pod_requests, taken, told, tolerates
from k8sjob.backends.events import moment
from k8sjob.labels import JOB_NAME
from k8sjob.lifecycle.diagnose.finding import Cause, Seen
from k8sjob.lifecycle.diagnose.volumes import unbound

if TYPE_CHECKING:
    from collections.abc import Iterable

    from k8sjob.backends.api import Json
    from k8sjob.backends.capacity import Node
    from k8sjob.lifecycle.diagnose.case import Case, Pod

__all__ = ["unschedulable"]

_NODES: Final = re.compile(r"^\d+/(\d+) nodes are available: ?")
_COUNTED: Final = re.compile(r"(\d+) ((?:Insufficient|Too many|node\(s\)).*?)(?=, \d+ |\.? *$)")
_SHAPE: Final = ("schedulingGates", "tolerations", "nodeSelector", "affinity", "volumes")
"""Parts of a Pod's spec that decide where it may go."""
_CORE: Final = frozenset({"cpu", "memory", "ephemeral-storage"})


def unschedulable(case: Case, pod: Pod) -> Seen | None:
    """Why the scheduler finds no node."""
    condition = pod.condition("PodScheduled")
    if condition.get("status") != "False":
        return None
    # A thousand Pods of one template, of which the scheduler says the same, are looked at once.
    shape = [pod.spec.get(field) for field in _SHAPE]
    key = repr([condition.get("message"), *shape, pod_requests(pod.spec)])
    if key not in case.memory:
        case.memory[key] = _unschedulable(case, pod, condition)
    since = moment(condition.get("lastTransitionTime"))
    return replace(case.memory[key], replica=pod.replica, since=since)


def _unschedulable(case: Case, pod: Pod, condition: Json) -> Seen:
    if condition.get("reason") == "SchedulingGated":
        gates = [gate.get("name", "") for gate in pod.spec.get("schedulingGates") or ()]
        return Seen(
            Cause.UNSCHEDULABLE,
            f"it is held back by scheduling gates: {', '.join(gates)}",
            "whoever set the gate (a queue, a topology controller) must lift it",
            pod.replica,
        )
    said = condition.get("message", "")
    claim = unbound(case, pod, said)
    if claim:
        return claim
    what, steps = _told(case, pod, said)
    return Seen(Cause.UNSCHEDULABLE, what, "; ".join(steps), pod.replica)


def _told(case: Case, pod: Pod, said: str) -> tuple[str, list[str]]:
    found = _NODES.match(said)
    if not found:
        return f"no node takes it: {said}", [f"see all of it: {_look(case)}"]
    # After the first sentence the scheduler speaks of preemption.
    first = re.split(r"\. (?:preemption:|no new claims)|, no new claims", said[found.end() :])[0]
    reasons = [(int(count), reason) for count, reason in _COUNTED.findall(first)]
    if not reasons:
        return f"no node takes it: {first.rstrip('.')}", [f"see all of it: {_look(case)}"]
    told = [_words(case, pod, count, reason) for count, reason in reasons]
    whole = int(found[1])
    words = "; ".join(words for words, _ in told)
    steps = list(dict.fromkeys(step for _, step in told if step))
    running = sum(one.phase == "Running" for one in case.pods)
    if running and any("Insufficient" in reason for _, reason in reasons):
        steps.append(
            f"meanwhile {running} replica{'s hold' if running > 1 else ' holds'} what"
            f" {'they have' if running > 1 else 'it has'}: kueue_queue or gang in the job let all"
            " start or none"
        )
    none = f"none of {whole} nodes takes it" if whole != 1 else "the only node does not take it"
    return f"{none}: {words}", steps


def _words(case: Case, pod: Pod, count: int, reason: str) -> tuple[str, str]:
    """One reason of the scheduler's in words, and the step that removes it."""
    has, have = ("has", "is") if count == 1 else ("have", "are")
    if found := re.match(r"Insufficient (\S+)", reason):
        return _short(case, pod, count, found[1].rstrip(".,"))
    if reason.startswith("Too many pods"):
        return f"{count} {have} full of pods", "wait until other pods have ended"
    if "taint" in reason:
        taints = _taints(case, pod) or reason.partition("taint")[2].strip(" (s)")
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


_STEPS: Final = {
    "node(s) didn't have free ports for the requested pod ports": "with host_network each node"
    " takes one replica of a port; use fewer replicas or no host_network",
    "node(s) didn't match PersistentVolume's node affinity": "its volume is bound to other nodes"
    " or another zone; use a volume that every node reaches",
}


def _short(case: Case, pod: Pod, count: int, resource: str) -> tuple[str, str]:
    wanted = pod_requests(pod.spec).get(resource, Decimal())
    asks = f"it asks for {told(resource, wanted) if wanted else '?'}"
    has = "has" if count == 1 else "have"
    nodes = nodes_of(case.of_kind("Node"), taken(case.of_kind("Pod")))
    # Of nodes that may not be read nobody knows whether they have any at all.
    short = f"{count} {has} too little {resource}{' free' if nodes else ''} ({asks})"
    largest = max((node.offers.get(resource, Decimal()) for node in nodes), default=wanted)
    if resource in _CORE:
        field = f"resources.{resource}" if resource != "ephemeral-storage" else "what it asks for"
        if wanted > largest:
            most = told(resource, largest)
            never = f"{count} {has} too little {resource} ({asks}, and the largest node has {most})"
            return never, f"no waiting helps: lower {field}, or use more replicas that are smaller"
        return short, f"lower {field}, or wait until others have ended"
    step = f"wait until others have ended, or ask for less (see all: {_look(case)})"
    if nodes and not largest:
        return (
            f"no node offers any {resource} ({asks})",
            f"have the device plugin of {resource} looked at, or correct resources.gpu_resource",
        )
    if not nodes:
        return short, step
    if wanted > largest:
        step = f"no node is that large: at most {largest:f} a replica; use more replicas of fewer"
    return f"{short}: {_offers(case, nodes, resource)}", step


def _offers(case: Case, nodes: Iterable[Node], resource: str) -> str:
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
        table.append(of_kind + (f", {free:f} free in all" if case.of_kind("Pod") else ""))
    is_one = sum(map(len, kinds.values())) == 1
    return f"there {'is' if is_one else 'are'} {'; '.join(table)}"


def _taints(case: Case, pod: Pod) -> str:
    """The taints of the nodes that the Pod does not tolerate."""
    found = {
        _taint(taint)
        for node in case.of_kind("Node")
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


def _look(case: Case) -> str:
    return f"kubectl describe pods -n {case.namespace} -l {JOB_NAME}={case.name}"

"""Where the Pods of a job may go, and whether there is room for them. Pure.

The scheduler knows more (spreading, other Pods' affinities, volumes that live in one zone); what is
said here about room is what it would say at best.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

from k8sjob.backends.capacity import add, nodes_of, pod_requests, told, tolerates
from k8sjob.backends.references import pod_specs
from k8sjob.doctor.check import fine, problem, unknown, warning

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from k8sjob.backends.api import Json
    from k8sjob.backends.capacity import Amounts, Node
    from k8sjob.doctor.check import Check
    from k8sjob.doctor.facts import Facts

__all__ = ["fit", "refusal"]


def fit(facts: Facts) -> Iterator[Check]:
    """Whether each replica fits on a node at all, and how many of them fit now."""
    if facts.job is None:
        return
    found = facts.items("nodes")
    if found is None:
        seen = "whether the job fits is not known: the nodes may not be read"
        yield unknown("fit", seen, "ask for manifests/rbac/cluster-viewer.yaml")
        return
    nodes = nodes_of(found, facts.usage or {})
    never = [check for role, _, pod in pod_specs(facts.job) if (check := _never(role, pod, nodes))]
    yield from never
    if not never and facts.usage is None:
        seen = "each replica fits on an empty node; what is free now is not known"
        yield unknown("fit", seen, "ask for manifests/rbac/capacity.yaml")
    elif not never:
        yield _now(facts.job, nodes)


def _never(role: str, pod: Json, nodes: Sequence[Node]) -> Check | None:
    """Why no replica of the role can run, however long it waits; None where one can."""
    reasons = Counter(why for node in nodes if (why := refusal(node, pod)))
    possible = [node for node in nodes if not refusal(node, pod)]
    if not possible:
        details = tuple(f"{count} nodes: {why}" for why, count in reasons.most_common())
        step = "correct node_selector, tolerations, affinity or gpu_type in the job.yaml"
        return problem("fit", f"no node takes a {role}", step, details=details)
    need = pod_requests(pod)
    if any(_holds(node.offers, need) for node in possible):
        return None
    short = {
        what: best
        for what, asked in need.items()
        if (best := max(node.offers.get(what, asked * 0) for node in possible)) < asked
    }
    said = ", ".join(
        f"{what} {told(what, need[what])} (the largest has {told(what, best)})"
        for what, best in short.items()
    )
    said = said or "all of " + ", ".join(f"{what} {told(what, n)}" for what, n in need.items())
    return problem(
        "fit",
        f"a {role} is too large for every node, even for an empty one: it asks for {said}",
        "ask for less in resources, or for more replicas that are smaller",
    )


def _now(job: Json, nodes: Sequence[Node]) -> Check:
    """How many replicas find room now, each put on the fullest node that has it."""
    room: dict[str, Amounts] = {
        node.name: {what: node.free(what) for what in node.offers} for node in nodes
    }
    placed = wanted = 0
    for _, count, pod in pod_specs(job):
        need = pod_requests(pod)
        possible = [node.name for node in nodes if not refusal(node, pod)]
        rare = max(need, key=lambda what: ("/" in what, what))  # a device, where one is asked for
        for _ in range(count):
            wanted += 1
            fitting = [name for name in possible if _holds(room[name], need)]
            if not fitting:
                continue
            name = min(fitting, key=lambda each: room[each].get(rare, 0))
            add(room[name], {what: -amount for what, amount in need.items()})
            placed += 1
    if placed == wanted:
        return fine("fit", f"all {wanted} replicas fit now")
    return warning(
        "fit",
        f"{placed} of {wanted} replicas fit now; those hold what they have while the others wait",
        "wait for other jobs to end, make the job smaller, or use gang scheduling (gang)",
    )


def _holds(room: Mapping[str, Any], need: Amounts) -> bool:
    return all(room.get(what, 0) >= amount for what, amount in need.items() if amount)


def refusal(node: Node, pod: Json) -> str:
    """Why a Pod of that spec is not put on the node; empty where it may be."""
    if node.trouble:
        return node.trouble
    for key, value in (pod.get("nodeSelector") or {}).items():
        if node.labels.get(key) != value:
            return f"no label {key}={value}"
    for taint in node.taints:
        if not tolerates(pod, taint):
            return f"taint {taint.get('key')}={taint.get('value', '')}"
    affinity = ((pod.get("affinity") or {}).get("nodeAffinity") or {}).get(
        "requiredDuringSchedulingIgnoredDuringExecution"
    ) or {}
    terms = affinity.get("nodeSelectorTerms")
    if terms and not any(_matches(node, term) for term in terms):
        return "node affinity"
    return ""


def _matches(node: Node, term: Json) -> bool:
    fields = all(
        _holds_for({"metadata.name": node.name}, one) for one in term.get("matchFields") or ()
    )
    return fields and all(
        _holds_for(node.labels, one) for one in term.get("matchExpressions") or ()
    )


def _holds_for(labels: Mapping[str, str], expression: Json) -> bool:
    """Whether a requirement of a node selector holds."""
    value, values = labels.get(expression.get("key", "")), expression.get("values") or ()
    match expression.get("operator"):
        case "In":
            return value in values
        case "NotIn":
            return value not in values
        case "Exists":
            return value is not None
        case "DoesNotExist":
            return value is None
        case "Gt" | "Lt" as order if value and value.isdecimal() and values:
            return int(value) > int(values[0]) if order == "Gt" else int(value) < int(values[0])
        case _:
            return False

"""Checks of the nodes: which are there, which GPUs are free, and whether the job's Pods fit.

The scheduler knows more (spreading, other Pods' affinities, volumes that live in one zone): what is
found here about room is what it would find at best.
"""

from __future__ import annotations

from collections import Counter
from decimal import Decimal
from typing import TYPE_CHECKING, Any, Final

from k8sjob.checks.doctor.check import fine, problem, unknown, warning
from k8sjob.kube.capacity import add, as_text, devices, nodes_of, pod_requests, tolerates
from k8sjob.kube.objects import at_path
from k8sjob.targets.jobs import pod_specs

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from k8sjob.checks.doctor.check import Check, Facts
    from k8sjob.kube.capacity import Amounts, Node
    from k8sjob.kube.objects import Json

_REQUIRED: Final = (
    *("affinity", "nodeAffinity", "requiredDuringSchedulingIgnoredDuringExecution"),
    "nodeSelectorTerms",
)
_SHOWN: Final = 8
"""Nodes that are named one by one."""


def nodes(facts: Facts) -> Iterator[Check]:
    """How many nodes there are, and how many take Pods."""
    found = facts.items("nodes")
    if found is None:
        yield unknown(
            "nodes",
            "you may not read the nodes, so what is free is not known",
            "ask for manifests/rbac/cluster-viewer.yaml, or the cluster's administrator",
        )
        return
    all_nodes = nodes_of(found, {})
    trouble = tuple(f"{node.name}: {node.trouble}" for node in all_nodes if node.trouble)
    seen = f"{len(all_nodes) - len(trouble)} of {len(all_nodes)} nodes take pods"
    if len(trouble) == len(all_nodes):
        step = "no pod can be scheduled; ask the cluster's administrator"
        yield problem("nodes", seen, step, details=_some(trouble))
    else:
        yield fine("nodes", seen, details=_some(trouble))


def free_devices(facts: Facts) -> Iterator[Check]:
    """What is free of each kind of GPU or other device, in all and on each node."""
    found = facts.items("nodes")
    if found is None:
        return
    all_nodes = nodes_of(found, facts.usage or {})
    kinds = devices(all_nodes)
    for (resource, model), those in kinds.items():
        yield _kind(facts, resource, model, those)
    bare = [node.name for node in all_nodes if node.lacks_plugin]
    if bare:
        yield warning(
            "devices",
            f"{len(bare)} nodes have an NVIDIA card and offer no nvidia.com/gpu, as {bare[0]}",
            "have NVIDIA's device plugin (or its GPU operator) installed, and look at its pods",
        )
    elif not kinds:
        yield fine("devices", "no node offers GPUs or other devices: jobs on CPUs alone")


def _kind(facts: Facts, resource: str, model: str, those: Sequence[Node]) -> Check:
    name = f"{resource} ({model})" if model else resource
    whole = sum((node.offers[resource] for node in those), Decimal())
    if facts.usage is None:
        return unknown(
            "devices",
            f"{name}: {whole} on {len(those)} nodes; how many are free is not known, since"
            " you may not read the pods of all namespaces",
            "ask for manifests/rbac/capacity.yaml",
        )
    free = sum((node.free(resource) for node in those), Decimal())
    order = sorted(those, key=lambda node: (-node.free(resource), node.name))
    details = _some(tuple(_line(node, resource) for node in order))
    seen = f"{name}: {free} of {whole} free"
    if free:
        return fine("devices", seen, details=details)
    return warning("devices", seen, "a job that asks for them waits its turn", details=details)


def _line(node: Node, resource: str) -> str:
    taints = ", ".join(
        f"{taint.get('key')}={taint.get('value', '')}:{taint.get('effect')}"
        for taint in node.taints
        if taint.get("effect") in {"NoSchedule", "NoExecute"}
    )
    line = f"{node.name}: {node.free(resource)} of {node.offers[resource]} free"
    line += f", {node.trouble}" if node.trouble else ""
    return line + (f"; only for jobs that tolerate {taints}" if taints else "")


def _some(lines: tuple[str, ...]) -> tuple[str, ...]:
    if len(lines) <= _SHOWN + 1:
        return lines
    return (*lines[:_SHOWN], f"... and {len(lines) - _SHOWN} more nodes")


def fit(facts: Facts) -> Iterator[Check]:
    """Whether each replica fits on a node at all, and how many of them fit now."""
    if facts.job is None:
        return
    found = facts.items("nodes")
    if found is None:
        seen = "whether the job fits is not known: you may not read the nodes"
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
        for what, amount in need.items()
        if (best := max(node.offers.get(what, amount * 0) for node in possible)) < amount
    }
    asked = {what: f"{what} {as_text(what, amount)}" for what, amount in need.items()}
    reason = ", ".join(
        f"{asked[what]} (the largest has {as_text(what, best)})" for what, best in short.items()
    ) or "all of " + ", ".join(asked.values())
    return problem(
        "fit",
        f"a {role} is too large for every node, even for an empty one: it asks for {reason}",
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
        f"{placed} of {wanted} replicas fit now; they hold their resources while the others wait",
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
    terms = at_path(pod, *_REQUIRED)
    if terms and not any(_matches(node, term) for term in terms):
        return "node affinity"
    return ""


def _matches(node: Node, term: Json) -> bool:
    of_name, labels = {"metadata.name": node.name}, node.labels
    return all(_holds_for(of_name, one) for one in term.get("matchFields") or ()) and all(
        _holds_for(labels, one) for one in term.get("matchExpressions") or ()
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

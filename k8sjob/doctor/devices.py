"""Checks of the nodes: are they there, and which GPUs of them are free. Pure."""

from __future__ import annotations

from decimal import Decimal
from typing import TYPE_CHECKING, Final

from k8sjob.backends.capacity import devices, nodes_of
from k8sjob.doctor.check import fine, problem, unknown, warning

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from k8sjob.backends.capacity import Node
    from k8sjob.doctor.check import Check
    from k8sjob.doctor.facts import Facts

__all__ = ["free_devices", "nodes"]

_SHOWN: Final = 8
"""Nodes that are named one by one."""


def nodes(facts: Facts) -> Iterator[Check]:
    """How many nodes there are, and how many take Pods."""
    found = facts.items("nodes")
    if found is None:
        yield unknown(
            "nodes",
            "the nodes may not be read, so what is free is not known",
            "ask for manifests/rbac/cluster-viewer.yaml, or who keeps the cluster",
        )
        return
    all_nodes = nodes_of(found, {})
    trouble = tuple(f"{node.name}: {node.trouble}" for node in all_nodes if node.trouble)
    seen = f"{len(all_nodes) - len(trouble)} of {len(all_nodes)} nodes take pods"
    if len(trouble) == len(all_nodes):
        step = "no pod can be scheduled; ask whoever keeps the cluster"
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
            f"{name}: {whole} on {len(those)} nodes; how many are free is not known, since the"
            " pods of all namespaces may not be read",
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

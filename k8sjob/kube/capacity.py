"""Capacity: what nodes offer, what Pods request of it, what is free. Pure.

A Pod counts with its requests, as the scheduler counts: the sum of its containers or its largest
init container, whichever is more, and its overhead. A Pod that has ended takes nothing.
"""

from __future__ import annotations

import re
from collections import defaultdict
from contextlib import suppress
from dataclasses import dataclass, field
from decimal import Decimal
from typing import TYPE_CHECKING, Any, Final

from k8sjob.kube.objects import REQUIRED_AFFINITY, Object, Pod, at_path
from k8sjob.kube.quantity import parse

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from k8sjob.kube.objects import Json

_REQUIRED: Final = ("affinity", "nodeAffinity", REQUIRED_AFFINITY, "nodeSelectorTerms")
Amounts = dict[str, Decimal]
"""By resource: cores, bytes, counts."""
_GPUS: Final = r"/(?![^/]*(?:mem|core))[^/]*gpu|/mig-"


def amounts(quantities: Any) -> Amounts:
    """Quantities as numbers; what is not a quantity is left out."""
    parsed: Amounts = {}
    for resource, text in (quantities or {}).items():
        with suppress(ValueError):
            parsed[resource] = parse(str(text))
    return parsed


def counts_gpus(resource: str) -> bool:
    """Whether a resource counts GPUs or parts of them: nvidia.com/gpu, nvidia.com/mig-1g.5gb.

    Those of sharing plugins that count memory or cores do not: aliyun.com/gpu-mem.
    """
    return bool(re.search(_GPUS, resource.lower()))


def as_text(resource: str, amount: Decimal) -> str:
    """An amount for people: bytes as 31.2Gi, cores as 3.5, others as they are."""
    if resource.rpartition(".")[2] in {"memory", "storage", "ephemeral-storage"}:
        for power, suffix in ((40, "Ti"), (30, "Gi"), (20, "Mi"), (10, "Ki")):
            if abs(amount) >= 2**power:
                return f"{amount / 2**power:.1f}".removesuffix(".0") + suffix
    return f"{amount.normalize():f}"


def add(to: Amounts, more: Mapping[str, Decimal]) -> None:
    """Add amounts to others, in place."""
    for resource, amount in more.items():
        to[resource] = to.get(resource, Decimal()) + amount


# --- nodes and Pods -------------------------------------------------------------------------------

_PRODUCTS: Final = (
    "nvidia.com/gpu.product",
    "amd.com/gpu.product-name",
    "cloud.google.com/gke-accelerator",
    "accelerator",
)
"""Labels of a node that name the model of its GPUs."""
_GPU_CARDS: Final = ("feature.node.kubernetes.io/pci-10de.present", "nvidia.com/gpu.present")
"""Labels of a node with a GPU of NVIDIA's, whether a device plugin runs or not."""


@dataclass(frozen=True, slots=True)
class Node:
    """A node, and what its Pods request.

    Attributes:
        trouble: why nothing is scheduled there, as "cordoned" or "not ready"; empty if it is.
        offers: allocatable, by resource.
        used: requested by its Pods; empty if that is not known.
    """

    name: str
    labels: Mapping[str, str] = field(default_factory=dict)
    taints: tuple[Json, ...] = ()
    trouble: str = ""
    offers: Mapping[str, Decimal] = field(default_factory=dict)
    used: Mapping[str, Decimal] = field(default_factory=dict)

    def free(self, resource: str) -> Decimal:
        """The amounts that a Pod could still request; nothing if the node accepts no Pods."""
        if self.trouble:
            return Decimal()
        remaining = self.offers.get(resource, Decimal()) - self.used.get(resource, Decimal())
        return max(remaining, Decimal())

    @property
    def product(self) -> str:
        """The model of its GPUs, where a label has it."""
        return next((self.labels[key] for key in _PRODUCTS if self.labels.get(key)), "")

    @property
    def lacks_plugin(self) -> bool:
        """Whether labels show GPUs that it does not offer."""
        card = any(self.labels.get(key) == "true" for key in _GPU_CARDS)
        return card and not any(name.startswith("nvidia.com/") for name in self.offers)


def nodes_of(items: Iterable[Json], usage: Mapping[str, Amounts]) -> list[Node]:
    """The nodes of a NodeList, with what is requested on each by its name."""
    nodes = []
    for node in map(Object, items):
        # Unknown counts as not ready: the node has not reported for a while.
        ready = node.condition("Ready").true
        trouble = "cordoned" if node.spec.get("unschedulable") else "" if ready else "not ready"
        taints = tuple(node.spec.get("taints") or ())
        offers, used = amounts(node.status.get("allocatable")), usage.get(node.name, {})
        nodes.append(Node(node.name, node.labels, taints, trouble, offers, used))
    return nodes


def requested_by_node(pods: Iterable[Json]) -> dict[str, Amounts]:
    """The requests of Pods by the name of their node; those without a node are left out."""
    usage: dict[str, Amounts] = {}
    for pod in map(Pod, pods):
        if pod.node and pod.live:
            add(usage.setdefault(pod.node, {}), pod_requests(pod.spec))
    return usage


def pod_requests(spec: Json, group: str = "requests") -> Amounts:
    """The amounts that the scheduler reserves for a Pod of that spec, with `pods: 1` for itself.

    With the group "limits" it is what a quota counts as such.
    """
    always: Amounts = {}
    peak: Amounts = {}
    for container in spec.get("initContainers") or ():
        asked = asked_by(container, group)
        # Sidecars keep running beside all that starts later; other init containers run one after
        # the other, so the largest of them counts.
        if container.get("restartPolicy") == "Always":
            add(always, asked)
            asked = dict(always)
        else:
            add(asked, always)
        _raise(peak, asked)
    total = dict(always)
    for container in spec.get("containers") or ():
        add(total, asked_by(container, group))
    _raise(total, peak)
    add(total, amounts(spec.get("overhead")))
    return total | {"pods": Decimal(1)}


def tolerates(pod: Json, taint: Json) -> bool:
    """Whether a Pod of that spec may be put on a node with that taint."""
    # PreferNoSchedule is only a preference.
    if taint.get("effect") not in {"NoSchedule", "NoExecute"}:
        return True
    return any(_covers(toleration, taint) for toleration in pod.get("tolerations") or ())


def _covers(toleration: Json, taint: Json) -> bool:
    if toleration.get("effect") not in {None, "", taint.get("effect")}:
        return False
    exists = toleration.get("operator") == "Exists"
    # Without a key Exists tolerates the taints of all keys.
    if not toleration.get("key"):
        return exists
    if toleration["key"] != taint.get("key"):
        return False
    return exists or (toleration.get("value") or "") == (taint.get("value") or "")


def asked_by(container: Json, group: str = "requests") -> Amounts:
    """The requests or the limits of a container."""
    resources = container.get("resources") or {}
    limits = amounts(resources.get("limits"))
    # The apiserver takes a limit for a request that is not there.
    return limits if group == "limits" else limits | amounts(resources.get("requests"))


def refusal(node: Node, pod: Json) -> str:
    """Why a Pod of that spec is not put on the node; empty if it may be."""
    if node.trouble:
        return node.trouble
    for key, value in (pod.get("nodeSelector") or {}).items():
        if node.labels.get(key) != value:
            return f"no label {key}={value}"
    for taint in node.taints:
        if not tolerates(pod, taint):
            return f"taint {taint.get('key')}={taint.get('value', '')}"
    # One term is enough; of a term all requirements must hold.
    terms = at_path(pod, *_REQUIRED)
    if terms and not any(_matches(node, term) for term in terms):
        return "node affinity"
    return ""


def excluded_nodes(pod: Json) -> list[str]:
    """The nodes that the affinity of a Pod of that spec excludes by their names."""
    return sorted(
        {
            name
            for term in at_path(pod, *_REQUIRED) or ()
            for field in term.get("matchFields") or ()
            if field.get("operator") == "NotIn"
            for name in field.get("values") or ()
        }
    )


def _matches(node: Node, term: Json) -> bool:
    of_name, labels = {"metadata.name": node.name}, node.labels
    return all(
        holds_for(of_name, requirement) for requirement in term.get("matchFields") or ()
    ) and all(holds_for(labels, requirement) for requirement in term.get("matchExpressions") or ())


def holds_for(labels: Mapping[str, str], expression: Json) -> bool:
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
        # A label that is no number fits neither.
        case "Gt" | "Lt" as order if value and value.isdecimal() and values:
            return int(value) > int(values[0]) if order == "Gt" else int(value) < int(values[0])
        case _:
            return False


def devices(nodes: Iterable[Node]) -> dict[tuple[str, str], list[Node]]:
    """The nodes that offer GPUs or other devices, by resource and model."""
    offering: defaultdict[tuple[str, str], list[Node]] = defaultdict(list)
    for node in nodes:
        for resource, amount in node.offers.items():
            domain, slash, _ = resource.partition("/")
            # Extended resources have a domain; cpu and hugepages-2Mi have none, and kubernetes.io
            # is that of Kubernetes itself.
            if slash and amount and not domain.endswith("kubernetes.io"):
                model = node.product if "gpu" in resource else ""
                offering[resource, model].append(node)
    return dict(sorted(offering.items()))


def _raise(to: Amounts, requested: Mapping[str, Decimal]) -> None:
    for resource, amount in requested.items():
        to[resource] = max(to.get(resource, Decimal()), amount)

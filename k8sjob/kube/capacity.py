"""Quantities, and capacity: what nodes offer, what Pods request of it, what is free. Pure.

A quantity is as in Kubernetes' apimachinery (resource.Quantity) `number[suffix]`: decimal suffixes
n u m k M G T P E, binary ones Ki Mi Gi Ti Pi Ei, or an exponent. Note that `400m` of memory is 0.4
bytes, and that `1E` is an exa while `1E3` is an exponent.

A Pod counts with its requests, as the scheduler counts: the sum of its containers or its largest
init container, whichever is more, and its overhead. A Pod that has ended takes nothing.
"""

from __future__ import annotations

import re
from collections import defaultdict
from contextlib import suppress
from dataclasses import dataclass, field
from decimal import ROUND_UP, Context, Decimal
from typing import TYPE_CHECKING, Any, Final

from k8sjob.kube.objects import Object, Pod, is_true

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from k8sjob.kube.objects import Json

# --- quantities -----------------------------------------------------------------------------------

Amounts = dict[str, Decimal]
"""By resource: cores, bytes, counts."""
_SUFFIXES: Final = ("n", "u", "m", "", "k", "M", "G", "T", "P", "E")
_DECIMAL: Final = {suffix: 3 * power for power, suffix in enumerate(_SUFFIXES, -3)}
_BINARY: Final = {"Ki": 10, "Mi": 20, "Gi": 30, "Ti": 40, "Pi": 50, "Ei": 60}
"""The powers of ten, and of two, that suffixes stand for."""
_FORM: Final = re.compile(
    r"([+-]?)(\d+\.?\d*|\.\d+)(?:([KMGTPE]i)|([eE][+-]?\d+)|([numkMGTPE]?))", re.ASCII
)
_NANO: Final = -9
_LONGEST: Final = 100
MAX: Final = Decimal(2**63 - 1)
"""Largest quantity that Kubernetes can add up."""
_EXACT: Final = Context(prec=200)


def _split(text: str) -> tuple[Decimal, str]:
    """The value and its family ("binary", "exponent", "decimal"); ValueError for no quantity."""
    match = _FORM.fullmatch(text) if len(text) <= _LONGEST else None
    if match is None:
        raise ValueError(f"{text!r} is not a quantity")
    sign, digits, binary, exponent, suffix = match.groups()
    number = Decimal(sign + digits)
    if binary:
        # Upstream caps binary quantities alone; decimal ones may go beyond.
        value = min(_EXACT.multiply(number.copy_abs(), Decimal(2 ** _BINARY[binary])), MAX)
        family, value = "binary", value.copy_sign(number)
    else:
        family = "exponent" if exponent else "decimal"
        power = int(exponent[1:]) if exponent else _DECIMAL[suffix]
        if abs(power) > _LONGEST:
            raise ValueError(f"{text!r} is not a quantity")
        value = number.scaleb(power, _EXACT)
    if value.as_tuple()[2] < _NANO:  # type: ignore[operator]  # neither NaN nor infinite here
        value = value.quantize(Decimal(1).scaleb(_NANO), ROUND_UP, _EXACT)
    if family == "binary" and (abs(value) < 1024 or value != value.to_integral_value()):
        family = "decimal"
    return value, family


def parse(text: str) -> Decimal:
    """The quantity's value: bytes, cores, pieces. Finer than a nano is rounded up, as upstream.

    Raises:
        ValueError: the text is not a quantity.
    """
    return _split(text)[0]


def canonical(text: str) -> str:
    """The quantity as the apiserver writes it: "1024Mi" is "1Gi", "0.5" is "500m", "1000" is "1k".

    Raises:
        ValueError: the text is not a quantity.
    """
    value, family = _split(text)
    if not value:
        return "0"
    if family == "binary":
        number, suffix = int(value), ""
        for name in _BINARY:
            if number % 1024:
                break
            number, suffix = number // 1024, name
        return f"{number}{suffix}"
    sign, digits, exponent = value.normalize(_EXACT).as_tuple()
    assert isinstance(exponent, int)  # noqa: S101 - neither NaN nor infinite here
    power = exponent - exponent % 3
    if family == "decimal":
        power = min(power, max(_DECIMAL.values()))
    number = int("".join(map(str, digits))) * 10 ** (exponent - power) * (-1 if sign else 1)
    if family == "exponent":
        return f"{number}e{power}" if power else str(number)
    return str(number) + next(name for name, each in _DECIMAL.items() if each == power)


def amounts(quantities: Any) -> Amounts:
    """Quantities as numbers; what is not a quantity is left out."""
    found: Amounts = {}
    for resource, text in (quantities or {}).items():
        with suppress(ValueError):
            found[resource] = parse(str(text))
    return found


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
        used: requested by its Pods; empty where that is not known.
    """

    name: str
    labels: Mapping[str, str] = field(default_factory=dict)
    taints: tuple[Json, ...] = ()
    trouble: str = ""
    offers: Mapping[str, Decimal] = field(default_factory=dict)
    used: Mapping[str, Decimal] = field(default_factory=dict)

    def free(self, resource: str) -> Decimal:
        """What a Pod could still request; nothing where the node accepts no Pods."""
        if self.trouble:
            return Decimal()
        left = self.offers.get(resource, Decimal()) - self.used.get(resource, Decimal())
        return max(left, Decimal())

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
    found = []
    for node in map(Object, items):
        ready = is_true(node.status, "Ready")
        trouble = "cordoned" if node.spec.get("unschedulable") else "" if ready else "not ready"
        taints = tuple(node.spec.get("taints") or ())
        offers, used = amounts(node.status.get("allocatable")), usage.get(node.name, {})
        found.append(Node(node.name, node.labels, taints, trouble, offers, used))
    return found


def taken(pods: Iterable[Json]) -> dict[str, Amounts]:
    """What Pods request, by the name of their node; those without a node are left out."""
    usage: dict[str, Amounts] = {}
    for pod in map(Pod, pods):
        if pod.node and pod.live:
            add(usage.setdefault(pod.node, {}), pod_requests(pod.spec))
    return usage


def pod_requests(spec: Json, group: str = "requests") -> Amounts:
    """What the scheduler reserves for a Pod of that spec, itself included as `pods: 1`.

    With the group "limits" it is what a quota counts as such.
    """
    always: Amounts = {}
    peak: Amounts = {}
    for container in spec.get("initContainers") or ():
        asked = _asked(container, group)
        if container.get("restartPolicy") == "Always":  # a sidecar
            add(always, asked)
            asked = dict(always)
        else:
            add(asked, always)
        _raise(peak, asked)
    total = dict(always)
    for container in spec.get("containers") or ():
        add(total, _asked(container, group))
    _raise(total, peak)
    add(total, amounts(spec.get("overhead")))
    return total | {"pods": Decimal(1)}


def tolerates(pod: Json, taint: Json) -> bool:
    """Whether a Pod of that spec may be put on a node with that taint."""
    if taint.get("effect") not in {"NoSchedule", "NoExecute"}:
        return True
    return any(_covers(toleration, taint) for toleration in pod.get("tolerations") or ())


def _covers(toleration: Json, taint: Json) -> bool:
    if toleration.get("effect") not in {None, "", taint.get("effect")}:
        return False
    exists = toleration.get("operator") == "Exists"
    if not toleration.get("key"):
        return exists
    if toleration["key"] != taint.get("key"):
        return False
    return exists or (toleration.get("value") or "") == (taint.get("value") or "")


def _asked(container: Json, group: str) -> Amounts:
    resources = container.get("resources") or {}
    limits = amounts(resources.get("limits"))
    # The apiserver takes a limit for a request that is not there.
    return limits if group == "limits" else limits | amounts(resources.get("requests"))


def devices(nodes: Iterable[Node]) -> dict[tuple[str, str], list[Node]]:
    """The nodes that offer GPUs or other devices, by resource and model."""
    found: defaultdict[tuple[str, str], list[Node]] = defaultdict(list)
    for node in nodes:
        for resource, amount in node.offers.items():
            domain, slash, _ = resource.partition("/")
            if slash and amount and not domain.endswith("kubernetes.io"):
                model = node.product if "gpu" in resource else ""
                found[resource, model].append(node)
    return dict(sorted(found.items()))


def _raise(to: Amounts, other: Mapping[str, Decimal]) -> None:
    for resource, amount in other.items():
        to[resource] = max(to.get(resource, Decimal()), amount)

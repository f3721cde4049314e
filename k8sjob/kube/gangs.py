"""PodGroups of Volcano and of the coscheduling plugin, and Volcano's Queues. Pure.

Phases, states and annotations: volcano.sh/apis 1.15, scheduling/v1beta1; scheduler-plugins 0.34.
"""

from __future__ import annotations

import re
from decimal import Decimal
from typing import TYPE_CHECKING, Final

from k8sjob.kube.capacity import amounts, as_text
from k8sjob.kube.objects import Object

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from k8sjob.kube.capacity import Amounts
    from k8sjob.kube.objects import Json

VOLCANO: Final = "scheduling.volcano.sh/v1beta1"
COSCHEDULING: Final = "scheduling.x-k8s.io/v1alpha1"
DEFAULT_QUEUE: Final = "default"
GANG_QUEUE: Final = "scheduling.volcano.sh/queue-name"
"""An annotation of Pods, and of a TrainingRuntime's template: the Queue of their PodGroup."""
VOLCANO_SCHEDULER: Final = "volcano"
POD_GROUP: Final = "PodGroup"
_COUNTED: Final = re.compile(r"(?:requests|limits)\.|count/")
"""What Volcano adds to a group's resources for ResourceQuotas."""


def group_names(pods: Iterable[Json]) -> set[str]:
    """The PodGroups of some Pods: Volcano names one in an annotation, coscheduling in a label."""
    at = "scheduling.k8s.io/group-name", "scheduling.x-k8s.io/pod-group"
    names = (pod.annotations.get(at[0]) or pod.labels.get(at[1], "") for pod in map(Object, pods))
    return {name for name in names if name}


def groups_of(job: Object, pods: Iterable[Json], groups: Iterable[Json]) -> list[Json]:
    """The PodGroups that an object owns, or that its Pods name."""
    names = {(job.namespace, name) for name in group_names(pods)}
    return [
        group.raw
        for group in map(Object, groups)
        if (group.namespace, group.name) in names
        or any(owner.get("uid") == job.uid for owner in group.owners)
    ]


def queue_of(group: Json) -> str:
    """The name of a PodGroup's Queue; empty for the coscheduling plugin, which has none."""
    name = Object(group).spec.get("queue") or DEFAULT_QUEUE
    return str(name) if group.get("apiVersion") == VOLCANO else ""


def needs_of(group: Json) -> Amounts:
    """What a PodGroup requests in all, if it says so."""
    needs = amounts(Object(group).spec.get("minResources"))
    return {name: amount for name, amount in needs.items() if not _COUNTED.match(name)}


def is_queued(group: Json) -> bool:
    """Whether Volcano has not admitted a PodGroup to its Queue.

    Until then the training operator creates no Pod, and others' Pods are not looked at.
    """
    return bool(queue_of(group)) and Object(group).status.get("phase") in {None, "", "Pending"}


def obstacle(name: str, queue: Json | None, needs: Amounts) -> str:
    """Why a Queue never admits a gang with these requests; empty as far as is known.

    `queue` is the Queue of this name; empty if there is none, None if it is not known.
    """
    if queue is None:
        return ""
    if not queue:
        return f"there is no queue {name!r}"
    if not (state := Object(queue).status.get("state")):
        return f"the queue {name!r} has no state: Volcano's controllers do not run"
    if state != "Open":
        return f"the queue {name!r} is {state}"
    short = excess(needs, amounts(Object(queue).spec.get("capability")))
    usage = use_of(queue, short)
    return f"the gang needs more than the queue {name!r} may have: {usage}" if short else ""


def excess(needs: Amounts, most: Mapping[str, Decimal]) -> Amounts:
    """The needs that are more than a limit."""
    return {name: need for name, need in needs.items() if need > most.get(name, need)}


def use_of(queue: Json, needs: Amounts) -> str:
    """How much of the limited resources a gang needs, and how much of the Queue is in use."""
    most = amounts(Object(queue).spec.get("capability"))
    used = amounts(Object(queue).status.get("allocated"))
    return "; ".join(
        f"{as_text(name, needs[name])} {name} needed,"
        f" {as_text(name, used.get(name, Decimal()))} of {as_text(name, most[name])} in use"
        for name in sorted(needs.keys() & most.keys())
    )

"""PodGroups of Volcano and of the coscheduling plugin, and Volcano's Queues. Pure.

Phases, states and annotations: volcano.sh/apis 1.15, scheduling/v1beta1; scheduler-plugins 0.34.
"""

from __future__ import annotations

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
GANG_QUEUE: Final = "scheduling.volcano.sh/queue-name"
"""An annotation of Pods, and of a TrainingRuntime's template: the Queue of their PodGroup."""
VOLCANO_SCHEDULER: Final = "volcano"
POD_GROUP: Final = "PodGroup"
_COUNTED: Final = ("requests.", "limits.", "count/")
"""What Volcano adds to a group's resources for ResourceQuotas."""


def group_names(job: Object, pods: Iterable[Json]) -> set[tuple[str, str]]:
    """The apiVersion and name of each PodGroup that Pods name.

    Without Pods: of the one that the training operator, or Volcano for its own Job, makes first.
    """
    names: set[tuple[str, str | None]] = set()
    for pod in map(Object, pods):
        names.add((VOLCANO, pod.annotations.get("scheduling.k8s.io/group-name")))
        names.add((COSCHEDULING, pod.labels.get("scheduling.x-k8s.io/pod-group")))
    by_volcano = str(job.raw.get("apiVersion")).startswith("batch.volcano.sh/")
    names = names or {(VOLCANO, f"{job.name}-{job.uid}" if by_volcano else job.name)}
    return {(version, name) for version, name in names if name}


def queue_name(request: Json) -> str:
    """The Queue that a PodGroup's spec, or a job's request for one, names."""
    return str(request.get("queue") or "default")


def queue_of(group: Json) -> str:
    """The name of a PodGroup's Queue; empty for the coscheduling plugin, which has none."""
    return queue_name(Object(group).spec) if group.get("apiVersion") == VOLCANO else ""


def needs_of(group: Json) -> Amounts:
    """What a PodGroup requests in all, if it says so."""
    needs = amounts(Object(group).part("spec", "minResources"))
    return {name: amount for name, amount in needs.items() if not name.startswith(_COUNTED)}


def is_queued(group: Json) -> bool:
    """Whether Volcano has not admitted a PodGroup to its Queue.

    Until then the training operator creates no Pod, and others' Pods are not looked at.
    """
    return bool(queue_of(group)) and (Object(group).status.get("phase") or "Pending") == "Pending"


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
    short = excess(needs, amounts(Object(queue).part("spec", "capability")))
    usage = use_of(queue, short)
    return f"the gang needs more than the queue {name!r} may have: {usage}" if short else ""


def excess(needs: Amounts, most: Mapping[str, Decimal]) -> Amounts:
    """The needs that are more than a limit."""
    return {name: need for name, need in needs.items() if need > most.get(name, need)}


def use_of(queue: Json, needs: Amounts) -> str:
    """How much of the limited resources a gang needs, and how much of the Queue is in use."""
    most = amounts(Object(queue).part("spec", "capability"))
    used = amounts(Object(queue).part("status", "allocated"))
    return "; ".join(
        f"{as_text(name, needs[name])} {name} needed,"
        f" {as_text(name, used.get(name, Decimal()))} of {as_text(name, most[name])} in use"
        for name in sorted(needs.keys() & most.keys())
    )

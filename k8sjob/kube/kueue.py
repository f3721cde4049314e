"""Kueue's objects (kueue.x-k8s.io/v1beta2): whether a queue admits a job, now or ever. Pure.

Conditions, reasons and rules are those of Kueue 0.19: apis/kueue/v1beta2, pkg/controller/core,
pkg/cache/scheduler/clusterqueue.go and pkg/scheduler/flavorassigner.
"""

from __future__ import annotations

from decimal import Decimal
from typing import TYPE_CHECKING, Final

from k8sjob.kube.capacity import add, amounts, as_text, holds_for
from k8sjob.kube.objects import Condition, Object

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from k8sjob.kube.capacity import Amounts
    from k8sjob.kube.objects import Json

MIN_PARALLELISM: Final = "kueue.x-k8s.io/job-min-parallelism"
"""An annotation of a Job: so few Pods may be admitted."""
_CLOSED: Final = {
    "Stopped": "is stopped (spec.stopPolicy)",
    "ClusterQueueDoesNotExist": "belongs to ClusterQueue {cluster}, which does not exist",
    "ClusterQueueIsInactive": "belongs to ClusterQueue {cluster}, which is inactive",
}
"""Why the condition Active of a LocalQueue is False, by its reason."""


def workloads_of(uid: str, objects: Iterable[Json]) -> list[Object]:
    """The Workloads among some objects that the job with this uid owns."""
    workloads = [Object(related) for related in objects if related.get("kind") == "Workload"]
    return [
        workload
        for workload in workloads
        if any(owner.get("uid") == uid for owner in workload.owners)
    ]


def cluster_queue(local: Json) -> str:
    """The name of a LocalQueue's ClusterQueue."""
    return str(Object(local).spec.get("clusterQueue") or "")


def closed(local: Json, cluster: Json | None) -> str:
    """Why a LocalQueue admits no job at present; empty if nothing is known against it.

    Args:
        local: the LocalQueue.
        cluster: its ClusterQueue; empty if that does not exist, None if it is not known.
    """
    name, of = Object(local).name, cluster_queue(local)
    # The ClusterQueue goes first: the condition of the LocalQueue repeats it with less detail.
    active = Object(cluster or {}).condition("Active")
    if cluster == {}:
        active = Condition("False", "ClusterQueueDoesNotExist")
    elif active.false:
        why = f"{active.reason}: {active.message.rstrip('.')}"
        return f"the LocalQueue {name} belongs to ClusterQueue {of}, which is inactive: {why}"
    else:
        active = Object(local).condition("Active")
    if not active.false:
        return ""
    why = _CLOSED.get(active.reason, f"is inactive: {active.reason}")
    return f"the LocalQueue {name} {why}".format(cluster=of)


def selects(cluster: Json, labels: Mapping[str, str]) -> bool:
    """Whether a ClusterQueue takes jobs of a namespace with these labels."""
    selector = Object(cluster).spec.get("namespaceSelector")
    if selector is None:  # not {}, which is all of them
        return False
    equal = (selector.get("matchLabels") or {}).items() <= labels.items()
    return equal and all(
        holds_for(labels, requirement) for requirement in selector.get("matchExpressions") or ()
    )


def excess(cluster: Json, pods: Iterable[tuple[int, Amounts]]) -> Iterator[tuple[str, bool]]:
    """The amounts of a job that even an empty ClusterQueue cannot hold.

    Args:
        cluster: the ClusterQueue. In a cohort it may borrow, without a borrowingLimit any amount.
        pods: how many Pods there are of each role, and what one of them requests.

    Yields:
        A resource of which there is too little, in a sentence, and whether there is any quota.
    """
    spec, pods = Object(cluster).spec, list(pods)
    borrows = bool(spec.get("cohortName"))
    quotas: dict[str, list[Decimal | None]] = {}  # resource -> the flavors' limits
    for group in spec.get("resourceGroups") or ():
        for flavor in group.get("flavors") or ():
            for quota in flavor.get("resources") or ():
                quotas.setdefault(quota["name"], []).append(_max_amount(quota, borrows=borrows))
    total: Amounts = {}
    for count, each in pods:
        add(total, {resource: amount * count for resource, amount in each.items()})
    for resource, amount in total.items():
        limits = quotas.get(resource)
        if limits is None:
            # Kueue counts Pods only where a ClusterQueue has a quota for them.
            if amount and resource != "pods":
                yield f"ClusterQueue {Object(cluster).name} has no quota for {resource}", False
            continue
        numbers = [limit for limit in limits if limit is not None]
        # A flavor that may borrow any amount can always hold the job.
        if len(numbers) < len(limits):
            continue
        # All Pods of a role get one flavor; those of another role may get another one.
        largest = max(count * each.get(resource, Decimal()) for count, each in pods)
        if amount > sum(numbers) or largest > max(numbers):
            has = " or ".join(as_text(resource, limit) for limit in numbers)
            asks = f"the job requests {as_text(resource, amount)} of {resource}"
            yield f"{asks}, and ClusterQueue {Object(cluster).name} has at most {has}", True


def _max_amount(quota: Json, *, borrows: bool) -> Decimal | None:
    """The most of a resource that a flavor can have; None if that is not known."""
    limits = amounts({key: quota.get(key) for key in ("nominalQuota", "borrowingLimit")})
    if borrows and "borrowingLimit" not in limits:
        return None
    return sum(limits.values(), Decimal())

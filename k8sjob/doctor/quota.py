"""Checks of what a namespace may use: quotas and limits, and what the job would take. Pure."""

from __future__ import annotations

from decimal import Decimal
from typing import TYPE_CHECKING, Final

from k8sjob.backends.capacity import add, amounts, told
from k8sjob.backends.references import pod_specs
from k8sjob.doctor.check import fine, problem, unknown, warning
from k8sjob.doctor.needs import quota_need, unsaid

if TYPE_CHECKING:
    from collections.abc import Iterator

    from k8sjob.backends.api import Json
    from k8sjob.backends.capacity import Amounts
    from k8sjob.doctor.check import Check
    from k8sjob.doctor.facts import Facts

__all__ = ["limits", "quotas"]

_NEARLY: Final = Decimal("0.9")


def quotas(facts: Facts) -> Iterator[Check]:
    """What ResourceQuotas leave, and whether the job fits in."""
    found = facts.items("quotas")
    if found is None:
        yield unknown(
            "quota",
            f"the quotas of {facts.namespace} may not be read",
            "ask for manifests/rbac/viewer.yaml",
        )
        return
    if not found:
        yield fine("quota", f"{facts.namespace} has no ResourceQuota")
    need = quota_need(facts.job) if facts.job else {}
    for quota in found:
        name = (quota.get("metadata") or {}).get("name", "")
        scoped = bool(quota["spec"].get("scopes") or quota["spec"].get("scopeSelector"))
        yield _one(name, quota.get("status") or {}, {} if scoped else need)
        hard = (quota.get("status") or {}).get("hard") or ()
        if facts.job and not scoped and (lacking := unsaid(facts.job, hard, _filled(facts))):
            yield problem(
                "quota",
                f"{name} wants every container to say {', '.join(lacking)}; the job's do not",
                "set resources.cpu and resources.memory in the job.yaml",
            )


def _one(name: str, status: Json, need: Amounts) -> Check:
    hard, used = amounts(status.get("hard")), amounts(status.get("used"))
    lines = tuple(
        f"{what}: {told(what, used.get(what, Decimal()))} of {told(what, limit)} used"
        + (f", the job adds {told(what, need[what])}" if need.get(what) else "")
        for what, limit in hard.items()
    )
    over = [what for what, limit in hard.items() if used.get(what, 0) + need.get(what, 0) > limit]
    near = [what for what, limit in hard.items() if used.get(what, Decimal()) >= limit * _NEARLY]
    if over and need:
        step = "make the job smaller, delete other jobs, or ask for a larger quota"
        return problem("quota", f"{name} has too little {', '.join(over)}", step, details=lines)
    if near:
        step = "delete finished jobs, or ask for a larger quota"
        return warning("quota", f"{name} is nearly used up: {', '.join(near)}", step, details=lines)
    return fine("quota", f"{name} has room", details=lines)


def _filled(facts: Facts) -> set[str]:
    """What LimitRanges fill in where a container does not state it, as "limits.memory"."""
    filled = {
        f"{group}.{resource}"
        for limit_range in facts.items("limit ranges") or ()
        for item in (limit_range.get("spec") or {}).get("limits") or ()
        for group, key in (("limits", "default"), ("requests", "defaultRequest"))
        for resource in item.get(key) or ()
    }
    return filled | {what.replace("limits.", "requests.") for what in filled}


def limits(facts: Facts) -> Iterator[Check]:
    """What LimitRanges allow one container or Pod, and whether the job asks for more."""
    for limit_range in facts.items("limit ranges") or ():
        name = (limit_range.get("metadata") or {}).get("name", "")
        for item in (limit_range.get("spec") or {}).get("limits") or ():
            most = amounts(item.get("max"))
            if most and item.get("type") in {"Container", "Pod"}:
                yield _limit(name, item["type"], most, facts.job or {})


def _limit(name: str, kind: str, most: Amounts, job: Json) -> Check:
    over = tuple(
        f"{role}: {what} {told(what, asked[what])}"
        for role, _, pod in pod_specs(job)
        for asked in _limits_of(pod, kind)
        for what in most
        if asked.get(what, 0) > most[what]
    )
    allowed = ", ".join(f"{what} {told(what, limit)}" for what, limit in most.items())
    seen = f"{name} allows a {kind.lower()} at most {allowed}"
    if not over:
        return fine("limits", seen)
    step = "ask for less in resources, or have the LimitRange raised"
    return problem("limits", f"{seen}; the job asks for more", step, details=over)


def _limits_of(pod: Json, kind: str) -> list[Amounts]:
    """The limits of each container, or of the whole Pod."""
    each = [
        amounts((container.get("resources") or {}).get("limits"))
        for container in pod.get("containers") or ()
    ]
    if kind == "Container":
        return each
    whole: Amounts = {}
    for one in each:
        add(whole, one)
    return [whole]

"""Why a gang waits: the PodGroup of Volcano or of the coscheduling plugin, and Volcano's Queue.

Pods are only made once Volcano has admitted the PodGroup to its queue, so the operator is silent
until then.
"""

from __future__ import annotations

import re
import shlex
from datetime import timedelta
from decimal import Decimal
from typing import TYPE_CHECKING, Final

from k8sjob.findings import Finding
from k8sjob.kube import gangs
from k8sjob.kube.capacity import add, as_text, nodes_of, pod_requests
from k8sjob.kube.objects import Object, in_time, moment
from k8sjob.observe.diagnose.finding import Cause, age, one_line

if TYPE_CHECKING:
    from collections.abc import Iterator

    from k8sjob.kube.capacity import Amounts
    from k8sjob.kube.objects import Json
    from k8sjob.observe.diagnose.facts import Facts, ReplicaPod

OF_GANG: Final = re.compile(
    "in gang unschedulable|pod group is not ready|once minAvailable is satisfied|waiting on permit"
    "|cannot find enough sibling pods|optimistic rejection|rejection in Unreserve|resource gap: "
)
"""A message about a Pod that only waits for the others of its gang."""
_GAP: Final = re.compile(r"([^\s:\[]+):\{\{(\d{1,18}) (-?\d{1,3})\}")
"""A quantity in "resource gap: map[nvidia.com/gpu:{{6 0} {<nil>}  DecimalSI}]": 6 * 10^0."""
_LOOKED_AT: Final = timedelta(seconds=8)
"""Volcano's scheduler looks at a new PodGroup within a second or two."""
_ORIGIN: Final = re.compile(r"Origin reason is \S+: (.+)", re.DOTALL)


def own_reason(facts: Facts) -> tuple[str, ReplicaPod | None]:
    """What the scheduler says of the first Pod that is not kept by the others of its gang.

    And the Pod; None where another Pod of the gang quotes it.
    """
    quoted = ""
    for pod in facts.pods:
        condition = pod.condition("PodScheduled")
        if origin := _ORIGIN.search(condition.message):
            quoted = quoted or origin[1]
        elif condition.reason == "Unschedulable" and not OF_GANG.search(condition.message):
            return condition.message, pod
    return quoted, None


def gang_waits(facts: Facts) -> Iterator[Finding]:
    """A PodGroup that is not admitted, where the Pods, if there are any, do not say why."""
    if facts.status.state.finished or own_reason(facts)[0] or any(pod.node for pod in facts.pods):
        return
    groups = [Object(group) for group in facts.snapshot.groups]
    for group in groups:
        # From "Inqueue" on Volcano has admitted the group, and lets its Pods be created.
        if gangs.is_queued(group.raw) or facts.pods:
            needs = gangs.needs_of(group.raw)
            # Trainer counts no requests that a limit implies.
            for pod in () if needs else facts.pods:
                add(needs, pod_requests(pod.spec))
            hindrance = _hindrance(facts, group, needs)
            yield _never(*hindrance) if hindrance else _waits(facts, group, needs)
    if facts.job.gang is not None and not (groups or facts.pods):
        name, created = gangs.queue_name(facts.job.gang), facts.status.created
        if problem := gangs.obstacle(name, _queue(facts, name), {}):
            yield _never(problem, _another_queue(facts, name))
        # Coscheduling's operator creates the Pods together with the PodGroup.
        elif ("queues", "") in facts.not_found and created and facts.now - created > _LOOKED_AT:
            problem = (
                "no gang scheduler is installed: the cluster does not serve Volcano's PodGroups"
            )
            yield _never(problem, "have Volcano installed, or submit the job without gang")


def _never(problem: str, step: str) -> Finding:
    return Finding(Cause.NO_QUEUE, f"the job cannot start: {problem}", step)


def _queue(facts: Facts, name: str) -> Json | None:
    """Volcano's Queue; empty if there is none, None if it is not known."""
    if ("queues", name) in facts.not_found:
        return {}
    return next((queue for queue in facts.of_kind("Queue") if Object(queue).name == name), None)


def _another_queue(facts: Facts, name: str) -> str:
    # Volcano's own Job names it in its spec.
    field = "spec.queue" if "queue" in facts.job.spec else f"the annotation {gangs.GANG_QUEUE}"
    field = "gang.queue in the job" if facts.target.controller.gang_flag else field
    return f"change {field}; kubectl describe queues.scheduling.volcano.sh {shlex.quote(name)}"


def _hindrance(facts: Facts, group: Object, needs: Amounts) -> tuple[str, str] | None:
    """Why a PodGroup never starts, whatever other jobs do, and the next step."""
    name, since = gangs.queue_of(group.raw), moment(group.created)
    if name and (problem := gangs.obstacle(name, _queue(facts, name), needs)):
        return problem, _another_queue(facts, name)
    total: Amounts = {}
    for node in nodes_of(facts.of_kind("Node"), {}):
        add(total, dict.fromkeys(needs, Decimal()) | dict(node.offers))
    if short := gangs.excess(needs, total):
        table = "; ".join(
            f"{as_text(resource, need)} {resource} of {as_text(resource, total[resource])}"
            for resource, need in sorted(short.items())
        )
        problem = f"its {_pods(group)} need more than all nodes have: {table}"
        return problem, "request less, or use fewer replicas"
    # Volcano's controllers make a group of Pods that name none, and give it the phase Pending.
    looked_at = (group.status.get("phase") or not name) and (
        not facts.pods or any(pod.condition("PodScheduled") for pod in facts.pods)
    )
    if looked_at or not since or facts.now - since <= _LOOKED_AT:
        return None
    scheduler = facts.pods[0].spec.get("schedulerName") if facts.pods else gangs.VOLCANO_SCHEDULER
    problem = f"the scheduler {scheduler!r} has not looked at its PodGroup"
    step = "check whether that scheduler runs in the cluster"
    return f"{problem}, for {age(since, facts.now)}", step


def _waits(facts: Facts, group: Object, needs: Amounts) -> Finding:
    """That a PodGroup waits for what others have, and for what as far as is known."""
    name, since = gangs.queue_of(group.raw), moment(group.created)
    messages = [group.condition("Unschedulable").message] + [
        event.get("message", "")
        for event in in_time([*facts.of_kind("Event"), *facts.snapshot.events])
        if Object(event).part("involvedObject").get("kind") == gangs.POD_GROUP
    ]
    # The newest, but what is about a queue says more than what is about the gang.
    messages.sort(key=lambda message: not OF_GANG.search(message))
    reason = one_line(next(filter(None, (_gap(facts), *reversed(messages))), ""))
    message = f"its PodGroup of {_pods(group)} waits"
    message += f" in the queue {name!r}" if name else ""
    message += f", for {age(since, facts.now)}" if since else ""
    use = gangs.use_of(_queue(facts, name) or {}, needs)
    reason = "" if use and OF_GANG.search(reason) else reason
    message += ": " * bool(reason or use) + "; ".join(filter(None, (reason, use)))
    step = "all of its pods start together when others end; earlier with fewer replicas"
    step += f", or {_another_queue(facts, name)}" if name else ""
    return Finding(Cause.QUEUED, message, step)


def _pods(group: Object) -> str:
    return f"{group.spec.get('minMember') or ''} pods".lstrip()


def _gap(facts: Facts) -> str:
    """What all nodes together lack for the gang, as the coscheduling plugin has counted."""
    lacks = {
        f"{as_text(name, Decimal(amount).scaleb(int(exponent)))} {name}"
        for pod in facts.pods
        for name, amount, exponent in _GAP.findall(pod.condition("PodScheduled").message)
    }
    return f"all nodes together lack {', '.join(sorted(lacks))}" if lacks else ""

"""Why a gang waits: the PodGroup of Volcano or of the coscheduling plugin, and Volcano's Queue.

Phases and conditions: volcano.sh/apis, scheduling/v1beta1. Pods are only made once Volcano has
admitted the PodGroup to its queue, so the operator is silent until then.
"""

from __future__ import annotations

import re
import shlex
from decimal import Decimal
from typing import TYPE_CHECKING, Final

from k8sjob.findings import Finding
from k8sjob.kube.capacity import amounts, as_text
from k8sjob.kube.objects import Object, in_time, moment
from k8sjob.observe.diagnose.finding import Cause, age, one_line

if TYPE_CHECKING:
    from collections.abc import Iterator

    from k8sjob.observe.diagnose.facts import Facts

OF_GANG: Final = re.compile(r"in gang unschedulable|pod group is not ready|waiting on permit")
"""A message about a Pod that only waits for the others of its gang."""
_ORIGIN: Final = re.compile(r"Origin reason is \S+: (.+)", re.DOTALL)


def own_reason(facts: Facts) -> str:
    """What the scheduler says of the first Pod that is not kept by the others of its gang."""
    for pod in facts.pods:
        condition = pod.condition("PodScheduled")
        message = condition.message
        if origin := _ORIGIN.search(message):
            return origin[1]
        if condition.reason == "Unschedulable" and message and not OF_GANG.search(message):
            return message
    return ""


def gang_waits(facts: Facts) -> Iterator[Finding]:
    """A PodGroup that is not admitted, where the Pods, if there are any, do not say why."""
    if facts.status.state.finished or own_reason(facts) or any(pod.node for pod in facts.pods):
        return
    for group in map(Object, facts.of_kind("PodGroup")):
        # From "Inqueue" on Volcano has admitted the group, and lets its Pods be created.
        if group.status.get("phase") in (None, "", "Pending"):
            yield _explained(facts, group)


def _explained(facts: Facts, group: Object) -> Finding:
    queue, size = str(group.spec.get("queue") or "default"), group.spec.get("minMember")
    queues = {queue.name: queue for queue in map(Object, facts.of_kind("Queue"))}
    room = queues.get(queue, Object({}))
    look = f"kubectl describe queues.scheduling.volcano.sh {shlex.quote(queue)}"
    step = f"change gang.queue in the job; {look}"
    needs, most = amounts(group.spec.get("minResources")), amounts(room.spec.get("capability"))
    limited = sorted(needs.keys() & most.keys())
    short = [name for name in limited if needs[name] > most[name]]
    used = amounts(room.status.get("allocated"))
    table = "; ".join(
        f"{as_text(name, needs[name])} {name} needed, {as_text(name, used.get(name, Decimal()))} of"
        f" {as_text(name, most[name])} in use"
        for name in (short or limited)
    )
    never = f"its {size} pods need more than the queue {queue!r} may have: {table}" if short else ""
    if (state := room.status.get("state") or "Open") != "Open":
        never = f"the queue {queue!r} is {state}"
    if ("queues", queue) in facts.not_found:
        never = f"there is no queue {queue!r}"
    if never:
        return Finding(Cause.NO_QUEUE, f"the job cannot start: {never}", step)
    events = (
        event.get("message", "")
        for event in in_time([*facts.of_kind("Event"), *facts.snapshot.events])
        if Object(event).part("involvedObject").get("kind") == "PodGroup"
    )
    messages = [group.condition("Unschedulable").message, *events]
    of_queue = [message for message in messages if not OF_GANG.search(message)]  # these say more
    reason = one_line(next(filter(None, (*reversed(of_queue), *reversed(messages))), ""))
    since = moment(group.created)
    has_queue = str(group.raw.get("apiVersion")).startswith("scheduling.volcano.sh/")
    message = f"its PodGroup of {size} pods waits"
    message += f" in the queue {queue!r}" if has_queue else ""
    message += f", for {age(since, facts.now)}" if since else ""
    message += ": " * bool(reason or table) + "; ".join(filter(None, (reason, table)))
    start = "all of its pods start together when others end; earlier with fewer replicas"
    return Finding(Cause.QUEUED, message, f"{start}, or {step}" if has_queue else start)

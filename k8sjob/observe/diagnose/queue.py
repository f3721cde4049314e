"""Why a job waits in a queue of Kueue's, from its Workload and the queue's objects.

Nothing here says that a job starts by itself unless Kueue has a Workload of it that waits for what
others give back. Conditions, reasons and texts: Kueue 0.19, pkg/workload, pkg/scheduler,
pkg/scheduler/flavorassigner and pkg/controller/core/workload_controller.go.
"""

from __future__ import annotations

import re
import shlex
from collections import defaultdict
from datetime import timedelta
from decimal import Decimal
from operator import attrgetter
from typing import TYPE_CHECKING, Final

from k8sjob.findings import Finding, listed
from k8sjob.kube.capacity import amounts, as_text
from k8sjob.kube.kueue import closed, cluster_queue, workloads_of
from k8sjob.kube.objects import PRIORITY, QUEUE, Condition, Object, moment
from k8sjob.observe.diagnose.finding import Cause, age, ago, load_data, one_line
from k8sjob.targets.api import JobState

if TYPE_CHECKING:
    from collections.abc import Iterator

    from k8sjob.kube.objects import Json
    from k8sjob.observe.diagnose.facts import Facts

_NO_WORKLOAD: Final = timedelta(seconds=8)
"""Kueue makes the Workload of a new job within a second."""
_SHORT: Final = re.compile(r"insufficient (?:unused )?quota for (\S+) in flavor ([^\s,;]+)")
_PREEMPTOR: Final = re.compile(r"\(UID: ([^,()]++), JobUID: ([^,()]++)\)")


def queued(facts: Facts) -> Iterator[Finding]:
    """Kueue has not admitted the job yet, and why; or it never will."""
    if facts.status.state is not JobState.QUEUED or facts.snapshot.groups:
        return
    queue = facts.job.labels[QUEUE]
    workloads = workloads_of(facts.status.ref.uid, facts.related)
    workload = max(workloads, key=attrgetter("created"), default=Object({})).raw
    if hindrance := _closed(facts, queue) or _never(facts, workload):
        problem, step = hindrance
        yield Finding(Cause.NO_QUEUE, f"the job cannot start: {problem}", step)
        return
    reserved = Object(workload).condition("QuotaReserved")
    evicted = Object(workload).condition("Evicted")
    stopped = evicted if evicted.true else Condition()
    since = stopped.since or moment(Object(workload).created) or facts.status.created
    look = f"kubectl describe workloads -n {facts.namespace} {Object(workload).name}".rstrip()
    step, order, again = f"see what is ahead of it: {look}", "", False
    if not workload:
        reason = "you cannot read Kueue's Workloads, or it has made none yet"
    elif reserved.true:
        checks = _undecided_checks(workload)
        reason = f"it has its quota, and waits for {checks}" if checks else "it has its quota"
        if checks:
            step = f"ask Kueue's administrator who decides that check; {look} shows its state"
    else:
        # Kueue passes over a Workload of the same shape as one that has just found no room: it has
        # no condition for as long as that one waits.
        reason = one_line(reserved.message or "Kueue has not considered it yet")
        if stopped and reserved.message == stopped.message:
            reason = "it needs its quota again"
        order = _jobs_ahead(facts, workload, queue)
        # The next one, or one that lacks something else, waits for no other job.
        again = _has(reserved.message, "waits") or ("ahead" in order and not reserved)
    message = f"the job has waited in the queue {queue!r}"
    message += f" for {age(since, facts.now)}" if since else ""
    message += f": {reason}{_holders(facts, reason)}{order}{_stopped(facts, workload, stopped)}"
    if again:
        step = "it starts when they end; earlier with a higher kueue_priority_class,"
        step += f" another queue, or smaller requests ({look})"
    yield Finding(Cause.QUEUED, message, step)


def _closed(facts: Facts, queue: str) -> tuple[str, str] | None:
    """Why the queue admits no job, and the next step; None as far as is known."""
    without = "or remove kueue_queue from the job and submit it with --replace"
    start = f"start it without a queue: k8sjob resume {facts.job_argument}; or"
    if ("localqueues", "") in facts.not_found:
        problem = "Kueue is not installed in this cluster (kueue.x-k8s.io/v1beta2)"
        return problem, f"{start} have Kueue installed"
    if ("localqueues", queue) in facts.not_found:
        shown = f"kubectl get localqueues -n {facts.namespace} shows the existing ones"
        problem = f"there is no queue {queue!r} in namespace {facts.namespace}"
        return problem, f"correct kueue_queue ({shown}), {without}"
    # Kueue reads a job when it changes, and not when a class or a setting does.
    look = f"make Kueue look again: kubectl label {facts.kubectl_name} --overwrite k8sjob/look=now"
    priority = facts.job.labels.get(PRIORITY, "")
    if ("workloadpriorityclasses", priority) in facts.not_found:
        problem = f"there is no WorkloadPriorityClass {priority!r}, so Kueue ignores the job"
        shown = "kubectl get workloadpriorityclasses shows the existing ones"
        return problem, f"have it created, then {look}; or correct kueue_priority_class ({shown})"
    created = facts.status.created
    if ("workloads", "") in facts.not_found and created and facts.now - created > _NO_WORKLOAD:
        waited = age(created, facts.now)
        problem = f"Kueue has made no Workload for it in {waited}: it is not running,"
        problem += f" or does not manage {facts.target.kind}s in namespace {facts.namespace}"
        step = (
            f"{start} check whether its controller runs, have {facts.target.kueue_framework} added"
        )
        step += " to integrations.frameworks in its settings, and the namespace to"
        return problem, f"{step} managedJobsNamespaceSelector, then {look}"
    for local in facts.of_kind("LocalQueue"):
        name = cluster_queue(local)
        clusters = facts.of_kind("ClusterQueue")
        cluster = next((c for c in clusters if Object(c).name == name), None)
        gone = ("clusterqueues", name) in facts.not_found
        if reason := closed(local, {} if gone else cluster):
            look = f"(kubectl get clusterqueue {shlex.quote(name)})"
            return reason, f"ask Kueue's administrator to correct it {look}"
    return None


def _never(facts: Facts, workload: Json) -> tuple[str, str] | None:
    """Why this Workload is not admitted whatever other jobs do, and the next step."""
    name = Object(workload).name
    # Kueue does so itself, too: when a check rejects the Workload, or its Pods were never ready.
    if Object(workload).spec.get("active") is False:
        reason = one_line(Object(workload).condition("Evicted").message)
        cause = f"its Workload is deactivated{': ' * bool(reason)}{reason}"
        patch = f"kubectl patch workload {name} -n {facts.namespace} --type merge"
        return cause, f'remove the cause, then {patch} -p \'{{"spec":{{"active":true}}}}\''
    finished = Object(workload).condition("Finished")
    if finished.true:
        reason = f"{finished.reason}: {one_line(finished.message)}"
        return f"its Workload has ended: {reason}", "submit it again with --replace"
    reserved = Object(workload).condition("QuotaReserved")
    reason = one_line(reserved.message)
    if not reserved.false:
        return None
    if reserved.reason == "AdmissionGated":
        return reason, "whoever set that annotation of the job must remove it"
    # Kueue reports the roles in one text: one that can never fit keeps all of them from starting.
    of_roles = reason.split("couldn't assign flavors to pod set")
    if any(_has(part, "never") and not _has(part, "waits") for part in of_roles):
        return reason, "request less or other nodes, use another queue, or have the queue corrected"
    return None


def _has(text: str, kind: str) -> bool:
    return any(part in text for part in load_data("queue")[kind])


def _undecided_checks(workload: Json) -> str:
    """The admission checks that keep a Workload from starting, with what they say."""
    return ", ".join(
        f"the admission check {check.get('name')} ({check.get('state')}"
        f"{': ' * bool(check.get('message'))}{one_line(check.get('message') or '')})"
        for check in Object(workload).status.get("admissionChecks") or ()
        if check.get("state") != "Ready"
    )


def _stopped(facts: Facts, workload: Json, evicted: Condition) -> str:
    """That Kueue stopped the job before, when, and for whom."""
    if not evicted:
        return ""
    reason = f"{evicted.reason}: {one_line(evicted.message)}"
    if preemptor := _PREEMPTOR.search(evicted.message):
        workloads = facts.of_kind("Workload")
        jobs = (_job_of(w) for w in workloads if Object(w).uid == preemptor[1])
        job = next(jobs, f"the job with the uid {preemptor[2]}")
        reason = f"preempted by {job} ({Object(workload).condition('Preempted').reason})"
    retry = Object(workload).part("status", "requeueState").get("requeueAt")
    when = ago(evicted.since, facts.now)
    return f"; Kueue stopped it{when}: {reason}" + (
        f", and tries again at {retry}" if retry else ""
    )


def _holders(facts: Facts, reason: str) -> str:
    """The jobs that hold the quota that is short."""
    short = _SHORT.search(reason)
    if not short:
        return ""
    resource, flavor = short[1], short[2]
    queues = facts.of_kind("ClusterQueue")
    names = [Object(queue).name for queue in queues]
    held: defaultdict[str, Decimal] = defaultdict(Decimal)  # job -> its amount of the resource
    for workload in facts.of_kind("Workload"):
        admission = Object(workload).part("status", "admission")
        # One that is finished keeps what it was admitted with, and takes nothing.
        over = Object(workload).condition("Finished").true
        if over or admission.get("clusterQueue") not in names:
            continue
        for assignment in admission.get("podSetAssignments") or ():
            if Object(assignment).part("flavors").get(resource) == flavor:
                used = amounts(assignment.get("resourceUsage")).get(resource, Decimal())
                held[_job_of(workload)] += used
    if not held:
        return ""
    largest = sorted(held.items(), key=lambda holder: (-holder[1], holder[0]))
    holders = listed(f"{job} has {as_text(resource, used)}" for job, used in largest)
    total = sum((_nominal(queue, resource, flavor) for queue in queues), Decimal())
    return f"; of the {as_text(resource, total)} of ClusterQueue {', '.join(names)} {holders}"


def _nominal(queue: Json, resource: str, flavor: str) -> Decimal:
    """The quota that a ClusterQueue has of a resource in a flavor."""
    return sum(
        (
            amounts({resource: quota.get("nominalQuota")}).get(resource, Decimal())
            for group in Object(queue).spec.get("resourceGroups") or ()
            for quotas in group.get("flavors") or ()
            for quota in quotas.get("resources") or ()
            if (quotas.get("name"), quota.get("name")) == (flavor, resource)
        ),
        Decimal(),
    )


def _jobs_ahead(facts: Facts, workload: Json, queue: str) -> str:
    """The jobs to be admitted before it: those of the queue by name, others by number."""
    name, namespace = Object(workload).name, Object(workload).namespace
    # Kueue's own order is there only where its visibility API is on, and the user may read it.
    for summary in facts.of_kind("PendingWorkloadsSummary"):
        pending = summary.get("items") or ()
        place = next((_position(entry) for entry in pending if Object(entry).name == name), None)
        if place is None:
            break
        ahead = [entry for entry in pending if _position(entry) < place]
        if not place:
            return "; it is the next one"
        jobs = f" ({listed(map(_job_of, ahead))})" if ahead else ""
        return f"; {place} {'is' if place == 1 else 'are'} ahead of it{jobs}"
    ahead = [
        rival.raw
        for rival in map(Object, facts.of_kind("Workload"))
        if rival.namespace == namespace
        and rival.spec.get("queueName") == queue
        and rival.spec.get("active") is not False
        and not rival.condition("QuotaReserved").true
        and not rival.condition("Finished").true
        and _place(rival.raw) < _place(workload)
    ]
    return f"; ahead of it: {listed(map(_job_of, sorted(ahead, key=_place)))}" if ahead else ""


def _position(pending: Json) -> int:
    """The number of Workloads that a summary has ahead of one of its own."""
    return int(pending.get("positionInClusterQueue") or 0)


def _place(workload: Json) -> tuple[int, str]:
    """Sorts Workloads as a queue does: by priority, then the older first."""
    return -int(Object(workload).spec.get("priority") or 0), Object(workload).created


def _job_of(workload: Json) -> str:
    """The job of a Workload, with its namespace."""
    owners = Object(workload).owners
    name = next((owner.get("name") for owner in owners), Object(workload).name)
    return f"{Object(workload).namespace}/{name}"

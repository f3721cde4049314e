"""Pods that the operator wants to create and the apiserver refuses.

Only an Event about the job says so: its status may stay empty all the while.
"""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from k8sjob.kube.objects import Object, event_time, training
from k8sjob.observe.diagnose.finding import (
    Cause,
    Diagnosis,
    Explanation,
    Rule,
    first_match,
    listed,
    without_replica,
)
from k8sjob.targets.jobs import DEFAULT, TARGETS, pod_specs

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from k8sjob.kube.objects import Json
    from k8sjob.observe.diagnose.facts import Facts

_INIT: Final = "|".join(re.escape(one.init_container) for one in TARGETS if one.init_container)
_QUOTED: Final = re.compile(r'"([^"]+)"')
_QUOTA: Final = re.compile(
    r"exceeded quota: [^,]+, requested: (?P<asked>.*), used: (?P<used>.*), limited: (?P<hard>.*)"
)
_POD_SECURITY: Final = "namespace {namespace} enforces the pod security level {level!r}: {detail}"
_RESTRICTED: Final = (
    "set `security: restricted` in job.yaml (a container that is not root, no privileges)"
)
_REMAINING: Final = (
    "the job's container is restricted already: remove the field that the message names, such as a"
    " hostPath volume, a host port or another container's privileges"
)
_RULES: Final = (
    Rule(
        r"exceeded quota: (?P<quota>[^,]+), requested: .*, used: .*, limited: ",
        Cause.QUOTA,
        "the namespace's quota {quota!r} has no room: {amounts}",
        "delete jobs that are not needed, request less (replicas, resources), or have the quota"
        " raised: kubectl describe quota {quota} -n {namespace}. It is tried again",
    ),
    Rule(
        r"failed quota: (?P<quota>[^:]+): must specify (?P<missing>[^\n]+)",
        Cause.QUOTA,
        "the namespace's quota {quota!r} accepts only pods with requests or limits; this one does"
        " not specify {missing}",
        "set them in the job (resources.cpu, resources.memory), or let a LimitRange give defaults:"
        " kubectl describe quota {quota} -n {namespace}",
    ),
    Rule(
        rf'violates PodSecurity "(?P<level>[^"]+)": (?P<detail>.*\b(?P<init>{_INIT})\b.*)',
        Cause.POD_SECURITY,
        _POD_SECURITY,
        f"{_RESTRICTED}; the container {{init!r}} is the operator's own: it needs a template"
        f" with a securityContext ({DEFAULT.controller.template_flag}), or use a job without a"
        " Master",
    ),
    Rule(
        r'violates PodSecurity "(?P<level>[^"]+)": (?P<detail>.*)',
        Cause.POD_SECURITY,
        _POD_SECURITY,
        _RESTRICTED,
    ),
    Rule(
        r'serviceaccount "(?P<account>[^"]+)" not found',
        Cause.SERVICE_ACCOUNT,
        "there is no service account {account!r} in namespace {namespace}",
        "create it (kubectl create serviceaccount {account} -n {namespace}), or correct"
        " service_account in the job; it is retried, within a few minutes at the latest",
    ),
    Rule(
        r"(?P<limit>(?:maximum|minimum) \S+ (?:usage|limit to request ratio) per [^\n]*)",
        Cause.LIMIT_RANGE,
        "a LimitRange of namespace {namespace} forbids it: {limit}",
        "change resources to fit: kubectl describe limitrange -n {namespace}",
    ),
    Rule(
        r'failed calling webhook "(?P<webhook>[^"]+)": (?P<detail>.*)',
        Cause.WEBHOOK,
        "the admission webhook {webhook!r} does not respond: {detail}",
        "it belongs to the cluster, not to the job: have its service checked; it is tried again",
    ),
    Rule(
        r'admission webhook "(?P<webhook>[^"]+)" denied the request: (?P<detail>.*)',
        Cause.WEBHOOK,
        "the admission webhook {webhook!r} refuses the pod: {detail}",
        "change the job as it requires, or ask the cluster's administrators for an exception",
    ),
    Rule(
        r"object is being deleted.*already exists|already exists.*object is being deleted",
        Cause.NAME_TAKEN,
        "a pod of this name, of an earlier job, is still being deleted",
        "wait: the operator continues when it is gone, at the latest after its grace period"
        " (kubectl get pods -n {namespace}); if its node is lost, delete it by force",
    ),
    Rule(
        r"""(?P<resource>[\w.]+) ["'](?P<object>[^"']+)["'] already exists""",
        Cause.NAME_TAKEN,
        "{object} already exists and does not belong to this job",
        "see what it is (kubectl get {resource} {object} -n {namespace}) and delete it, or give"
        " the job another name",
    ),
    Rule(
        r"must be no more than 63 ",
        Cause.JOB_NAME,
        "the job's name is too long for a Service of this replica: {message}",
        "delete the job and give it a name that leaves room for -worker-N in 63 characters",
    ),
    Rule(
        r"",
        Cause.REFUSED,
        "the apiserver refuses it: {message}",
        "change the job so that it is accepted; it is tried again",
    ),
)


def creation_refused(facts: Facts) -> Iterator[Diagnosis]:
    """The reasons why the operator cannot create Pods or Services."""
    newest: dict[tuple[str, Cause], tuple[Explanation, Json]] = {}  # by the replica that is named
    refusals = {refused for refused, _, _ in facts.target.creations}
    companion = facts.target.companion
    for event in facts.job_events:
        missed = companion is not None and companion.is_missed(event.get("message", ""))
        message = event.get("message", "").removeprefix("Error creating: ")
        if event.get("reason") in refusals and not missed and not _is_there(facts, message, event):
            explanation = _explain(facts, message)
            newest[_named(facts, message), explanation.cause] = explanation, event
    same: defaultdict[object, list[tuple[str, Explanation]]] = defaultdict(list)
    for (replica, cause), (explanation, event) in newest.items():
        others = (other for other, _ in newest.values())
        if not _created_since(facts, replica, event) and not _is_less_specific(explanation, others):
            # A quota's amounts change all along.
            what = "" if cause is Cause.QUOTA else without_replica(explanation.what)
            key = cause, what, without_replica(explanation.next_step)
            same[key].append((replica, explanation))
    for members in same.values():
        yield _merged(facts, members)


def _merged(facts: Facts, members: Sequence[tuple[str, Explanation]]) -> Diagnosis:
    """One finding for all replicas that are refused alike, the newest of them last."""
    replicas = tuple(replica for replica, _ in members if replica) or facts.missing
    more = len(set(facts.missing) - set(replicas))
    others = f" ({more} more {'have' if more > 1 else 'has'} no pod yet)" if more else ""
    last = members[-1][1]
    message = f"{listed(replicas)}{others}: {last.what}"
    return Diagnosis(last.cause, message, last.next_step, replicas[0], replicas)


def _is_less_specific(explanation: Explanation, others: Iterable[Explanation]) -> bool:
    """Whether a longer explanation says the same: a Worker's, with the operator's container."""
    return explanation.cause is Cause.POD_SECURITY and any(
        other.cause is explanation.cause and len(other.what) > len(explanation.what)
        for other in others
    )


def _named(facts: Facts, message: str) -> str:
    """The replica that a message names by its Pod or Service; empty if it names none."""
    quoted = (facts.target.replica_named(facts.job.raw, one) for one in _QUOTED.findall(message))
    return next(filter(None, quoted), "")


def _is_there(facts: Facts, message: str, refusal: Json) -> bool:
    """Whether a message names an object between the job and its Pods, and that is there now.

    The JobSet controller creates a Job twice when it restarts a set, since the old one's deletion
    takes a moment, and Kueue's webhook refuses it at first. The Job then has Pods, or Events: those
    about Jobs tell the second, those about JobSets the microsecond.
    """
    begun = event_time(refusal).replace(microsecond=0)
    subjects = (
        about
        for event in facts.job_events
        if event.get("reason") == "SuccessfulCreate"
        and event_time(event) >= begun
        and (about := Object(event).part("involvedObject")).get("kind") == "Job"
    )
    owners = (owner for pod in facts.pods for owner in pod.owners)
    there = {str(one.get("name")) for one in (*owners, *subjects)}
    there.add(Object(facts.job.part("child")).name)
    return not there.isdisjoint(_QUOTED.findall(message))


def _created_since(facts: Facts, replica: str, refusal: Json) -> bool:
    """Whether the operator succeeded after it had been refused."""
    creations = facts.target.creations
    reason, prefix = next(rest for refused, *rest in creations if refused == refusal["reason"])
    is_pod = reason == creations[0][1]
    if not facts.missing if not replica else is_pod and replica not in facts.missing:
        return True
    later = (
        event.get("message", "").removeprefix(prefix)
        for event in facts.job_events
        if event.get("reason") == reason and event_time(event) > event_time(refusal)
    )
    named = facts.target.replica_named
    return any(not replica or named(facts.job.raw, one) == replica for one in later)


def _explain(facts: Facts, message: str) -> Explanation:
    amounts = ""
    if found := _QUOTA.search(message):
        asked, used, hard = (_amounts(text) for text in found.groups())
        amounts = "; ".join(
            f"{name} ({amount} requested, {used.get(name, '?')} of {hard.get(name, '?')} used)"
            for name, amount in asked.items()
        )
    explanation = first_match(
        _RULES,
        message,
        message=message,
        namespace=facts.namespace,
        amounts=amounts,
    )
    assert explanation  # noqa: S101 - the last rule matches everything
    if explanation.next_step.startswith(_RESTRICTED) and _is_restricted(facts):
        step = explanation.next_step.removeprefix(_RESTRICTED).removeprefix("; ")
        return replace(explanation, next_step=step or _REMAINING)
    return explanation


def _is_restricted(facts: Facts) -> bool:
    """Whether the containers that train have what `security: restricted` gives them."""
    trains = (Object(training(spec.get("containers"))) for _, _, spec in pod_specs(facts.job.raw))
    return all(
        one.part("securityContext").get("allowPrivilegeEscalation") is False for one in trains
    )


def _amounts(text: str) -> dict[str, str]:
    """`requests.cpu=4,pods=1` by name."""
    pairs = (part.partition("=") for part in text.split(","))
    return {name.strip(): amount.strip() for name, _, amount in pairs if name}

"""Pods that the operator wants to create and the apiserver refuses.

Only an Event about the job says so: its status may stay empty all the while.
"""

from __future__ import annotations

import re
from collections import defaultdict
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Final

from k8sjob.findings import Finding, listed
from k8sjob.kube.objects import Object, event_time, training
from k8sjob.kube.openshift import AllowedIds
from k8sjob.observe.diagnose.finding import (
    Cause,
    Explanation,
    best_match,
    load_rules,
    without_replica,
)
from k8sjob.targets.jobs import pod_specs

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from k8sjob.kube.objects import Json
    from k8sjob.observe.diagnose.facts import Facts

_QUOTED: Final = re.compile(r'"([^"]+)"')
_QUOTA: Final = re.compile(
    r"exceeded quota: [^,]{1,253}, requested: (?P<asked>(?:(?!, used: |exceeded).)*+), used: "
    r"(?P<used>(?:(?!, limited: |exceeded).)*+), limited: (?P<hard>.*)"
)
_RESTRICTED: Final = (
    "set `security: restricted` in job.yaml (a container that is not root, no privileges)"
)
_REMAINING: Final = (
    "the job's container is restricted already: remove the field that the message names, such as a"
    " hostPath volume, a host port or another container's privileges"
)
_NEVER: Final = datetime.min.replace(tzinfo=UTC)
_PRESENT: Final = datetime.max.replace(tzinfo=UTC)
_OPENSHIFT: Final = (
    "set `security: openshift` in job.yaml (it names no user and no group); or, if the job needs"
    " these, name a service_account that may use another constraint"
)
_ALLOWED: Final = (
    "remove the field that the message names, or name a service_account that may use a constraint"
    " that allows it"
)
_ID_FIELD: Final = re.compile(r"\b(runAsUser|runAsGroup|fsGroup|supplementalGroups): ")
_INVALID: Final = re.compile(r"Invalid value: [^:]{1,100}: ")
_UNUSABLE: Final = re.compile(
    r'provider "?[^":]{1,253}"?: Forbidden: not usable by user or serviceaccount(?:, )?'
)


def creation_refused(facts: Facts) -> Iterator[Finding]:
    """The reasons why the operator cannot create Pods or Services."""
    newest: dict[tuple[str, Cause], tuple[Explanation, Json]] = {}  # by the replica that is named
    refusals = {refused for refused, _, _ in facts.target.pods.creations}
    companion, created = facts.target.companion, _Created(facts)
    for event in facts.job_events:
        missed = companion is not None and companion.is_missed(event.get("message", ""))
        message = event.get("message", "").removeprefix("Error creating: ")
        # Trainer refuses a job without its runtime with the same reason: see job.companion_gone.
        if event.get("reason") in refusals and not missed and not created.names(message, event):
            explanation = _explain(facts, message)
            newest[_named(facts, message), explanation.cause] = explanation, event
    alike: defaultdict[object, list[tuple[str, Explanation]]] = defaultdict(list)
    explanations = (explanation for explanation, _ in newest.values())
    violations = [e.problem for e in explanations if e.cause is Cause.POD_SECURITY]
    for (replica, cause), (explanation, event) in newest.items():
        # A longer one says the same: a Worker's, with the operator's container.
        longest = max(violations, key=len) if cause is Cause.POD_SECURITY else ""
        less_specific = len(longest) > len(explanation.problem)
        if not less_specific and not created.since(replica, event):
            # A quota's amounts change all along.
            problem = "" if cause is Cause.QUOTA else without_replica(explanation.problem)
            key = cause, problem, without_replica(explanation.next_step)
            alike[key].append((replica, explanation))
    for members in alike.values():
        yield _merged(facts, members)


def _merged(facts: Facts, members: Sequence[tuple[str, Explanation]]) -> Finding:
    """One finding for all replicas that are refused alike, the newest of them last."""
    replicas = tuple(replica for replica, _ in members if replica) or facts.missing
    more = len(set(facts.missing) - set(replicas))
    missing = f" ({more} more {'have' if more > 1 else 'has'} no pod yet)" if more else ""
    newest = members[-1][1]
    message = f"{listed(replicas)}{missing}: {newest.problem}".removeprefix(": ")
    return Finding(newest.cause, message, newest.next_step, replicas=replicas)


def _named(facts: Facts, message: str) -> str:
    """The replica that a message names by its Pod or Service; empty if it names none."""
    replicas = (facts.job.replica_named(name) for name in _QUOTED.findall(message))
    # The random name of a Pod that was refused is none that another will have.
    return next((replica for replica in replicas if replica in facts.ranks), "")


class _Created:
    """What the controller has created, each with the time of the newest Event about it."""

    def __init__(self, facts: Facts) -> None:
        self._creations = {refused: success for refused, *success in facts.target.pods.creations}
        self._missing, self._has_pods = set(facts.missing), bool(facts.pods)
        owners = [str(owner.get("name")) for pod in facts.pods for owner in pod.owners]
        between = [*owners, Object(facts.job.child or {}).name]
        self._between = dict.fromkeys(between, _PRESENT)
        self._replicas: dict[tuple[str, str], datetime] = {}
        prefixes = dict(self._creations.values())
        for event in facts.job_events:
            reason, time = event.get("reason", ""), event_time(event)
            about = Object(event).part("involvedObject")
            if reason == "SuccessfulCreate" and about.get("kind") == "Job":
                name = str(about.get("name"))
                self._between[name] = max(self._between.get(name, _NEVER), time)
            if reason in prefixes:
                pod = event.get("message", "").removeprefix(prefixes[reason])
                for replica in ("", facts.job.replica_named(pod)):
                    self._replicas[reason, replica] = time

    def names(self, message: str, refusal: Json) -> bool:
        """Whether a message names an object between the job and its Pods, and that is there now.

        The JobSet controller creates a Job twice when it restarts a set, since the old one's
        deletion takes a moment, and Kueue's webhook refuses it at first. The Job then has Pods, or
        Events: those about Jobs tell the second, those about JobSets the microsecond.
        """
        begun = event_time(refusal).replace(microsecond=0)
        names = _QUOTED.findall(message)
        return any(self._between.get(name, _NEVER) >= begun for name in names)

    def since(self, replica: str, refusal: Json) -> bool:
        """Whether the operator succeeded after it had been refused; empty: with any replica."""
        reason = self._creations[refusal["reason"]][0]
        is_pod = reason == next(iter(self._creations.values()))[0]
        all_there = self._has_pods and not self._missing
        if is_pod and replica not in self._missing if replica else all_there:
            return True
        return self._replicas.get((reason, replica), _NEVER) > event_time(refusal)


def _explain(facts: Facts, message: str) -> Explanation:
    amounts = ""
    if quota := _QUOTA.search(message):
        asked, used, hard = (_amounts(text) for text in quota.groups())
        amounts = "; ".join(
            f"{name} ({amount} requested, {used.get(name, '?')} of {hard.get(name, '?')} used)"
            for name, amount in asked.items()
        )
    constraint = _constraint(facts, message)
    return best_match(
        load_rules("creation"),
        message,
        message=message,
        namespace=facts.namespace,
        amounts=amounts,
        restricted=_restricted_step(facts, message),
        constraint=constraint,
        openshift=_OPENSHIFT if _ID_FIELD.search(constraint) else _ALLOWED,
    )


def _constraint(facts: Facts, message: str) -> str:
    """What OpenShift's constraints that the job may use refuse, and the ids of the namespace.

    The message lists all constraints of the cluster, most of which only others may use.
    """
    listed_refusals = message.partition("security context constraint: ")[2]
    # A list of a single refusal has no brackets, but the ranges in it do.
    if listed_refusals.startswith("["):
        listed_refusals = listed_refusals.removeprefix("[").removesuffix("]")
    # Older versions name no constraint in a refusal, so only those that name one are taken out.
    usable = _INVALID.sub("", _UNUSABLE.sub("", listed_refusals)).removesuffix(", ")
    refusals = usable.removeprefix("provider ").replace(", provider ", "; ")
    refusals = refusals or "its service account may use no constraint"
    allowed = map(AllowedIds.of, facts.of_kind("Namespace"))
    ids = next(filter(None, allowed), None)
    return f"{refusals}; namespace {facts.namespace} allows {ids}" if ids else refusals


def _restricted_step(facts: Facts, message: str) -> str:
    """How to satisfy the pod security level that a message says is violated."""
    steps = [] if _is_restricted(facts) else [_RESTRICTED]
    container = facts.target.pods.init_container
    if container and re.search(rf"\b{re.escape(container)}\b", message):
        steps.append(
            f"the container {container!r} is the operator's own: it needs a template with a"
            f" securityContext ({facts.target.controller.template_flag}), or use a job without a"
            " Master"
        )
    return "; ".join(steps) or _REMAINING


def _is_restricted(facts: Facts) -> bool:
    """Whether the containers that train have what `security: restricted` gives them."""
    trainers = [training(spec.get("containers")) for _, _, spec in pod_specs(facts.job)]
    contexts = (Object(container).part("securityContext") for container in trainers)
    return bool(trainers) and all(
        context.get("allowPrivilegeEscalation") is False for context in contexts
    )


def _amounts(text: str) -> dict[str, str]:
    """`requests.cpu=4,pods=1` by name."""
    pairs = (part.partition("=") for part in text.split(","))
    return {name.strip(): amount.strip() for name, _, amount in pairs if name}

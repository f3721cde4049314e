"""Pods that the operator wants to make and the apiserver refuses.

Nothing but an Event about the job tells it: its status may stay empty all the while.
"""

from __future__ import annotations

import re
from collections import defaultdict
from typing import TYPE_CHECKING, Final

from k8sjob.backends.events import event_time
from k8sjob.lifecycle.diagnose.case import OPERATOR_INIT
from k8sjob.lifecycle.diagnose.finding import Cause, Finding, Told, same_text, who

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from k8sjob.backends.api import Json
    from k8sjob.lifecycle.diagnose.case import Case

__all__ = ["cannot_be_made"]

_QUOTA: Final = re.compile(
    r"exceeded quota: (?P<quota>[^,]+), requested: (?P<asked>.*), used: (?P<used>.*), "
    r"limited: (?P<hard>.*)"
)


_SUCCESS: Final = {
    "FailedCreatePod": ("SuccessfulCreatePod", "Created pod: "),
    "FailedCreateService": ("SuccessfulCreateService", "Created service: "),
}


def cannot_be_made(case: Case) -> Iterator[Finding]:
    """What keeps the operator from making Pods or Services."""
    newest: dict[tuple[str, Cause], tuple[Told, Json]] = {}  # by the replica that is named
    for event in case.job_events:
        if event.get("reason") in _SUCCESS:
            told = _told(case, event.get("message", "").removeprefix("Error creating: "))
            newest[_named(case, event.get("message", "")), told.cause] = told, event
    alike: defaultdict[object, list[tuple[str, Told]]] = defaultdict(list)
    for (replica, cause), (told, event) in newest.items():
        others = (other for other, _ in newest.values())
        if not _made_since(case, replica, event) and not _tells_less(told, others):
            amounts = "" if cause is Cause.QUOTA else same_text(told.what)  # they change all along
            alike[cause, amounts, same_text(told.next_step)].append((replica, told))
    for members in alike.values():
        yield _refusal(case, members)


def _refusal(case: Case, members: Sequence[tuple[str, Told]]) -> Finding:
    """One finding for all replicas that are refused alike, the newest of them last."""
    named = [replica for replica, _ in members if replica]
    replicas = tuple(named) or case.missing
    more = len(set(case.missing) - set(replicas))
    others = f" ({more} more {'have' if more > 1 else 'has'} no pod yet)" if more else ""
    told = members[-1][1]
    message = f"{who(replicas)}{others}: {told.what}"
    return Finding(told.cause, message, told.next_step, replicas[0], replicas)


def _tells_less(told: Told, others: Iterable[Told]) -> bool:
    """Whether the same is said at greater length: of a Worker, with the operator's container."""
    return told.cause is Cause.POD_SECURITY and any(
        other.cause is told.cause and len(other.what) > len(told.what) for other in others
    )


def _named(case: Case, said: str) -> str:
    """The replica that a text names by its Pod or Service; empty if it names none."""
    found = re.search(rf'"{re.escape(case.name)}-((?:master|worker)-\d+)"', said)
    return found[1] if found else ""


def _made_since(case: Case, replica: str, refusal: Json) -> bool:
    """Whether the operator succeeded after it had been refused."""
    reason, words = _SUCCESS[refusal["reason"]]
    is_pod = reason == "SuccessfulCreatePod"
    if not case.missing if not replica else is_pod and replica not in case.missing:
        return True
    return any(
        event.get("reason") == reason
        and event.get("message", "").startswith(f"{words}{case.name}-{replica}")
        and event_time(event) > event_time(refusal)
        for event in case.job_events
    )


def _told(case: Case, said: str) -> Told:
    return next(told for kind in _KINDS if (told := kind(case, said)))


def _quota(case: Case, said: str) -> Told | None:
    found = _QUOTA.search(said)
    if not found:
        return None
    asked, used, hard = (_amounts(found[key]) for key in ("asked", "used", "hard"))
    short = [
        f"{name} {amount} asked, {used.get(name, '?')} of {hard.get(name, '?')} used"
        for name, amount in asked.items()
    ]
    quota = found["quota"]
    return Told(
        Cause.QUOTA,
        f"the namespace's quota {quota!r} has no room: {'; '.join(short)}",
        "delete jobs that are not needed, ask for less (replicas, resources), or have the quota"
        f" raised: kubectl describe quota {quota} -n {case.namespace}. The operator tries again"
        " by itself",
    )


def _quota_wants_limits(case: Case, said: str) -> Told | None:
    found = re.search(r"failed quota: ([^:]+): must specify (.+)", said)
    return found and Told(
        Cause.QUOTA,
        f"the namespace's quota {found[1]!r} takes only pods that say how much they need;"
        f" this one does not specify {found[2]}",
        "set them in the job (resources.cpu, resources.memory), or let a LimitRange give defaults:"
        f" kubectl describe quota {found[1]} -n {case.namespace}",
    )


def _pod_security(case: Case, said: str) -> Told | None:
    found = re.search(r'violates PodSecurity "([^"]+)": (.*)', said, re.DOTALL)
    if not found:
        return None
    step = "set `security: restricted` in job.yaml (a container that is not root, no privileges)"
    if OPERATOR_INIT in found[2]:
        step += (
            f"; the container {OPERATOR_INIT!r} is the operator's own: it needs a template with a"
            " securityContext (--pytorch-init-container-template-file), or use a job without a"
            " Master"
        )
    return Told(
        Cause.POD_SECURITY,
        f"namespace {case.namespace} enforces the pod security level {found[1]!r}: {found[2]}",
        step,
    )


def _service_account(case: Case, said: str) -> Told | None:
    found = re.search(r'serviceaccount "([^"]+)" not found', said)
    return found and Told(
        Cause.SERVICE_ACCOUNT,
        f"there is no service account {found[1]!r} in namespace {case.namespace}",
        f"create it (kubectl create serviceaccount {found[1]} -n {case.namespace}), or correct"
        " service_account in the job",
    )


def _limit_range(case: Case, said: str) -> Told | None:
    found = re.search(r"((?:maximum|minimum) \S+ (?:usage|limit to request ratio) per .*)", said)
    return found and Told(
        Cause.LIMIT_RANGE,
        f"a LimitRange of namespace {case.namespace} forbids it: {found[1]}",
        f"change resources to fit: kubectl describe limitrange -n {case.namespace}",
    )


def _webhook_silent(_case: Case, said: str) -> Told | None:
    found = re.search(r'failed calling webhook "([^"]+)": (.*)', said, re.DOTALL)
    return found and Told(
        Cause.WEBHOOK,
        f"the admission webhook {found[1]!r} does not answer: {found[2]}",
        "it is the cluster's, not the job's: have its service looked at; the operator tries again"
        " by itself",
    )


def _webhook_refuses(_case: Case, said: str) -> Told | None:
    found = re.search(r'admission webhook "([^"]+)" denied the request: (.*)', said, re.DOTALL)
    return found and Told(
        Cause.WEBHOOK,
        f"the admission webhook {found[1]!r} refuses the pod: {found[2]}",
        "change the job as it asks for, or ask who runs the cluster for an exception",
    )


def _name_taken(case: Case, said: str) -> Told | None:
    if "already exists" not in said:
        return None
    if "object is being deleted" in said:
        return Told(
            Cause.NAME_TAKEN,
            "a pod of this name, of an earlier job, is still being deleted",
            "wait: the operator goes on when it is gone, at the latest after its grace period"
            f" (kubectl get pods -n {case.namespace}); if its node is lost, delete it by force",
        )
    name = f"{case.name}-{_named(case, said)}"
    return Told(
        Cause.NAME_TAKEN,
        f"{name} exists already and does not belong to this job",
        f"see what it is (kubectl get pod,service {name} -n {case.namespace}) and delete it, or"
        " give the job another name",
    )


def _name_too_long(_case: Case, said: str) -> Told | None:
    if "must be no more than 63 " not in said:
        return None
    return Told(
        Cause.JOB_NAME,
        f"the job's name is too long for a Service of this replica: {said}",
        "delete the job and give it a name that leaves room for -worker-N in 63 characters",
    )


def _other(_case: Case, said: str) -> Told:
    return Told(
        Cause.REFUSED,
        f"the apiserver refuses it: {said}",
        "change the job so that it is accepted; the operator tries again by itself",
    )


def _amounts(text: str) -> dict[str, str]:
    """`requests.cpu=4,pods=1` by name."""
    pairs = (part.partition("=") for part in text.split(","))
    return {name.strip(): amount.strip() for name, _, amount in pairs if name}


_KINDS: tuple[Callable[[Case, str], Told | None], ...] = (
    _quota,
    _quota_wants_limits,
    _pod_security,
    _service_account,
    _limit_range,
    _webhook_silent,
    _webhook_refuses,
    _name_taken,
    _name_too_long,
    _other,
)

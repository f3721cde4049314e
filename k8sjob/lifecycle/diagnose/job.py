"""Causes that concern the job as a whole: its state, its queue, its limits, its operator."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Final

from k8sjob.backends.api import LOCAL
from k8sjob.backends.events import event_time, moment
from k8sjob.labels import JOB_NAME, QUEUE
from k8sjob.lifecycle.diagnose.finding import Cause, Finding, lasting, who
from k8sjob.lifecycle.status import JobState, deletion

if TYPE_CHECKING:
    from collections.abc import Iterator
    from datetime import datetime

    from k8sjob.lifecycle.diagnose.case import Case

__all__ = [
    "SUPERVISOR_GONE",
    "deadline",
    "deleting",
    "ended_by_deadline",
    "operator_silent",
    "overdue",
    "queued",
    "restart_limit",
    "stopped",
    "supervisor_gone",
    "suspended",
]

_FAILED: Final = "PyTorchJobSupervisorFailed"
SUPERVISOR_GONE: Final = frozenset({"PyTorchJobSupervisorGone", "PyTorchJobStateDamaged", _FAILED})
"""Reasons of the Failed condition where the replicas on this machine ended with their supervisor,
or where nothing of them is known."""
_AGAIN: Final = "run the job again; with `checkpoint` in its spec it goes on from the newest one"
_OPERATOR: Final = "kubeflow.org/training-operator"
_FIRST_WORD: Final = timedelta(seconds=5)
"""An operator that runs answers a new job within a second."""
_SILENCE: Final = timedelta(seconds=30)
"""A missing Pod is made anew within a second, or there is an Event that says why not."""


def supervisor_gone(case: Case) -> Iterator[Finding]:
    """The process that kept a job of this machine is gone, or could not go on."""
    if case.status.reason in SUPERVISOR_GONE:
        yield Finding(
            Cause.SUPERVISOR_GONE,
            case.status.message,
            f"remove the cause, then {_AGAIN}" if case.status.reason == _FAILED else _AGAIN,
        )


def stopped(case: Case) -> Iterator[Finding]:
    """The job was ended on request."""
    if case.status.state is JobState.STOPPED:
        yield Finding(Cause.STOPPED, case.status.message, _AGAIN)


def suspended(case: Case) -> Iterator[Finding]:
    """The job is suspended."""
    if case.status.state is JobState.SUSPENDED:
        yield Finding(
            Cause.SUSPENDED,
            "the job is suspended: its replicas are stopped, its checkpoints are kept",
            f"k8sjob resume {case.called}",
        )


def queued(case: Case) -> Iterator[Finding]:
    """Kueue has not admitted the job yet, and says why; or nobody will ever admit it."""
    if case.status.state is not JobState.QUEUED:
        return
    queue = case.snapshot.job["metadata"]["labels"][QUEUE]
    if wrong := _never_admitted(case, queue):
        yield Finding(Cause.NO_QUEUE, f"the job waits in vain: {wrong[0]}", wrong[1])
        return
    waits = [
        condition
        for workload in case.of_kind("Workload")
        if any(
            owner.get("uid") == case.status.ref.uid
            for owner in workload["metadata"].get("ownerReferences") or ()
        )
        for condition in (workload.get("status") or {}).get("conditions") or ()
        if condition.get("type") == "QuotaReserved" and condition.get("status") == "False"
    ]
    said = f": {waits[0].get('message', '')}" if waits else ""
    since = moment(waits[0].get("lastTransitionTime")) if waits else case.status.created
    time = f" for {lasting(since, case.now)}" if since else ""
    admits = "it starts by itself when the queue has room; see" if waits else "see"
    yield Finding(
        Cause.QUEUED,
        f"the job has waited in the queue {queue!r}{time}{said}",
        f"{admits} what is before it: kubectl get workloads"
        f" -n {case.namespace}; kubectl describe localqueue {queue} -n {case.namespace}",
    )


def _never_admitted(case: Case, queue: str) -> tuple[str, str] | None:
    """Why Kueue will never start the job, and the next step; None as far as is known."""
    missing = {
        (status["details"].get("kind"), status["details"].get("name"))
        for status in case.of_kind("Status")
    }
    what = step = ""
    created = case.status.created
    if ("localqueues", "") in missing:
        what, step = "Kueue is not installed in this cluster", "have Kueue installed"
    elif ("localqueues", queue) in missing:
        what = f"there is no queue {queue!r} in namespace {case.namespace}"
        step = (
            f"correct kueue_queue (kubectl get localqueues -n {case.namespace} shows those there)"
        )
    elif ("workloads", "") in missing and created and case.now - created > _SILENCE:
        age = lasting(created, case.now)
        what = (
            f"Kueue has made no Workload for it in {age}: it does not run, or does not manage"
            " PyTorchJobs here"
        )
        step = (
            "see whether its controller runs, and have kubeflow.org/pytorchjob in"
            " integrations.frameworks of its settings"
        )
    if not what:
        return None
    return what, f"{step}, or take kueue_queue out of the job and submit it with --replace"


def deleting(case: Case) -> Iterator[Finding]:
    """The job's deletion was asked for, and it is still there."""
    meta = case.snapshot.job.get("metadata") or {}
    begun = moment(meta.get("deletionTimestamp"))
    if begun is None:
        return
    where = f"{case.name} -n {case.namespace}"
    others = [name for name in meta.get("finalizers") or () if name not in _COLLECTED]
    step = "wait until its pods have ended"
    if others:
        step = (
            f"whoever set {others[0]} must take it away; see whether that one runs: kubectl get"
            f" pytorchjob {where} -o yaml"
        )
    elif meta.get("finalizers"):
        step += (
            f" (kubectl get pods -n {case.namespace} -l {JOB_NAME}={case.name}); the operator's"
            " webhook must answer for its end"
        )
    yield Finding(
        Cause.DELETING, f"{deletion(case.snapshot.job)}, for {lasting(begun, case.now)}", step
    )


_COLLECTED: Final = frozenset({"foregroundDeletion", "orphan"})
"""Finalizers that the cluster's garbage collector takes away by itself."""


def ended_by_deadline(case: Case) -> bool:
    """Whether the operator failed the job for its deadline."""
    said = case.status.message
    return case.status.state is JobState.FAILED and "longer than specified dead" in said


def deadline(case: Case) -> Iterator[Finding]:
    """The job was ended because it had run for too long."""
    if ended_by_deadline(case):
        yield Finding(
            Cause.DEADLINE,
            f"the job was ended after its {case.policy.get('activeDeadlineSeconds')} s",
            f"raise policy.active_deadline, or {_AGAIN}",
        )


def overdue(case: Case) -> Iterator[Finding]:
    """The deadline is over and the operator has not noticed: it looks when something else happens.

    Its own timer goes to a queue that nobody reads (training-operator 1.9.4).
    """
    seconds, started = case.policy.get("activeDeadlineSeconds"), case.status.started
    if case.status.state.finished or seconds is None or started is None:
        return
    end = started + timedelta(seconds=seconds)
    if case.now > end + _FIRST_WORD and case.status.state not in _STILL:
        yield Finding(
            Cause.DEADLINE,
            f"its deadline of {seconds} s was over {lasting(end, case.now)} ago, and the operator"
            " has not looked at it since",
            "any change makes it look: kubectl label pytorchjob"
            f" {case.name} -n {case.namespace} --overwrite k8sjob/look=now; or k8sjob delete"
            f" {case.called}",
        )


_STILL: Final = frozenset({JobState.SUSPENDED, JobState.QUEUED})


def restart_limit(case: Case) -> Iterator[Finding]:
    """The job was restarted as often as it may be."""
    message = case.status.message
    if case.status.state is JobState.FAILED and (
        "backoff limit" in message or "max_restarts is" in message
    ):
        yield Finding(
            Cause.RESTART_LIMIT,
            message,
            "remove the cause of the restarts; policy.max_restarts allows more of them",
        )


def operator_silent(case: Case) -> Iterator[Finding]:
    """Nobody works on the job: no status, no Events, no Pods."""
    state = case.status.state
    if state.finished or state in _STILL or not case.missing or case.namespace == LOCAL:
        return
    manager = case.policy.get("managedBy") or _OPERATOR
    if manager != _OPERATOR:
        yield Finding(
            Cause.OPERATOR_SILENT,
            f"the job is managed by {manager} (runPolicy.managedBy); the training operator leaves"
            " it alone",
            "see what that one says about it, or leave managedBy out",
        )
        return
    heard = max(_signs(case), default=None)
    begun = case.status.created
    if heard is None:
        if begun and case.now - begun > _FIRST_WORD:
            yield Finding(
                Cause.OPERATOR_SILENT,
                f"the training operator has not touched the job in {lasting(begun, case.now)}: it"
                f" has no status, no events and no pods{_deployment(case)}",
                _HAVE_IT_STARTED,
            )
    elif case.now - heard > _SILENCE:
        yield Finding(
            Cause.OPERATOR_SILENT,
            f"{who(case.missing)}: no pod, and the training operator has made none; its last sign"
            f" of life is {lasting(heard, case.now)} old{_deployment(case)}",
            _HAVE_IT_STARTED,
            case.missing[0],
            case.missing,
        )


_HAVE_IT_STARTED: Final = (
    "see whether it runs (kubectl get deployment -A | grep training-operator) and what it says"
    " (its logs); it takes the job up when it is back"
)


def _signs(case: Case) -> Iterator[datetime]:
    """When something happened to the job."""
    yield from (event_time(event) for event in case.snapshot.events)
    yield from (pod.created for pod in case.pods if pod.created)
    for condition in (case.snapshot.job.get("status") or {}).get("conditions") or ():
        if changed := moment(condition.get("lastTransitionTime")):
            yield changed


def _deployment(case: Case) -> str:
    """What the operator's Deployment says, where it can be read."""
    for deployment in case.of_kind("Deployment"):
        meta, status = deployment["metadata"], deployment.get("status") or {}
        if "training-operator" in meta["name"]:
            ready, wanted = status.get("readyReplicas", 0), deployment["spec"].get("replicas", 1)
            if ready < max(wanted, 1):
                return f"; {meta['namespace']}/{meta['name']} has {ready} of {wanted} pods ready"
    return ""

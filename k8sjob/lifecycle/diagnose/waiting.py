"""Nothing is wrong, and still it does not go on: what each replica waits for, and since when."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Final

from k8sjob.backends.api import LOCAL
from k8sjob.backends.capacity import pod_requests
from k8sjob.backends.events import event_time, moment
from k8sjob.labels import JOB_NAME
from k8sjob.lifecycle.diagnose.case import OPERATOR_INIT
from k8sjob.lifecycle.diagnose.finding import Cause, Finding, Seen, grouped, lasting, who
from k8sjob.lifecycle.status import JobState

if TYPE_CHECKING:
    from collections.abc import Iterator

    from k8sjob.lifecycle.diagnose.case import Case, Pod

__all__ = ["kept_by_a_sidecar", "left_over", "master_awaited", "pods_to_come", "slow"]

_CLEANED_IN: Final = timedelta(seconds=15)
"""The operator needs so long at most to remove the Pods of a job that has ended."""
_SETTLED: Final = timedelta(seconds=10)
"""A Master that has been ready for so long can be found by its name."""
_WAIT: Final = "it goes on when the Master is ready"


def left_over(case: Case) -> Iterator[Finding]:
    """Pods that go on, and hold what they have, though the job has ended."""
    ended = case.status.finished
    if not case.status.state.finished or case.namespace == LOCAL or ended is None:
        return
    keeps = (case.policy.get("cleanPodPolicy") or "None") == "None"
    if not keeps and case.now - ended < _CLEANED_IN:
        return
    pods = [pod for pod in case.pods if pod.phase in ("Running", "Pending") and not pod.dying]
    if not pods or case.snapshot.job["metadata"].get("deletionTimestamp"):
        return
    held = sum(
        int(amount)
        for pod in pods
        for name, amount in pod_requests(pod.spec).items()
        if name.endswith("/gpu")
    )
    replicas = tuple(pod.replica for pod in pods)
    what = "still there" if any(pod.phase == "Pending" for pod in pods) else "still running"
    yield Finding(
        Cause.LEFTOVER,
        f"{who(replicas)}: {what} though the job ended"
        f" ({case.status.state}) {lasting(ended, case.now)} ago"
        + (f"; {held} GPU{'s' * (held > 1)} held" if held else ""),
        f"k8sjob delete {case.called} removes {'them' if len(pods) > 1 else 'it'}"
        + (
            "; policy.clean_pod_policy: Running lets the operator do so by itself at the end"
            if keeps
            else "; the operator should have done so: see whether it runs"
        ),
        replicas[0],
        replicas,
    )


def kept_by_a_sidecar(case: Case, pod: Pod) -> Seen | None:
    """A Pod whose training has ended well and that another container keeps from ending."""
    ended = pod.trainer.ended if pod.trainer else {}
    others = [c.name for c in pod.containers if not c.init and "running" in c.state]
    if pod.phase != "Running" or pod.dying or ended.get("exitCode") != 0 or not others:
        return None
    since = moment(ended.get("finishedAt"))
    if since and case.now - since < _CLEANED_IN:
        return None
    return Seen(
        Cause.SIDECAR,
        f"its training has ended, and the container {others[0]!r} runs on: so the pod does not end",
        'leave the sidecar out (of Istio\'s, the annotation sidecar.istio.io/inject: "false", which'
        " k8sjob sets), or make it an init container of restartPolicy Always, which ends by itself",
        pod.replica,
        since,
    )


def master_awaited(case: Case, *, explained: bool) -> Iterator[Finding]:
    """Workers whose init container cannot find the Master's name yet.

    Args:
        case: the job.
        explained: whether something was found at the Master itself: that it is waited for is what
            follows from it then.
    """
    if case.status.state.finished:
        return
    waiting = [
        pod
        for pod in case.pods
        for container in pod.containers
        if container.name == OPERATOR_INIT
        and pod.phase == "Pending"
        and (
            "running" in container.state
            or container.ended.get("exitCode")
            or container.waiting.get("reason") == "CrashLoopBackOff"
        )
    ]
    if waiting:
        what, step = _master(case)
        if explained and step == _WAIT:
            return
        begun = (moment(pod.status.get("startTime")) or pod.created for pod in waiting)
        earliest = min((time for time in begun if time), default=None)
        seen = (Seen(Cause.MASTER_AWAITED, what, step, p.replica, earliest) for p in waiting)
        yield from grouped(seen, case.now)


def _master(case: Case) -> tuple[str, str]:
    """Why the Master's name cannot be found."""
    name = f"{case.name}-master-0"
    what = f"its init container waits until the name {name} can be found"
    master = next((pod for pod in case.pods if pod.replica == "master-0"), None)
    if master is None:
        return f"{what}; the Master has no pod", _WAIT
    ready = master.condition("Ready")
    since = moment(ready.get("lastTransitionTime"))
    if ready.get("status") == "True" and since and case.now - since > _SETTLED:
        return (
            f"{what}; the Master is ready, so the name should be there",
            f"see the cluster's DNS and the Service (kubectl get svc {name} -n {case.namespace})",
        )
    if master.phase == "Running" and ready.get("status") == "False":
        probe = (master.trainer.spec if master.trainer else {}).get("readinessProbe")
        if probe:
            return (
                f"{what}; the Master runs and is not ready by its readinessProbe",
                "leave the probe out: the name comes with Ready, and training needs the name first",
            )
        return f"{what}; the Master is not ready", _WAIT
    situation = next(one.situation for one in case.status.replicas if one.name == "master-0")
    return f"{what}; the Master is {situation}", _WAIT


def pods_to_come(case: Case) -> Iterator[Finding]:
    """A job that is so new that it has no Pods."""
    if case.pods or case.status.state is not JobState.CREATED:
        return
    begun = case.status.created
    if case.namespace != LOCAL and begun:
        yield Finding(
            Cause.WAITING,
            f"the job has no pods yet, {lasting(begun, case.now)} after it was made",
            "wait a few seconds and look again",
        )


def slow(case: Case, pod: Pod) -> Seen | None:
    """What a replica waits for that does not run yet, or does not go away."""
    if pod.dying:
        return Seen(
            Cause.WAITING,
            "its pod is being ended",
            "wait: it has until the end of its grace period to save what it has",
            pod.replica,
            _asked_to_end(pod),
        )
    if pod.phase != "Pending":
        return None
    if not pod.node:
        scheduler = pod.spec.get("schedulerName", "default-scheduler")
        return Seen(
            Cause.WAITING,
            f"the scheduler {scheduler!r} has not looked at it",
            "wait; if it stays so, see whether that scheduler runs in the cluster",
            pod.replica,
            pod.created,
        )
    if any("running" in container.state for container in pod.containers):
        return None  # an init container: see master_awaited
    event = pod.last_event("Pulling", "Pulled", "Scheduled")
    if event.get("reason") == "Pulling":
        image = event.get("message", "").partition('"')[2].partition('"')[0]
        return Seen(
            Cause.WAITING,
            f"its node pulls the image {image}",
            "wait; a large image takes minutes the first time on each node",
            pod.replica,
            event_time(event),
        )
    return Seen(
        Cause.WAITING,
        "its containers are being made",
        f"wait; if it stays so: kubectl describe pods -n {case.namespace} -l"
        f" {JOB_NAME}={case.name}",
        pod.replica,
        moment(pod.condition("PodScheduled").get("lastTransitionTime")) or pod.created,
    )


def _asked_to_end(pod: Pod) -> datetime | None:
    stamp = moment(pod.object["metadata"].get("deletionTimestamp"))  # the end of its grace
    grace = pod.object["metadata"].get("deletionGracePeriodSeconds") or 0
    return stamp - timedelta(seconds=grace) if stamp else None

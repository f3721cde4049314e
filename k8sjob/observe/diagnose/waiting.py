"""Replicas that wait though nothing has failed, and Pods that remain after the job's end."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Final

from k8sjob.kube.capacity import pod_requests
from k8sjob.kube.objects import event_time, moment
from k8sjob.observe.diagnose.finding import (
    Cause,
    Finding,
    ReplicaFinding,
    age,
    grouped,
    listed,
)
from k8sjob.targets.api import JobState

if TYPE_CHECKING:
    from collections.abc import Iterator

    from k8sjob.observe.diagnose.facts import Facts, Pod

__all__ = ["kept_by_sidecar", "left_over", "master_awaited", "no_pods_yet", "slow"]

_CLEAN_UP: Final = timedelta(seconds=15)
"""The Pods of a job that has ended need so long at most to end, or the operator to remove them."""
_RESOLVED: Final = timedelta(seconds=10)
"""The name of a Master that has been ready for so long can be resolved."""
_WAIT: Final = "it continues when the Master is ready"


def left_over(facts: Facts) -> Iterator[Finding]:
    """Pods that still run, and hold what they have, though the job has ended."""
    ended, finished = facts.status.finished, facts.status.state.finished
    if not finished or facts.local or ended is None or facts.meta.get("deletionTimestamp"):
        return
    kept = facts.target.keeps_pods(facts.snapshot.job)
    pods = [p for p in facts.pods if p.phase in ("Running", "Pending") and not p.terminating]
    if not pods or facts.now - ended < _CLEAN_UP:
        return
    gpus = sum(
        int(amount)
        for pod in pods
        for name, amount in pod_requests(pod.spec).items()
        if name.endswith("/gpu")
    )
    replicas = tuple(pod.replica for pod in pods)
    what = "still there" if any(pod.phase == "Pending" for pod in pods) else "still running"
    policy = "; policy.clean_pod_policy: Running lets the operator do so by itself at the end"
    yield Finding(
        Cause.LEFTOVER,
        f"{listed(replicas)}: {what} though the job ended ({facts.status.state})"
        f" {age(ended, facts.now)} ago" + (f"; {gpus} GPU{'s' * (gpus > 1)} held" if gpus else ""),
        f"k8sjob delete {facts.job_argument} removes {'them' if len(pods) > 1 else 'it'}"
        + (policy if kept else "; the operator should have done so: check whether it runs"),
        replicas[0],
        replicas,
    )


def kept_by_sidecar(facts: Facts, pod: Pod) -> ReplicaFinding | None:
    """A Pod whose training has succeeded and that another container keeps from ending."""
    ended = pod.trainer.ended if pod.trainer else {}
    others = [c.name for c in pod.containers if not c.init and "running" in c.state]
    if pod.phase != "Running" or pod.terminating or ended.get("exitCode") != 0 or not others:
        return None
    since = pod.trained_until
    if since and facts.now - since < _CLEAN_UP:
        return None
    return ReplicaFinding(
        Cause.SIDECAR,
        f"its training has ended, but its container {others[0]!r} keeps the pod running",
        'leave the sidecar out (of Istio\'s, the annotation sidecar.istio.io/inject: "false", which'
        " k8sjob sets), or make it an init container of restartPolicy Always, which ends by itself",
        pod.replica,
        since,
    )


def master_awaited(facts: Facts, *, explained: bool) -> Iterator[Finding]:
    """Workers whose init container cannot find the Master's name yet.

    Args:
        facts: about the job.
        explained: whether something was found at the Master itself, from which this follows.
    """
    if facts.status.state.finished:
        return
    waiting = [
        pod
        for pod in facts.pods
        for container in pod.containers
        if container.init
        and container.name == facts.target.init_container
        and pod.phase == "Pending"
        and (
            "running" in container.state
            or container.ended.get("exitCode")
            or container.waiting.get("reason") == "CrashLoopBackOff"
        )
    ]
    if not waiting:
        return
    what, step = _master(facts)
    if explained and step == _WAIT:
        return
    begun = (moment(pod.status.get("startTime")) or pod.created for pod in waiting)
    since = min((time for time in begun if time), default=None)
    found = [ReplicaFinding(Cause.MASTER_AWAITED, what, step, p.replica, since) for p in waiting]
    yield from grouped(found, facts.now)


def _master(facts: Facts) -> tuple[str, str]:
    """Why the Master's name cannot be found, and the next step."""
    name = f"{facts.name}-master-0"
    what = f"its init container waits until the name {name} can be found"
    master = next((pod for pod in facts.pods if pod.replica == "master-0"), None)
    if master is None:
        return f"{what}; the Master has no pod", _WAIT
    ready = master.condition("Ready")
    since = moment(ready.get("lastTransitionTime"))
    if ready.get("status") == "True" and since and facts.now - since > _RESOLVED:
        step = f"check the cluster's DNS and the Service (kubectl get svc {name}"
        what += "; the Master is ready, so the name should be there"
        return what, f"{step} -n {facts.namespace})"
    if master.phase == "Running" and ready.get("status") == "False":
        if (master.trainer.spec if master.trainer else {}).get("readinessProbe"):
            return (
                f"{what}; the Master runs but is not ready, by its readinessProbe",
                "leave the probe out: the name comes with Ready, and training needs the name first",
            )
        return f"{what}; the Master is not ready", _WAIT
    situation = next(one.situation for one in facts.status.replicas if one.name == "master-0")
    return f"{what}; the Master is {situation}", _WAIT


def no_pods_yet(facts: Facts) -> Iterator[Finding]:
    """A job that is so new that it has no Pods."""
    created, state = facts.status.created, facts.status.state
    if not facts.pods and state is JobState.CREATED and not facts.local and created:
        yield Finding(
            Cause.WAITING,
            f"the job has no pods yet, {age(created, facts.now)} after it was created",
            "wait a few seconds and look again",
        )


def slow(facts: Facts, pod: Pod) -> ReplicaFinding | None:
    """What a replica waits for that does not run yet, or is not gone yet."""
    if pod.terminating:
        what = "its pod is being ended"
        step = "wait: it has until the end of its grace period to save what it has"
        end = moment(pod.meta.get("deletionTimestamp"))  # of its grace period
        grace = timedelta(seconds=pod.meta.get("deletionGracePeriodSeconds") or 0)
        since = end - grace if end else None
    elif pod.phase != "Pending":
        return None
    elif not pod.node:
        scheduler = pod.spec.get("schedulerName", "default-scheduler")
        what = f"the scheduler {scheduler!r} has not looked at it"
        step = "wait; if it stays so, check whether that scheduler runs in the cluster"
        since = pod.created
    elif any("running" in container.state for container in pod.containers):
        return None  # an init container: see master_awaited
    elif (event := pod.last_event("Pulling", "Pulled", "Scheduled")).get("reason") == "Pulling":
        image = event.get("message", "").partition('"')[2].partition('"')[0]
        what = f"its node pulls the image {image}"
        step = "wait; a large image takes minutes the first time on each node"
        since = event_time(event)
    else:
        what = "its containers are being created"
        step = f"wait; if it stays so: kubectl describe {facts.pods_argument}"
        since = moment(pod.condition("PodScheduled").get("lastTransitionTime")) or pod.created
    return ReplicaFinding(Cause.WAITING, what, step, pod.replica, since)

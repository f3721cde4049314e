"""Causes that concern the job as a whole: its state, its limits, its training, its remains."""

from __future__ import annotations

import math
from datetime import UTC, datetime, timedelta
from itertools import takewhile
from typing import TYPE_CHECKING, Final

from k8sjob.contract import EventKind, Reason, counted
from k8sjob.findings import Finding, listed
from k8sjob.kube.api_resources import ResourcePath
from k8sjob.kube.capacity import counts_gpus, pod_requests
from k8sjob.kube.objects import Object, event_time, moment
from k8sjob.observe.diagnose.finding import Cause, age, ago, one_line
from k8sjob.observe.diagnose.next_steps import equal_steps
from k8sjob.observe.status import deletion, reporting_replica
from k8sjob.observe.training import Training
from k8sjob.targets.api import JobState, LocalReason

if TYPE_CHECKING:
    from collections.abc import Iterator

    from k8sjob.observe.diagnose.facts import Facts

SUPERVISOR_GONE: Final = frozenset(LocalReason) - {LocalReason.STOPPED}
"""Reasons of the Failed condition where the replicas on this machine ended with their supervisor,
or where nothing of them is known."""
_LIMIT_REACHED: Final = ("backoff limit", "max_restarts is", "max number of restarts")
_AGAIN: Final = (
    "run the job again: a session continues from the newest checkpoint if the spec has"
    " `checkpoint`, any other script where it loads its own"
)
_ANSWER: Final = timedelta(seconds=5)
"""A running operator answers a new job within a second."""
_SILENCE: Final = timedelta(seconds=30)
"""A missing Pod is recreated within a second, or there is an Event that says why not."""
_RANKS_END: Final = timedelta(seconds=30)
"""Ranks of one training end within this time."""
_COLLECTED: Final = frozenset({"foregroundDeletion", "orphan"})
"""Finalizers that the cluster's garbage collector removes by itself."""
_CLEAN_UP: Final = timedelta(seconds=15)
"""Maximum time that the Pods of an ended job take to end, or the operator to remove them."""
_BY_AGENTS: Final = frozenset({EventKind.STARTING, EventKind.RESTARTING})
"""Events that each replica's agent writes; others are written where rank 0 is."""
_HELD: Final = frozenset({JobState.SUSPENDED, JobState.QUEUED})


def state(facts: Facts) -> Iterator[Finding]:
    """The explanations that follow from the job's state and its reason."""
    status = facts.status
    if status.reason in SUPERVISOR_GONE:
        failed = status.reason == LocalReason.SUPERVISOR_FAILED
        step = f"remove the cause, then {_AGAIN}" if failed else _AGAIN
        yield Finding(Cause.SUPERVISOR_GONE, status.message, step)
    if status.state is JobState.STOPPED:
        yield Finding(Cause.STOPPED, status.message, _AGAIN)
    if status.state is JobState.SUSPENDED:
        yield Finding(
            Cause.SUSPENDED,
            "the job is suspended: its replicas are stopped, checkpoints that it wrote are kept",
            f"k8sjob resume {facts.job_argument}",
        )


def deleting(facts: Facts) -> Iterator[Finding]:
    """The deletion of the job, or of its namespace, was requested, and it is still there."""
    begun = moment(facts.job.metadata.get("deletionTimestamp"))
    if begun is None:
        if facts.namespace_deleted:
            problem = f"namespace {facts.namespace} is being deleted, for"
            problem += f" {age(facts.namespace_deleted, facts.now)}: no pod can be created in it"
            step = "wait until it is gone, and submit the job to another one"
            if facts.target.pods.ended_stay:
                step += (
                    "; Kubernetes 1.33 and later delete its pods first, which a Job keeps until it"
                    f" is deleted itself: k8sjob delete {facts.job_argument}"
                )
            yield Finding(Cause.DELETING, problem, step)
        return
    finalizers = facts.job.metadata.get("finalizers") or ()
    foreign = [name for name in finalizers if name not in _COLLECTED]
    step = "wait until its pods have ended"
    if foreign:
        step = (
            f"whoever set {foreign[0]} must remove it; check whether that controller runs: kubectl"
            f" get {facts.kubectl_name} -o yaml"
        )
    elif finalizers:
        step += f" (kubectl get {facts.pods_argument})"
        if facts.target.controller.webhooks:
            name = facts.target.controller.name
            step += (
                f"; the webhook of {name} must allow its end, or k8sjob delete"
                f" {facts.job_argument} removes it without that"
            )
    problem = f"{deletion(facts.job)}, for {age(begun, facts.now)}"
    yield Finding(Cause.DELETING, problem, step)


def limits(facts: Facts) -> Iterator[Finding]:
    """The job was ended because it had run for too long."""
    if facts.ended_by_deadline:
        seconds = facts.job.active_deadline or ""
        yield Finding(
            Cause.DEADLINE,
            f"the job reached its deadline{seconds and f' of {seconds} s'}",
            f"raise policy.active_deadline, or {_AGAIN}",
        )
    yield from _overdue(facts)


def restart_limit(facts: Facts) -> Iterator[Finding]:
    """The job was restarted as often as allowed, and nothing shows why."""
    message = facts.status.message
    if facts.status.state is not JobState.FAILED or facts.ended_by_deadline:
        return
    if any(text in message for text in _LIMIT_REACHED):
        step = "remove the cause of the restarts; policy.max_restarts allows more of them"
        if not facts.pods and not facts.ends and not facts.local:
            policies = {role.restart_policy for role in facts.job.replicas}
            keep, deletes = "with policy.restart_policy Never", policies != {"Never"}
            if facts.target.pods.ended_stay:
                keep, deletes = "without policy.restart_policy OnFailure", "OnFailure" in policies
            step += (
                ". Its pods are gone, and their output with them: to see the cause, run it again"
                f" {f'{keep}, which keeps them, or' if deletes else 'and'} follow it: k8sjob watch"
                f" {facts.job_argument}"
            )
        yield Finding(Cause.RESTART_LIMIT, message, step)


def failed(facts: Facts) -> Iterator[Finding]:
    """The controller's message about a failure without another explanation."""
    status = facts.status
    if status.state is JobState.FAILED:
        look = f"k8sjob logs {facts.output_argument}"
        if not facts.local:
            look += f"; kubectl describe {facts.kubectl_name}"
        yield Finding(
            Cause.FAILED,
            f"the job failed: {status.message or status.reason}",
            f"the remaining pods show no cause: {look}",
        )


def _overdue(facts: Facts) -> Iterator[Finding]:
    """The deadline has passed and the operator has not noticed: it looks at the next change.

    Its own timer goes to a queue that nobody reads (training-operator 1.9.4).
    """
    seconds, started = facts.job.active_deadline, facts.status.started
    state, (_, noticed) = facts.status.state, facts.job.times()
    if noticed or state.finished or state in _HELD or seconds is None or started is None:
        return
    if not facts.job.is_training:  # what its controller does is not known
        return
    end = started + timedelta(seconds=seconds)
    if facts.now > end + _ANSWER:
        yield Finding(
            Cause.DEADLINE,
            f"its deadline of {seconds} s passed {age(end, facts.now)} ago, and"
            f" {facts.target.controller.name} has not acted on it since",
            f"any change triggers it: kubectl label {facts.kubectl_name} --overwrite"
            " k8sjob/look=now",
        )


def companion_gone(facts: Facts) -> Iterator[Finding]:
    """Somebody deleted the job's companion object."""
    # The controller repeats its complaint for as long as the companion is missing.
    companion, newest = facts.target.companion, facts.job_events[-1:]
    if companion is None or facts.status.state.finished:
        return
    job = facts.job
    at = ResourcePath.of(job.companion_path(job.namespace) or companion.path(job.namespace))
    gone = (at.resource, at.name) in facts.not_found
    events = [event for event in newest if companion.is_missed(event.get("message", ""))]
    if gone or events:
        missing = f"{at.resource}/{at.name}" if gone else one_line(events[0]["message"])
        yield Finding(
            Cause.COMPANION,
            f"{missing} does not exist: {companion.use}",
            "ask its owner to restore it, or submit the job again with another"
            if job.shares_companion
            else "recreate the job with k8sjob submit --replace, or that object as it was",
        )


def no_pods_yet(facts: Facts) -> Iterator[Finding]:
    """A job that is so new that it has no Pods."""
    created, state = facts.status.created, facts.status.state
    if facts.pods or state is not JobState.CREATED or facts.local or not created:
        return
    problem = f"the job has no pods yet, {age(created, facts.now)} after it was created"
    step = "wait a few seconds and check again"
    if not facts.ranks:  # a CronJob between its times, a Deployment that is scaled to 0
        problem = f"{facts.job.argument} has no pods, and its fields ask for none now"
        step = f"kubectl describe {facts.kubectl_name} shows what it waits for"
    yield Finding(Cause.WAITING, problem, step)


def operator_silent(facts: Facts) -> Iterator[Finding]:
    """No operator works on the job: no status, no Events, no Pods."""
    status, now = facts.status, facts.now
    if status.state.finished or status.state in _HELD or not facts.missing or facts.local:
        return
    name = facts.target.controller.name
    if manager := facts.job.managed_by:
        yield Finding(
            Cause.OPERATOR_SILENT,
            f"the job is managed by {manager} (managedBy); {name} ignores it",
            "see what that controller reports about it, or remove managedBy",
        )
        return
    labels = facts.target.controller.deployment
    look = f"(kubectl get deployment -A -l {labels}) " if labels else ""
    step = f"check whether it runs {look}and its logs; it continues with the job when it is back"
    active = max(_activity_times(facts), default=None)
    if active is None:
        if status.created and now - status.created > _ANSWER:
            yield Finding(
                Cause.OPERATOR_SILENT,
                f"{name} has not acted on the job for {age(status.created, now)}: it"
                f" has no status, no events and no pods{_operator_deployment(facts)}",
                step,
            )
    elif now - active > _SILENCE + timedelta(seconds=facts.target.controller.delay):
        yield Finding(
            Cause.OPERATOR_SILENT,
            f"{listed(facts.missing)}: no pod, and {name} has created none; its last status"
            f" is {age(active, now)} old{_operator_deployment(facts)}",
            step,
            replicas=facts.missing,
        )


def _activity_times(facts: Facts) -> Iterator[datetime]:
    yield from (event_time(event) for event in facts.snapshot.events)
    yield from (pod.created_at for pod in facts.pods if pod.created_at)
    for condition in facts.job.status.get("conditions") or ():
        if changed := moment(condition.get("lastTransitionTime")):
            yield changed


def _operator_deployment(facts: Facts) -> str:
    """The state of the controller's Deployment, where it can be read and is not ready."""
    for deployment in map(Object, facts.of_kind("Deployment")):
        ready, pods = deployment.status.get("readyReplicas", 0), deployment.spec.get("replicas", 1)
        if ready < max(pods, 1):
            name = f"{deployment.namespace}/{deployment.name}"
            return f"; {name} has {ready} of {pods} pods ready"
    return ""


def left_early(facts: Facts) -> Iterator[Finding]:
    """Replicas that have ended with exit code 0 while others run: these may wait forever."""
    running = [pod for pod in facts.pods if pod.training]
    first = next(iter(facts.ranks), "")
    # Workers of a parameter server, whose first replica reports nothing, end each at its time.
    if facts.status.state.finished or not running or reporting_replica(facts.job) != first:
        return
    ended = {
        pod.replica: pod.trained_until
        for pod in facts.done
        if pod.trained_until
        and facts.now - pod.trained_until > _RANKS_END
        and not any("running" in container.state for container in pod.containers)  # a sidecar
    }
    if ended:
        replicas = tuple(ended)
        remaining = listed(pod.replica for pod in running)
        yield Finding(
            Cause.LEFT_EARLY,
            f"{listed(map(facts.with_ranks, replicas))} ended with exit code 0"
            f"{ago(max(ended.values()), facts.now)}, and {remaining} still"
            f" {'run' if len(running) > 1 else 'runs'}: a collective would wait forever",
            f"where {remaining} only evaluates or saves, wait; else see the last lines of all:"
            f" k8sjob logs {facts.output_argument}; {equal_steps(facts)}",
            replicas=replicas,
        )


def no_progress(facts: Facts) -> Iterator[Finding]:
    """A running group that waits, of which its rank 0 or the agent there has warned."""
    reporter = _reporter(facts)
    if facts.status.state is not JobState.RUNNING or not facts.runs_again(reporter):
        return
    if warning := Training.of(facts.events.get(reporter, ())).hang:
        rank = warning.data.get("rank")
        yield Finding(
            Cause.NO_PROGRESS,
            one_line(str(warning.data.get("message", "")))
            + f" (reported {age(datetime.fromtimestamp(warning.time, UTC), facts.now)} ago)",
            "if this is an evaluation, a compilation, a checkpoint or work before or after"
            " training, wait; a hang in a collective ends by itself after run.hang_timeout or"
            " torch's own timeout",
            # Anybody's script may write such an event: True is an int, too.
            replicas=(facts.replica_of(rank),) if type(rank) is int and rank >= 0 else (),
        )


def no_group(facts: Facts) -> Iterator[Finding]:
    """Processes that each trained separately, or whose script started a launcher of its own."""
    if not facts.reported(EventKind.STARTED):
        warnings = facts.reported(EventKind.WARNING)
        launched = [event for event in warnings if event.data.get("reason") == Cause.OWN_LAUNCHER]
        if launched:
            command = one_line(str(launched[-1].data.get("command")))
            yield Finding(
                Cause.OWN_LAUNCHER,
                f"the script has started a launcher in each rank ({command}), and the ranks have no"
                " process group: launchers inherit the job's variables, so they wait for each"
                " other, or each trains by itself",
                "remove it and set replicas.nproc_per_node, or start it by run.command",
            )
            return
    reasons = [
        reason
        for pod in facts.pods
        if (reason := Reason.decode(pod.terminated.get("message") or ""))
    ]
    if any(reason.type == "Unmet" for reason in reasons) or facts.reported(EventKind.UNMET):
        yield Finding(
            Cause.NO_GROUP,
            "its processes created no process group: each of them trained a separate model",
            "create a process group in the script before it trains: k8sjob's session(), or"
            " torch.distributed.init_process_group(); if none is needed, submit separate jobs of"
            " one process",
        )


def nan_loss(facts: Facts) -> Iterator[Finding]:
    """A loss that has not been a finite number in any known step, or twice at last."""
    reports = [
        event
        for event in facts.events.get(_reporter(facts), ())
        if event.kind in (EventKind.PROGRESS, EventKind.METRICS)
        and isinstance(event.data.get("loss"), int | float)
    ]
    bad = list(takewhile(lambda event: not math.isfinite(event.data["loss"]), reversed(reports)))
    if bad and len(bad) >= min(2, len(reports)):
        report = bad[-1].data
        epoch, step = report.get("epoch"), report.get("step")
        counted = int(bad[-1].kind == EventKind.PROGRESS)  # from 0
        since = "in all known steps"
        if isinstance(epoch, int):
            at = f", step {step}" if isinstance(step, int) else ""
            since = f"since epoch {epoch + counted}{at} or earlier"
        yield Finding(
            Cause.NAN_LOSS,
            f"the loss has been {bad[0].data['loss']} {since}: the model learns nothing",
            "lower the learning rate, clip the gradients, or look for the first such value in the"
            " data and the model: torch.autograd.set_detect_anomaly(True)",
        )


def left_over(facts: Facts) -> Iterator[Finding]:
    """Pods that still run, and hold what they have, though the job has ended."""
    ended, finished = facts.status.finished, facts.status.state.finished
    if not finished or facts.local or ended is None or facts.job.deleting:
        return
    keeps_pods = facts.job.keeps_pods
    pods = [p for p in facts.pods if p.phase in ("Running", "Pending") and not p.deleting]
    if not pods or facts.now - ended < _CLEAN_UP:
        return
    gpus = sum(
        int(amount)
        for pod in pods
        for name, amount in pod_requests(pod.spec).items()
        if counts_gpus(name)
    )
    replicas = tuple(pod.replica for pod in pods)
    situation = "still there" if any(pod.phase == "Pending" for pod in pods) else "still running"
    policy = "; policy.clean_pod_policy: Running removes them by itself at the end"
    yield Finding(
        Cause.LEFTOVER,
        f"{listed(replicas)}: {situation} though the job ended ({facts.status.state})"
        f" {age(ended, facts.now)} ago" + (f"; {counted(gpus, 'GPU')} held" if gpus else ""),
        f"k8sjob delete {facts.job_argument} removes {'them' if len(pods) > 1 else 'it'}"
        + (policy if keeps_pods else f"; {facts.target.controller.name} should have done so"),
        replicas=replicas,
    )


def _reporter(facts: Facts) -> str:
    """The replica of rank 0; of an elastic group, in which any may have it, the last that wrote."""
    job = facts.job
    if not job.is_elastic:
        return reporting_replica(job) if facts.ranks else ""
    written = {
        replica: event.time
        for replica, events in facts.events.items()
        for event in events
        if event.kind not in _BY_AGENTS
    }
    return max(written, key=written.__getitem__, default="")

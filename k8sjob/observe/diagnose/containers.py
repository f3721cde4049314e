"""Containers that do not start, or wait: images, settings, sandboxes, init containers."""

from __future__ import annotations

import re
import shlex
from datetime import timedelta
from typing import TYPE_CHECKING, Final

from k8sjob.contract import ExitCode
from k8sjob.kube.objects import Object, event_time, moment
from k8sjob.observe.diagnose.facts import SIGKILLED
from k8sjob.observe.diagnose.finding import (
    POD,
    Cause,
    Explanation,
    best_match,
    first_match,
    grouped,
    load_data,
    load_rules,
    one_line,
)
from k8sjob.observe.diagnose.volumes import AFTER_MOUNTS, missing_reference

if TYPE_CHECKING:
    from collections.abc import Iterator

    from k8sjob.findings import Finding
    from k8sjob.observe.diagnose.facts import Facts, ReplicaPod

_MISCONFIGURED: Final = frozenset({"CreateContainerConfigError", "CreateContainerError"})
_SIDECAR_ENDS: Final = timedelta(seconds=15)
"""Time by which another container may end after the training one."""
_KILLED_AFTER: Final = timedelta(seconds=60)
"""Maximum time after its grace period until a node ends a Pod."""
_RESOLVED: Final = timedelta(seconds=10)
"""Time after which the name of a ready Master can be resolved."""
_WAIT: Final = "it continues when the Master is ready"
_NAMES: Final = re.compile(
    r"\[[^][]*+\](?::\d+)?|\b(?!i/o\b)\w\S{0,250}[/.:@]\w\S*|(?<=lookup )\S+"
    r"|(?<=manifest )\S+(?= in )|(?<=pull image )\"[^\"]*\"|(?<=pulling image )\"[^\"]*\""
)
"""Parts of an error that name an image, a host, a port or a digest: 5401, forbidden/train:404."""


def bad_image(facts: Facts, pod: ReplicaPod) -> Explanation | None:
    """An image that cannot be pulled, and why."""
    waiting = [container for container in pod.containers if container.waiting]
    pulls = (c for c in waiting if c.waiting.get("reason") in load_data("pull")["reasons"])
    container = next(pulls, None)
    if container is None:
        return None
    image = container.spec.get("image") or container.status.get("image", "")
    # While a kubelet before 1.32 backs off, only an Event has the error, and another one follows it
    # again and again: "Error: ImagePullBackOff".
    message = container.waiting.get("message", "")
    if "Back-off" in message and "Err" not in message:
        errors = (e.get("message", "") for e in reversed(pod.events) if e.get("reason") == "Failed")
        message = next((text for text in errors if not text.startswith("Error: ")), message)
    explanation = explain_pull(container.waiting["reason"], image, message)
    # By default it is alpine:3.10 of Docker Hub, whatever registry the job's own images come from.
    if container.name == facts.target.pods.init_container:
        return Explanation(
            explanation.cause,
            f"the operator's init image: {explanation.problem}",
            f"the operator's flag {facts.target.controller.image_flag} sets it: change it to an"
            " image that this cluster can pull",
        )
    if explanation.cause is Cause.IMAGE_ACCESS:
        secrets = [s.get("name", "") for s in pod.spec.get("imagePullSecrets") or ()]
        uses = f"it uses {', '.join(secrets)}" if secrets else "it uses none"
        if gone := [name for name in secrets if ("secrets", name) in facts.not_found]:
            uses += f"; there is no {' or '.join(gone)} in namespace {facts.namespace}"
        more = (
            f" ({uses}); to create one from your login: kubectl create secret docker-registry NAME"
            f" -n {facts.namespace} --from-file=.dockerconfigjson=$HOME/.docker/config.json"
        )
        return explanation._replace(next_step=explanation.next_step + more)
    return explanation


def explain_pull(reason: str, image: str, message: str) -> Explanation:
    """Why an image cannot be pulled."""
    text = f"{reason} {_NAMES.sub('', message)}"
    return best_match(load_rules("pull"), text, image=image, detail=_innermost(message))


def _innermost(message: str) -> str:
    """The innermost errors of containerd's chain."""
    message = re.sub(r'^Back-off pulling image "[^"]*": \w+: ', "", message)
    message = re.sub(r"^Failed to pull image \"[^\"]*\": ", "", message)
    message = re.sub(r"rpc error: code = \w+ desc = ", "", message)
    chain = r"failed to (?:pull and unpack image|resolve reference) \"[^\"]*\": "
    return one_line(re.sub(chain, "", message))


def bad_container(facts: Facts, pod: ReplicaPod) -> Explanation | None:
    """A container that the kubelet cannot create: a missing secret, a user, a path."""
    container = next((c for c in pod.containers if c.waiting.get("reason") in _MISCONFIGURED), None)
    if container is None:
        return None
    message = container.waiting.get("message", "")
    if reference := missing_reference(facts, message):
        return reference
    return first_match(
        load_rules("containers"),
        f"{'init ' * container.init}{message}",
        problem=f"its container {container.name!r} cannot be created: {one_line(message)}",
        whose="operator's " * (container.name == facts.target.pods.init_container),
        node=pod.node,
    )


def bad_sandbox(_facts: Facts, pod: ReplicaPod) -> Explanation | None:
    """A node that cannot create the Pod's network or its sandbox."""
    # The Event stays for an hour: one about a later step says that the kubelet got over it.
    event = pod.last_event(*AFTER_MOUNTS)
    if event.get("reason") != "FailedCreatePodSandBox" or pod.phase != "Pending":
        return None
    if any(c.state.keys() & {"running", "terminated"} for c in pod.containers):
        return None
    message = one_line(event.get("message", ""))
    if "OOM-killed" in message:  # runc itself needs some megabytes under the Pod's limit
        limit = pod.memory_limit or "?"
        problem = f"its memory limit is too low even to start ({limit})"
        return Explanation(Cause.MEMORY, problem, "raise resources.memory")
    return Explanation(
        Cause.SANDBOX,
        f"its node {pod.node} cannot set it up: {_innermost(message)}",
        f"it is the node's network or its container runtime: kubectl describe node {pod.node}; the"
        " kubelet retries",
        since=pod.created_at,
    )


def bad_init(facts: Facts, pod: ReplicaPod) -> Explanation | None:
    """An init container of the job's own that fails."""
    for status, ended in pod.failed_inits:
        name = str(status.raw.get("name", ""))
        if name == facts.target.pods.init_container:
            continue  # it fails after 100 look-ups of the Master's name: see master_awaited
        restarts = int(status.raw.get("restartCount", 0))
        times = f", {restarts} times" if restarts > 1 else ""
        message = one_line(ended.get("message", ""))
        lines = facts.init_output(name)
        step = f"see what it wrote: kubectl logs -n {facts.namespace} {POD} -c {shlex.quote(name)}"
        if ended.get("reason") == "OOMKilled":
            message, step = "out of memory", "raise that container's memory limit"
        elif not message and lines:
            message = f"it wrote last: {'; '.join(lines)}"
        return Explanation(
            Cause.INIT,
            f"its init container {name!r} ended with exit code {int(ended['exitCode'])}"
            f"{times}{f': {message}' * bool(message)}",
            step,
            since=moment(ended.get("finishedAt")),
        )
    return None


def kept_by_sidecar(facts: Facts, pod: ReplicaPod) -> Explanation | None:
    """A Pod whose training has succeeded and that another container keeps from ending."""
    # Controllers go by the phase of a Pod: it is Succeeded when all of its containers have ended.
    sidecars = [c.name for c in pod.containers if not c.init and "running" in c.state]
    ended_well = pod.terminated.get("exitCode") == 0
    if pod.phase != "Running" or pod.deleting or not ended_well or not sidecars:
        return None
    since = pod.trained_until
    if since and facts.now - since < _SIDECAR_ENDS:
        return None
    return Explanation(
        Cause.SIDECAR,
        f"its training has ended, but its container {sidecars[0]!r} keeps the pod running",
        'remove the sidecar (for Istio: the annotation sidecar.istio.io/inject: "false", which'
        " k8sjob sets), or make it an init container with restartPolicy Always, which ends with the"
        " pod",
        since=since,
    )


def failed_beside(facts: Facts, pod: ReplicaPod) -> Explanation | None:
    """A container that failed beside the main one, which has not."""
    main = pod.asked.raw.get("name")
    if not main or pod.deleting or pod.terminated.get("exitCode"):
        return None
    for container in pod.containers:
        before = Object(container.status).part("lastState", "terminated")
        ended = container.ended or before
        code, memory = ended.get("exitCode"), ended.get("reason") == "OOMKilled"
        # What ends the Pod stops all containers with the other codes.
        stopped = code in {ExitCode.STOPPED, SIGKILLED} and not memory
        runs = "running" in container.state and not memory
        if container.init or container.name == main or not code or stopped or runs:
            continue
        look = f"kubectl logs -n {facts.namespace} {POD} -c {shlex.quote(container.name)}"
        return Explanation(
            Cause.SIDECAR,
            f"its container {container.name!r} ended with exit code {code}"
            f"{', out of memory' * memory}, and {main!r} beside it did not fail",
            "raise that container's memory limit" if memory else f"see what it wrote: {look}",
            since=moment(ended.get("finishedAt")),
        )
    return None


def started_again(_facts: Facts, pod: ReplicaPod) -> Explanation | None:
    """A Pod whose training has succeeded and that its restart policy starts again."""
    # A Pod under Always never reaches the phase Succeeded, by which the operator ends the job.
    always = pod.spec.get("restartPolicy", "Always") == "Always"
    if not always or not pod.live or pod.deleting or pod.terminated_before.get("exitCode") != 0:
        return None
    return Explanation(
        Cause.STARTED_AGAIN,
        "it ended with exit code 0 and is started again each time, so the job never succeeds",
        "use OnFailure instead of Always: policy.restart_policy, in a manifest restartPolicy",
    )


def master_awaited(facts: Facts, *, explained: bool) -> Iterator[Finding]:
    """Workers whose init container cannot find the Master's name yet.

    `explained`: there is a finding about the Master itself, from which this follows.
    """
    if facts.status.state.finished:
        return
    waiting = [
        pod
        for pod in facts.pods
        for container in pod.containers
        if container.init
        and container.name == facts.target.pods.init_container
        and pod.phase == "Pending"
        and (
            "running" in container.state
            or container.ended.get("exitCode")  # after 100 look-ups it ends, and is restarted
            or container.waiting.get("reason") == "CrashLoopBackOff"
        )
    ]
    if not waiting:
        return
    problem, step = _master(facts)
    if explained and step == _WAIT:
        return
    begun = (moment(pod.status.get("startTime")) or pod.created_at for pod in waiting)
    since = min((time for time in begun if time), default=None)
    explanation = Explanation(Cause.MASTER_AWAITED, problem, step, since=since)
    yield from grouped((explanation._replace(replica=p.replica) for p in waiting), facts.now)


def _master(facts: Facts) -> tuple[str, str]:
    """Why the Master's name cannot be found, and the next step."""
    name = f"{facts.name}-master-0"
    problem = f"its init container waits until the name {name} resolves"
    master = facts.pod("master-0")
    if master is None:
        return f"{problem}; the Master has no pod", _WAIT
    ready = master.condition("Ready")
    # The Service is headless: its name resolves once the Pod is Ready, and not before.
    if ready.true and ready.since and facts.now - ready.since > _RESOLVED:
        step = f"check the cluster's DNS and the Service (kubectl get svc {name}"
        problem += "; the Master is ready, so the name should resolve"
        return problem, f"{step} -n {facts.namespace})"
    if master.phase == "Running" and ready.false:
        if master.asked.part("readinessProbe"):
            return (
                f"{problem}; the Master runs but is not ready, according to its readinessProbe",
                "remove the probe: the name resolves when the pod is Ready, and training needs it",
            )
        return f"{problem}; the Master is not ready", _WAIT
    situation = next(r.situation for r in facts.status.replicas if r.name == "master-0")
    return f"{problem}; the Master is {situation}", _WAIT


def _ending(facts: Facts, pod: ReplicaPod) -> Explanation:
    """A Pod that is being deleted, and what keeps it after its grace period."""
    meta, problem = pod.metadata, "its pod is terminating"
    finalizers = meta.get("finalizers") or ()
    end = moment(meta.get("deletionTimestamp"))  # of its grace period
    since = end - timedelta(seconds=meta.get("deletionGracePeriodSeconds") or 0) if end else None
    if end is None or facts.now - end < _KILLED_AFTER:
        step = "wait: it can save its state until the end of its grace period"
    elif finalizers and not pod.live:  # its node has ended it
        problem += f"; it is waiting for its finalizers: {', '.join(finalizers)}"
        step = f"whoever set {finalizers[0]} must remove it; check whether that controller runs"
    else:
        step = (
            f"its grace period has passed, and its node {pod.node} has not ended it: kubectl"
            f" describe node {pod.node}; kubectl delete pod --force -n {facts.namespace} {POD}"
            " removes it by force"
        )
    return Explanation(Cause.WAITING, problem, step, since=since)


def slow(facts: Facts, pod: ReplicaPod) -> Explanation | None:
    """The reason why a replica does not run yet, or is not gone yet."""
    if pod.deleting:
        return _ending(facts, pod)
    if pod.phase != "Pending":
        return None
    if not pod.node:
        scheduler = pod.spec.get("schedulerName", "default-scheduler")
        problem = f"the scheduler {scheduler!r} has not considered it"
        step = "wait; if this continues, check whether that scheduler runs in the cluster"
        since = pod.created_at
    elif init := next((c for c in reversed(pod.containers) if c.initializing), None):
        if init.name == facts.target.pods.init_container:
            return None  # see master_awaited
        problem = f"its init container {init.name!r} runs"
        step = (
            f"wait; its output: kubectl logs -n {facts.namespace} {POD} -c {shlex.quote(init.name)}"
        )
        since = moment(Object(init.state).part("running").get("startedAt"))
    elif (event := pod.last_event("Pulling", "Pulled", "Scheduled")).get("reason") == "Pulling":
        image = event.get("message", "").partition('"')[2].partition('"')[0]
        problem = f"its node is pulling the image {image}"
        step = "wait; a large image takes minutes the first time on each node"
        since = event_time(event)
    else:
        problem = "its containers are being created"
        step = f"wait; if this continues: kubectl describe {facts.pods_argument}"
        since = pod.condition("PodScheduled").since or pod.created_at
    return Explanation(Cause.WAITING, problem, step, since=since)

"""Containers that do not start: images, settings, sandboxes, init containers."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

from k8sjob.kube.objects import moment
from k8sjob.observe.diagnose.finding import (
    REPLICA,
    Cause,
    Explanation,
    ReplicaFinding,
    Rule,
    first_match,
    one_line,
)
from k8sjob.observe.diagnose.volumes import missing_reference

if TYPE_CHECKING:
    from k8sjob.observe.diagnose.facts import Facts, Pod

__all__ = ["bad_container", "bad_image", "bad_init", "bad_sandbox", "explain_pull"]

_PULLING: Final = frozenset(
    {
        "ErrImagePull",
        "ImagePullBackOff",
        "InvalidImageName",
        "ErrImageNeverPull",
        "ImageInspectError",
        "RegistryUnavailable",
        "SignatureValidationFailed",
    }
)
_MISCONFIGURED: Final = frozenset({"CreateContainerConfigError", "CreateContainerError"})
_PULL_RULES: Final = (
    Rule(
        r"no match for platform|no matching manifest|no image found in .* for architecture",
        Cause.IMAGE,
        "the image {image} is built for another processor architecture than its node's: {detail}",
        "build it for that platform (image.platform in job.yaml)",
    ),
    # Before the refusal: a token that cannot be fetched "failed to authorize".
    Rule(
        r"no such host|connection (?:refused|reset|timed out)|i/o timeout|network is unreachable"
        r"|no route to host|TLS handshake timeout|context deadline exceeded|x509:|request canceled"
        r"|server gave HTTP response|\b429\b|toomanyrequests|\b50[0-4]\b|EOF|server misbehaving"
        r"|Temporary failure in name",
        Cause.REGISTRY,
        "the registry of the image {image} cannot be reached from its node: {detail}",
        "check that it runs and that the nodes reach it; the kubelet retries",
    ),
    Rule(
        r"\b40[13]\b|[Uu]nauthorized|[Ff]orbidden|authoriz|(?<!permission )\bdenied\b"
        r"|authentication|credentials",
        Cause.IMAGE_ACCESS,
        "the registry refuses the image {image}: {detail}",
        "it does not exist, or may not be read without a pull secret: image.pull_secrets names one",
    ),
    Rule(
        r"not found|(?:manifest|name) unknown|NotFound|\b404\b|deleted or has expired",
        Cause.IMAGE_MISSING,
        "there is no image {image} in its registry",
        "push it, or correct its name or tag in the job",
    ),
    Rule(r"", Cause.IMAGE, "the image {image} cannot be pulled: {detail}", "the kubelet retries"),
)
"""Errors of the registry, or of the connection to it."""
_NAMES: Final = re.compile(
    r"\[[^]]*\](?::\d+)?|\b(?!i/o\b)\w\S*[/.:@]\w\S*|(?<=lookup )\S+|(?<=manifest )\S+(?= in )"
    r"|(?<=pull image )\"[^\"]*\"|(?<=pulling image )\"[^\"]*\""
)
"""Parts of an error that name an image, a host, a port or a digest: 5401, forbidden/train:404."""


def bad_image(facts: Facts, pod: Pod) -> ReplicaFinding | None:
    """An image that cannot be pulled, and why."""
    container = next((c for c in pod.containers if c.waiting.get("reason") in _PULLING), None)
    if container is None:
        return None
    image = container.spec.get("image") or container.status.get("image", "")
    # While the kubelet backs off, older ones have the error in an Event alone.
    message = container.waiting.get("message", "")
    if "Back-off" in message and "Err" not in message:
        message = pod.last_event("Failed").get("message", message)
    cause, what, step = explain_pull(container.waiting["reason"], image, message)
    if container.name == facts.target.init_container:
        what = f"the operator's init image: {what}"
        step = (
            "the operator's flag --pytorch-init-container-image names it: have it set to an image"
            " that this cluster can pull"
        )
    elif cause is Cause.IMAGE_ACCESS:
        secrets = [s.get("name", "") for s in pod.spec.get("imagePullSecrets") or ()]
        uses = f"it uses {', '.join(secrets)}" if secrets else "it uses none now"
        step += (
            f" ({uses}); to make one of your login: kubectl create secret docker-registry NAME -n"
            f" {facts.namespace} --from-file=.dockerconfigjson=$HOME/.docker/config.json"
        )
    return ReplicaFinding(cause, what, step, pod.replica)


def explain_pull(reason: str, image: str, message: str) -> Explanation:
    """Why an image cannot be pulled.

    Args:
        reason: why the container waits.
        image: its image.
        message: of the kubelet.
    """
    detail = _innermost(message)
    if reason == "InvalidImageName":
        what = f"{image!r} is not a valid image name: {detail}"
        return Explanation(Cause.IMAGE_NAME, what, "correct it in the job")
    if reason == "ErrImageNeverPull":
        return Explanation(
            Cause.IMAGE_MISSING,
            f"the image {image} is not on its node, and image.pull_policy Never forbids to pull it",
            "use IfNotPresent, or bring the image to every node",
        )
    found = first_match(_PULL_RULES, _NAMES.sub("", message), image=image, detail=detail)
    assert found  # noqa: S101 - the last rule matches everything
    return found


def _innermost(message: str) -> str:
    """The innermost errors of containerd's chain."""
    message = re.sub(r'^Back-off pulling image "[^"]*": \w+: ', "", message)
    message = re.sub(r"^Failed to pull image \"[^\"]*\": ", "", message)
    message = re.sub(r"rpc error: code = \w+ desc = ", "", message)
    chain = r"failed to (?:pull and unpack image|resolve reference) \"[^\"]*\": "
    return one_line(re.sub(chain, "", message))


def bad_container(facts: Facts, pod: Pod) -> ReplicaFinding | None:
    """A container that the kubelet cannot create: a missing secret, a user, a path."""
    container = next((c for c in pod.containers if c.waiting.get("reason") in _MISCONFIGURED), None)
    if container is None:
        return None
    message = container.waiting.get("message", "")
    if found := missing_reference(facts, pod, message):
        return found
    if "runAsNonRoot" in message:
        step = (
            "the image must name a user other than root by number (USER 1000 in its Dockerfile), or"
            " overlay must set securityContext.runAsUser; an image that k8sjob builds has a user"
        )
    elif "no command specified" in message:
        step = "name a command in the job, or one in the image"
    else:
        step = "correct the job; the kubelet retries"
    what = f"its container {container.name!r} cannot be created: {one_line(message)}"
    return ReplicaFinding(Cause.CONTAINER, what, step, pod.replica)


def bad_sandbox(_facts: Facts, pod: Pod) -> ReplicaFinding | None:
    """A node that cannot create the Pod's network or its sandbox."""
    event = pod.last_event("FailedCreatePodSandBox")
    if not event or pod.phase != "Pending" or any(c.status.get("started") for c in pod.containers):
        return None
    if any(c.state.keys() & {"running", "terminated"} for c in pod.containers):
        return None
    message = one_line(event.get("message", ""))
    if "OOM-killed" in message:
        limit = pod.limits().get("memory", "?")
        what = f"its memory limit is too low even to start ({limit})"
        return ReplicaFinding(Cause.MEMORY, what, "raise resources.memory", pod.replica)
    return ReplicaFinding(
        Cause.SANDBOX,
        f"its node {pod.node} cannot set it up: {_innermost(message)}",
        f"it is the node's network or its container runtime: kubectl describe node {pod.node}; the"
        " kubelet retries",
        pod.replica,
        pod.created,
    )


def bad_init(facts: Facts, pod: Pod) -> ReplicaFinding | None:
    """An init container of the job's own that fails."""
    for container in pod.containers:
        if not container.init or container.name == facts.target.init_container:
            continue
        before = (container.status.get("lastState") or {}).get("terminated") or {}
        ended = container.ended if container.ended.get("exitCode") else before
        if not ended.get("exitCode") or container.ended.get("exitCode") == 0:
            continue
        restarts = int(container.status.get("restartCount", 0))
        times = f", {restarts} times over" if restarts > 1 else ""
        message = one_line(ended.get("message", ""))
        return ReplicaFinding(
            Cause.INIT,
            f"its init container {container.name!r} ended with exit code {int(ended['exitCode'])}"
            f"{times}{f': {message}' * bool(message)}",
            f"see what it wrote: kubectl logs -n {facts.namespace} {facts.name}-{REPLICA}"
            f" -c {container.name}",
            pod.replica,
            moment(ended.get("finishedAt")),
        )
    return None

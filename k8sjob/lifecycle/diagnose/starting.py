"""Containers that do not come to run: images, settings, sandboxes, init containers."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

from k8sjob.backends.events import moment
from k8sjob.lifecycle.diagnose.case import OPERATOR_INIT
from k8sjob.lifecycle.diagnose.finding import REPLICA, Cause, Seen, Told, plain
from k8sjob.lifecycle.diagnose.volumes import reference

if TYPE_CHECKING:
    from k8sjob.lifecycle.diagnose.case import Case, Container, Pod

__all__ = ["bad_container", "bad_image", "bad_init", "bad_sandbox"]

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
_UNREACHABLE: Final = (
    r"no such host|connection (?:refused|reset|timed out)|i/o timeout|network is unreachable"
    r"|no route to host|TLS handshake timeout|context deadline exceeded|x509:|request canceled"
    r"|server gave HTTP response|\b429\b|toomanyrequests|\b50[0-4]\b|EOF|server misbehaving"
    r"|Temporary failure in name"
)
_REFUSED: Final = (
    r"\b40[13]\b|[Uu]nauthorized|[Ff]orbidden|authoriz|(?<!permission )\bdenied\b|authentication"
    r"|credentials"
)
_IMAGE_ERRORS: Final = (
    (
        r"no match for platform|no matching manifest|no image found in .* for architecture",
        Cause.IMAGE,
        "the image {image} is not made for its node's kind of processor: {detail}",
        "build it for that platform (image.platform in job.yaml)",
    ),
    (
        _UNREACHABLE,
        Cause.REGISTRY,
        "the registry of the image {image} cannot be reached from its node: {detail}",
        "see that it runs and that the nodes reach it; the kubelet tries again by itself",
    ),
    (
        _REFUSED,
        Cause.IMAGE_ACCESS,
        "the registry refuses the image {image}: {detail}",
        "it does not exist, or may not be read without a pull secret: image.pull_secrets names one",
    ),
    (
        r"not found|(?:manifest|name) unknown|NotFound|\b404\b|deleted or has expired",
        Cause.IMAGE_MISSING,
        "there is no image {image} in its registry",
        "push it, or correct its name or tag in the job",
    ),
)
"""What the registry or the way to it says: pattern, cause, what was seen, next step.

The way comes before the refusal: a token that cannot be fetched "failed to authorize".
"""
_NAME: Final = re.compile(
    r"\[[^]]*\](?::\d+)?|\b(?!i/o\b)\w\S*[/.:@]\w\S*|(?<=lookup )\S+|(?<=manifest )\S+(?= in )"
    r"|(?<=pull image )\"[^\"]*\"|(?<=pulling image )\"[^\"]*\""
)
"""Words of an error that name an image, a host, a port or a digest: 5401, forbidden/train:404."""


def bad_image(case: Case, pod: Pod) -> Seen | None:
    """An image that cannot be pulled, and whose fault that is."""
    container = next(
        (c for c in pod.containers if c.waiting.get("reason") in _PULLING),
        None,
    )
    if container is None:
        return None
    image = container.spec.get("image") or container.status.get("image", "")
    # While the kubelet backs off, older ones tell the error in an Event alone.
    said = container.waiting.get("message", "")
    if "Back-off" in said and "Err" not in said:
        said = pod.last_event("Failed").get("message", said)
    cause, what, step = _image(container.waiting["reason"], image, said)
    if container.name == OPERATOR_INIT:
        what = f"the operator's init image: {what}"
        step = (
            "the operator's flag --pytorch-init-container-image names it: have it set to an image"
            " that this cluster can pull"
        )
    elif cause is Cause.IMAGE_ACCESS:
        named = [s.get("name", "") for s in pod.spec.get("imagePullSecrets") or ()]
        has = f"it uses {', '.join(named)}" if named else "it uses none now"
        step += (
            f" ({has}); made of your login: kubectl create secret docker-registry NAME -n"
            f" {case.namespace} --from-file=.dockerconfigjson=$HOME/.docker/config.json"
        )
    return Seen(cause, what, step, pod.replica)


def _image(reason: str, image: str, said: str) -> Told:
    detail = _detail(said)
    if reason == "InvalidImageName":
        return Told(
            Cause.IMAGE_NAME, f"{image!r} is no image name: {detail}", "correct it in the job"
        )
    if reason == "ErrImageNeverPull":
        return Told(
            Cause.IMAGE_MISSING,
            f"the image {image} is not on its node, and image.pull_policy Never forbids to pull it",
            "use IfNotPresent, or bring the image to every node",
        )
    meant = _NAME.sub("", said)
    for pattern, cause, what, step in _IMAGE_ERRORS:
        if re.search(pattern, meant):
            return Told(cause, what.format(image=image, detail=detail), step)
    return Told(
        Cause.IMAGE, f"the image {image} cannot be pulled: {detail}", "the kubelet tries again"
    )


def _detail(said: str) -> str:
    """The innermost errors of containerd's chain."""
    said = re.sub(r'^Back-off pulling image "[^"]*": \w+: ', "", said)
    said = re.sub(r"^Failed to pull image \"[^\"]*\": ", "", said)
    said = re.sub(r"rpc error: code = \w+ desc = ", "", said)
    said = re.sub(r"failed to (?:pull and unpack image|resolve reference) \"[^\"]*\": ", "", said)
    return plain(said)


def bad_container(case: Case, pod: Pod) -> Seen | None:
    """A container that the kubelet cannot make: a missing secret, a user, a path."""
    container = next(
        (c for c in pod.containers if c.waiting.get("reason") in _MISCONFIGURED),
        None,
    )
    if container is None:
        return None
    said = container.waiting.get("message", "")
    if seen := reference(case, pod, said):
        return seen
    if "runAsNonRoot" in said:
        step = (
            "the image must name a user other than root by number (USER 1000 in its Dockerfile), or"
            " overlay must set securityContext.runAsUser; an image that is built here has a user"
        )
    elif "no command specified" in said:
        step = "name a command in the job, or one in the image"
    else:
        step = "correct the job; the kubelet tries again by itself"
    return Seen(
        Cause.CONTAINER,
        f"its container {container.name!r} cannot be made: {plain(said)}",
        step,
        pod.replica,
    )


def bad_sandbox(_case: Case, pod: Pod) -> Seen | None:
    """A node that cannot make the Pod's network or its sandbox."""
    event = pod.last_event("FailedCreatePodSandBox")
    if not event or pod.phase != "Pending" or any(c.status.get("started") for c in pod.containers):
        return None
    if any(c.state.keys() & {"running", "terminated"} for c in pod.containers):
        return None
    said = plain(event.get("message", ""))
    if "OOM-killed" in said:
        return Seen(
            Cause.MEMORY,
            f"its memory limit is too low even to start ({pod.limits().get('memory', '?')})",
            "raise resources.memory",
            pod.replica,
        )
    return Seen(
        Cause.SANDBOX,
        f"its node {pod.node} cannot set it up: {_detail(said)}",
        f"it is the node's network or its container runtime: kubectl describe node {pod.node}; the"
        " kubelet tries again by itself",
        pod.replica,
        pod.created,
    )


def bad_init(case: Case, pod: Pod) -> Seen | None:
    """An init container of the user's own that fails."""
    for container in pod.containers:
        if not container.init or container.name == OPERATOR_INIT:
            continue
        before = (container.status.get("lastState") or {}).get("terminated") or {}
        ended = container.ended if container.ended.get("exitCode") else before
        if ended.get("exitCode") and container.ended.get("exitCode") != 0:
            return Seen(
                Cause.INIT,
                _init_ended(container, int(ended["exitCode"]), ended.get("message", "")),
                f"see what it wrote: kubectl logs -n {case.namespace} {case.name}-{REPLICA}"
                f" -c {container.name}",
                pod.replica,
                moment(ended.get("finishedAt")),
            )
    return None


def _init_ended(container: Container, code: int, said: str) -> str:
    restarts = int(container.status.get("restartCount", 0))
    again = f", {restarts} times over" if restarts > 1 else ""
    words = f": {plain(said)}" if said.strip() else ""
    return f"its init container {container.name!r} ended with exit code {code}{again}{words}"

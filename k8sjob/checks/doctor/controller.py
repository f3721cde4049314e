"""Checks of a kind's controller: its API, its webhook, itself, its init container. Pure."""

from __future__ import annotations

import re
from itertools import chain, pairwise
from typing import TYPE_CHECKING, Final

from k8sjob.checks.doctor.check import fine, problem, unknown, warning
from k8sjob.contract import counted
from k8sjob.kube.objects import Object, at_path, containers
from k8sjob.targets.jobs import PREFERRED, namesake

if TYPE_CHECKING:
    from collections.abc import Iterator

    from k8sjob.checks.doctor.check import ClusterFacts
    from k8sjob.findings import Finding
    from k8sjob.kube.client.transport import ApiError
    from k8sjob.kube.objects import Json

_FALLBACK: Final = PREFERRED[1]
"""The kind that a cluster without the default one may have."""
_DENIED: Final = re.compile(r'admission webhook "(?P<webhook>[^"]+)" denied the request')
_INSTALL: Final = 'see "Set up a cluster for jobs" in the documentation'
_SLEEP: Final = re.compile(r"\bsleep (\d+(?:\.\d+)?)\b")
_LONG_SLEEP: Final = 1.0
"""Seconds; a Master's name is there about one second after its worker first asks for it."""


def crd(facts: ClusterFacts) -> Iterator[Finding]:
    """Whether the kind is served, and the kind that its controller makes of such jobs."""
    target, name = facts.target, facts.target.controller.name
    resources = (facts.object("jobs api") or {}).get("resources") or ()
    has_fallback = facts.object("other api") is not None
    if any(resource.get("name") == target.resource for resource in resources):
        unused = f"; {_FALLBACK.controller.name} is also served, but not used"
        beside = unused if has_fallback else ""
        yield fine("crd", f"{target.kind} is served as {target.api_version}{beside}")
        if (child := namesake(target)) and facts.error("made api") is not None:
            text = f"{child.resource} are not served, and {target.kind}s need them"
            yield problem("crd", f"{text} ({child.api_version})", f"have it installed; {_INSTALL}")
        return
    error = facts.error("jobs api")
    if error is not None and error.code != 404:
        yield problem("crd", f"{target.api_version} cannot be read: {error.detail}", _INSTALL)
    elif has_fallback:
        text = f"only {_FALLBACK.controller.name} is installed, which serves {_FALLBACK.kind}s"
        step = f"use --target {_FALLBACK.name}, or have {name} installed; {_INSTALL}"
        yield problem("crd", f"{target.kind} is not served; {text}", step)
    else:
        yield problem(
            "crd",
            f"{target.kind} is not served: the CRD of {name} is not installed",
            f"have {name} installed; {_INSTALL}",
        )


def webhook(facts: ClusterFacts) -> Iterator[Finding]:
    """Whether the controller's webhook answers: it must refuse a job with a bad name."""
    error, controller = facts.error("bad dry run"), facts.target.controller
    answer = error.detail if error else ""
    if answered := _own_webhook(facts, answer):
        yield fine("webhook", f"answers: {answered} refused an invalid job")
    elif error is None and facts.object("bad dry run") is not None:
        yield warning(
            "webhook",
            "an invalid job was accepted: its webhook is not installed, does not act, or its"
            " version has none",
            f"check that the operator runs; {_INSTALL}",
        )
    elif error is not None and "failed calling webhook" in answer:
        yield problem(
            "webhook",
            f"does not respond, so jobs can be neither created nor changed: {answer}",
            f"check {controller.name}: kubectl -n {controller.namespace} get pods",
        )
    elif error is not None and error.code != 404:  # a missing API is reported by crd
        yield unknown(
            "webhook",
            f"unknown, since a dry run failed for another reason: {answer}",
            "see the dry-run check",
        )


def _own_webhook(facts: ClusterFacts, answer: str) -> str:
    """The controller's webhook that has refused something; empty if it was none of them."""
    denial = _DENIED.search(answer)
    name = denial["webhook"] if denial else ""
    return name if name.endswith(facts.target.controller.webhooks) else ""


def dry_run(facts: ClusterFacts) -> Iterator[Finding]:
    """Whether the apiserver would take the job, or a minimal one; nothing is made."""
    job = "a minimal job" if facts.job is None else "the job"
    error = facts.error("dry run")
    if error is None:
        if facts.object("dry run") is not None:
            yield fine("dry-run", f"{job} is accepted in {facts.namespace}; nothing was created")
        return
    shares = facts.job is not None and facts.job.shares_companion
    if (beside := facts.target.companion) and beside.is_missed(error.detail) and not shares:
        yield fine(
            "dry-run", f"{job} is accepted as far as can be checked without its {beside.key}"
        )
        return
    message, step = _refused(error, job, facts)
    if error.code == 409:
        yield warning("dry-run", message, step)
    elif error.code != 404:  # what is not there, other checks say
        yield problem("dry-run", message, step)


def _refused(error: ApiError, job: str, facts: ClusterFacts) -> tuple[str, str]:
    answer = error.detail
    if error.code == 409:
        return (
            f"a job of that name exists in {facts.namespace}",
            "k8sjob submit attaches to it, or shows what is different",
        )
    if "failed calling webhook" in answer:
        return f"{job} cannot be checked: {answer}", "see the webhook check"
    if "admission webhook" in answer:
        refuser = _own_webhook(facts, answer)
        step = "correct the job" if refuser else "ask the owner of that policy"
        return f"{job} is refused: {answer}", step
    if error.code == 403:
        return f"{job} cannot be created: {answer}", "see the permissions check"
    causes = "".join(f"; {field}: {wrong}" for field, wrong in error.causes)
    return (
        f"{job} is refused: {answer}{causes}",
        "correct the job, or specify another namespace with -n",
    )


def operator(facts: ClusterFacts) -> Iterator[Finding]:
    """Whether the controller runs: its Deployment, or what its webhook shows."""
    labels = facts.target.controller.deployment
    deployments = facts.items("operator")
    if deployments is None:
        deployments = facts.items("operator's own namespace")
    if deployments:
        yield from (_deployment(deployment, labels) for deployment in deployments)
        return
    hidden = deployments is None
    reason = "you cannot read its Deployment" if hidden else f"no Deployment is labeled {labels}"
    error = facts.error("bad dry run")
    if error and _own_webhook(facts, error.detail):
        yield fine("operator", f"runs, since its webhook answers; {reason}")
    else:
        step = "ask the administrator whether it runs, or for manifests/rbac/capacity.yaml"
        yield unknown("operator", reason, step)


def _deployment(manifest: Json, labels: str) -> Finding:
    deployment = Object(manifest)
    namespace = deployment.namespace
    images = ", ".join(container.get("image", "") for container in _containers(manifest))
    ready, replicas = deployment.status.get("readyReplicas", 0), deployment.spec.get("replicas", 1)
    message = f"{namespace}/{deployment.name}: {ready} of {replicas} ready, image {images}"
    if ready:
        return fine("operator", message)
    step = f"jobs get no pods until it runs: kubectl -n {namespace} describe pods -l {labels}"
    return problem("operator", message, step)


def init_image(facts: ClusterFacts) -> Iterator[Finding]:
    """The image of the init container that the operator gives to workers of a job with a Master."""
    if facts.object("jobs api") is None or not facts.target.pods.init_container:
        return
    controller = facts.target.controller
    step = (
        "in a cluster without internet access, have the operator started with"
        f" {controller.image_flag}=IMAGE, one with nslookup that its nodes can pull"
    )
    pulls = [
        (container.get("image", ""), Object(pod).spec.get("nodeName", ""), status)
        for pod, container in init_containers(facts)
        for status in Object(pod).status.get("initContainerStatuses") or ()
        if status.get("name") == facts.target.pods.init_container
    ]
    for image, node, status in pulls:
        reason = at_path(status, "state", "waiting", "reason") or ""
        if "Image" in reason:
            yield problem("init-image", f"{image}: {reason} on node {node}", step)
            return
    pulled = sorted({node for _, node, status in pulls if status.get("imageID")})
    named = flag(facts, controller.image_flag)
    default = f"{controller.init_image} (the operator's default, unless another one is set)"
    image = named or (pulls[0][0] if pulls else default)
    text = f"workers wait for the Master's name in a container of {image}"
    if pulled:
        yield fine(
            "init-image", f"{text}; pulled on {counted(len(pulled), 'node')}, such as {pulled[0]}"
        )
    else:
        yield fine("init-image", f"{text}, which each node pulls", step)


def init_wait(facts: ClusterFacts) -> Iterator[Finding]:
    """Check how long that container sleeps between lookups of the Master's name, as pods show.

    Pods of a job are made at the same time, so the first lookup nearly always comes too early.
    """
    waits = {
        float(sleep[1])
        for _, container in init_containers(facts)
        if (sleep := _SLEEP.search(" ".join(map(str, container.get("command") or ()))))
    }
    if waits and max(waits) >= _LONG_SLEEP:
        yield fine(
            "init-wait",
            f"workers sleep {max(waits):g} s after each failed lookup of the Master's name, and"
            " the first one nearly always fails",
            "give the operator a template that looks it up more often, to shorten each start;"
            f" {_INSTALL}",
        )


def init_containers(facts: ClusterFacts) -> list[tuple[Json, Json]]:
    """The init containers of the operator that Pods have, each with its Pod."""
    return [
        (pod, container)
        for pod in facts.items("workers") or ()
        for container in Object(pod).spec.get("initContainers") or ()
        if container.get("name") == facts.target.pods.init_container
    ]


def flag(facts: ClusterFacts, name: str) -> str | None:
    """The value of a flag of the operator; empty if it has none, None if it may not be read."""
    deployments = facts.items("operator") or facts.items("operator's own namespace") or ()
    for container in chain.from_iterable(map(_containers, deployments)):
        words = [*(container.get("command") or ()), *(container.get("args") or ())]
        for word, following in pairwise([*words, ""]):
            if word.startswith(f"{name}="):
                return str(word.partition("=")[2])
            if word == name:
                return str(following)
    return "" if deployments else None


def _containers(deployment: Json) -> list[Json]:
    return containers(Object(deployment).part("spec", "template", "spec"))

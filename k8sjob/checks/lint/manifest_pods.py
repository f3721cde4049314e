"""Checks of a job of any kind: the types of its fields, and its Pods."""

from __future__ import annotations

import json
import re
from os.path import commonprefix
from typing import TYPE_CHECKING, Any, Final

from k8sjob.checks.base_images import reference_of
from k8sjob.checks.finding import message, pattern, table
from k8sjob.contract import Role
from k8sjob.findings import field_path
from k8sjob.image.registry.manifest import DEFAULT_REGISTRY
from k8sjob.kube.objects import ISTIO, Object, at_path
from k8sjob.kube.quantity import parse
from k8sjob.rules import Rules

if TYPE_CHECKING:
    from collections.abc import Iterator
    from decimal import Decimal

    from k8sjob.findings import FieldPath, Finding
    from k8sjob.targets.manifest_facts import ManifestContainer, ManifestJob, ManifestReplica

RULES: Final = Rules["ManifestJob"]("manifest")

_UNEXPANDED: Final = re.compile(r"(?<!\$)\$(?:\{[A-Za-z_]\w*\}|[A-Za-z_]\w*)")
_SERVERS: Final = pattern("servers")


@RULES.error
def _wrong_type(job: ManifestJob) -> Iterator[Finding]:
    """The CRD gives each field a type, and the apiserver refuses a value of another."""
    for path, value, expected in job.wrong:
        shown = json.dumps(value, default=str)
        step = f"write '{shown}'" if expected == "text" and isinstance(value, int) else "correct it"
        name = field_path(path[-2:] if isinstance(path[-1], int) else path[-1:])
        yield job.at(path, f"{name} is {shown[:60]}, which is not {expected}: refused; {step}")


@RULES.error
def _resources_rejected(job: ManifestJob) -> Iterator[Finding]:
    """The CRD takes any amounts; the apiserver checks them when the operator creates the pods."""
    for _, container in job.containers(init=True):
        for path, why in _wrong_amounts(container):
            yield job.at(path, f"{why}: every pod is refused and the job stays Created; correct it")


def _wrong_amounts(container: ManifestContainer) -> Iterator[tuple[FieldPath, str]]:
    resources = container.data.get("resources")
    limits, requests = at_path(resources, "limits") or {}, at_path(resources, "requests") or {}
    at: FieldPath = (*container.path, "resources")
    for name in dict.fromkeys([*limits, *requests]):
        limit, asked = _amount(limits.get(name)), _amount(requests.get(name))
        amounts = f"{name}: limit {limits.get(name)}, request {requests.get(name)}"
        where: FieldPath = (*at, "requests" if name in requests else "limits", name)
        if limit is not None and asked is not None and asked > limit:
            yield where, f"{amounts}, and a request above its limit is not allowed"
        elif "/" in name and asked is not None and asked != limit:
            yield where, f"{amounts}, and for a device both must be given and equal"
        elif "/" in name and limit is not None and limit % 1:
            yield where, f"{amounts}, and devices are counted in whole numbers"


def _amount(value: Any) -> Decimal | None:
    return None if value is None else parse(str(getattr(value, "text", value)))


@RULES.warning
def _no_shared_memory(job: ManifestJob) -> Iterator[Finding]:
    """A container gets 64Mi of /dev/shm, through which DataLoader workers pass their batches."""
    for replica, container in job.trainers():
        paths = [at_path(mount, "mountPath") for mount in container.items("volumeMounts")]
        has = any(str(path).rstrip("/") in ("/dev/shm", "/dev") for path in paths)  # noqa: S108 - a mount point
        if container.gpus and not has and replica.pod.get("hostIPC") is not True:
            step = message("no-shared-memory-" + job.step("manifest", "spec"))
            text = message("no-shared-memory", role=replica.role, step=step)
            yield job.at((*container.path, "volumeMounts"), text)


@RULES.error
def _host_network_dns(job: ManifestJob) -> Iterator[Finding]:
    """A pod on the host's network asks the node's name server, which knows no name of a cluster."""
    of_runtime = job.get("spec", "mlPolicy", "numNodes")
    for replica in job.replicas:
        pod, parallel = replica.pod, job.get(*map(str, replica.path[:-1]), "parallelism")
        # Each kind has the number of its Pods in another field.
        nodes = [count for count in (job.nodes, parallel, of_runtime) if isinstance(count, int)]
        resolves = pod.get("dnsPolicy") in ("ClusterFirstWithHostNet", "None")
        if pod.get("hostNetwork") is True and max(nodes) > 1 and not resolves:
            step = message("host-network-dns-" + job.step("manifest", "spec"))
            text = message("host-network-dns", role=replica.role, step=step)
            yield job.at((*replica.path, "spec", "hostNetwork"), text)


@RULES.warning
def _istio_annotation_misplaced(job: ManifestJob) -> Iterator[Finding]:
    """Injection looks at the pods, and the operator copies no metadata of the job to them."""
    for group in ("annotations", "labels"):
        if ISTIO not in Object(job.data).part("metadata", group):
            continue
        templates = [Object(replica.template) for replica in job.replicas]
        if not all(pod.annotations.get(ISTIO) or pod.labels.get(ISTIO) for pod in templates):
            text = message("istio-annotation-misplaced", key=ISTIO)
            yield job.at(("metadata", group, ISTIO), text)


@RULES.warning
def _variable_not_expanded(job: ManifestJob) -> Iterator[Finding]:
    """Without a shell nothing expands $NAME; Kubernetes itself expands $(NAME)."""
    for _, container in job.containers():
        if not container.command or container.is_shell:
            continue
        for kind in ("command", "args"):
            for index, word in enumerate(container.items(kind)):
                variable = _UNEXPANDED.search(str(word))
                # Lower case in arguments is rather a program's own, as OmegaConf's.
                if variable and (kind == "command" or not variable[0].islower()):
                    name = variable[0].strip("${}")
                    text = message("variable-not-expanded", word=word, found=variable[0], name=name)
                    yield job.at((*container.path, kind, index), text)


@RULES.warning
def _sidecar_holds_the_job(job: ManifestJob) -> Iterator[Finding]:
    """A pod has succeeded when all its containers have ended, and the job with it."""
    # A job with a Master has succeeded when its Master has.
    deciding: list[ManifestReplica] = [r for r in job.replicas if r.role == Role.MASTER]
    for replica in deciding or job.replicas:
        trainer = replica.trainer
        for container in replica.containers():
            words = " ".join([*container.argv, str(container.data.get("image"))])
            if container != trainer and _SERVERS.search(words):
                fields = {"name": container.name, "role": replica.role}
                yield job.at(container.path, message("sidecar-holds-the-job", **fields))


_REGISTRIES: Final = (DEFAULT_REGISTRY, *table("images")["registries"].split())
_MIN_HOST_LENGTH: Final = len("quay.io")
_HUB_PARTS: Final = 2
"""Docker Hub's repositories are user/name."""


def _wrong_host(image: str) -> str:
    """Why no registry can have an image of this name, and what to write; else empty."""
    if (reference := reference_of(image)) is None:
        return ""
    host = reference.registry
    if host == DEFAULT_REGISTRY:
        parts = reference.repository.split("/")
        if len(parts) > _HUB_PARTS:
            return message("no-host", name=parts[0], registry=host, parts=len(parts))
        return ""
    meant = [registry for registry in _REGISTRIES if _is_typo(host, registry)]
    if not meant or host in _REGISTRIES:
        return ""
    return f"there is no registry {host!r}; did you mean {meant[0]!r}?"


def _is_typo(host: str, registry: str) -> bool:
    """Whether a host is the registry with two letters exchanged, or with one wrong or missing."""
    start = len(commonprefix([host, registry]))  # noqa: RUF071 - of letters
    typed, right = host[start:], registry[start:]
    end = len(commonprefix([typed[::-1], right[::-1]]))  # noqa: RUF071 - of letters
    typed, right = typed[: len(typed) - end], right[: len(right) - end]
    if len(typed) == len(right) == 2:
        return typed == right[::-1]
    # Several short names exist: icr.io, gcr.io.
    return max(len(typed), len(right)) == 1 and (
        len(registry) > _MIN_HOST_LENGTH or start > registry.rindex(".")
    )


@RULES.warning
def _image_host(job: ManifestJob) -> Iterator[Finding]:
    """An image is pulled from the host that its name begins with; without one, from Docker Hub."""
    images = [(c.path, str(c.data.get("image") or "")) for _, c in job.containers(init=True)]
    for path, image in (*images, ((), job.base)):
        if why := _wrong_host(image):
            yield job.at((*path, "image"), f"image {image!r}: {why}")


@RULES.warning
def _latest_image_kept(job: ManifestJob) -> Iterator[Finding]:
    """A node that has some image of that tag does not look for a newer one."""
    for _, container in job.trainers():
        image, policy = str(container.data.get("image")), container.data.get("imagePullPolicy")
        reference = reference_of(image)
        if reference and reference.version == "latest" and policy == "IfNotPresent":
            text = message("latest-image-kept", image=image)
            yield job.at((*container.path, "imagePullPolicy"), text)

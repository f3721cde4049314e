"""A job spec as a PyTorchJob. Pure: equal specs give equal text, byte by byte.

The template says where things stand; here is everything that has to be worked out first.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any, Final

from k8sjob import document
from k8sjob.contract import (
    AGENT,
    CONFIG_ENV,
    CONTAINER_NAME,
    DEFAULT_PORT,
    PORT_NAME,
    RUNTIME_HOME,
    WORKDIR,
    Role,
)
from k8sjob.errors import Problem, SpecError
from k8sjob.labels import IMAGE_ORIGIN, ISTIO, MANAGED_BY, MANIFEST_DIGEST, QUEUE
from k8sjob.rendering.overlay import apply_overlay
from k8sjob.rendering.template import fill

if TYPE_CHECKING:
    from collections.abc import Mapping

    from k8sjob.origin import Origin
    from k8sjob.spec import JobSpec, Resources, Volume

__all__ = [
    "IMAGE_UID",
    "backoff_limit",
    "container_argv",
    "container_env",
    "literal",
    "manifest",
    "render",
]

IMAGE_UID: Final = 1000
"""User and group, by number, as which the containers of a built image run."""

_TEMPLATE: Final = "pytorchjob.yaml.j2"
_SHM_VOLUME: Final = "dshm"
# What Kubernetes acts on in command, args and env: `$(`, `$$`, and by a fault of its own a `$` in
# front of anything that is not ASCII.
_ACTIVE_DOLLAR: Final = re.compile(r"\$(?=[$(]|[^\x00-\x7f])")


def render(spec: JobSpec, image: str | None = None, *, origin: Origin | None = None) -> str:
    """The job as a PyTorchJob manifest, YAML.

    Args:
        spec: the job.
        image: what the containers run, normally with the digest of a build; None: the image of the
            spec, and for one that is to be built its repository without a tag.
        origin: what that image was made of, for the job to carry; the same job without it is still
            the same job.

    Raises:
        SpecError: the overlay does not fit, see k8sjob.rendering.overlay; or `image` names none.
    """
    values = _values(spec, spec.image_reference if image is None else _checked(image))
    text = fill(_TEMPLATE, **values, job_annotations={})
    overlay = document.dump(spec.overlay) if spec.overlay else ""
    digest = hashlib.sha256((text + overlay).encode()).hexdigest()
    annotations = {MANIFEST_DIGEST: digest}
    if origin is not None:
        annotations[IMAGE_ORIGIN] = origin.encode()
    text = fill(_TEMPLATE, **values, job_annotations=annotations)
    if not spec.overlay:
        return text
    rendered = document.parse(text).data
    merged = apply_overlay(
        rendered,
        spec.overlay,
        image_is_built=spec.builds_image,
        restricted=spec.security == "restricted",
    )
    return text.partition("\n")[0] + "\n" + document.dump(merged)


def manifest(spec: JobSpec, image: str | None = None) -> dict[str, Any]:
    """The same as render, as the parsed object that an apiserver would see."""
    parsed: dict[str, Any] = document.parse(render(spec, image)).data
    return parsed


def backoff_limit(spec: JobSpec) -> int:
    """runPolicy.backoffLimit for `max_restarts` restarts of the whole group.

    The operator fails a job as soon as the restart counts of all containers of all its running
    pods, init containers included, add up to the limit. When one replica is lost its peers fail
    with it, so one restart of the group is up to one restart of each of its nodes:
    max_restarts x nodes of them must pass, and the next one may end the job. An elastic job may
    have grown to its upper bound. Without restarts the limit is 0, which also ends a job whose
    pod is lost before it ever ran.

    Returns:
        max_restarts x nodes + 1, or 0.
    """
    elastic = spec.replicas.elastic
    nodes = elastic.max if elastic else spec.nnodes
    restarts = spec.policy.max_restarts
    return restarts * nodes + 1 if restarts else 0


def container_argv(spec: JobSpec) -> tuple[list[str], list[str]]:
    """Command and arguments of the containers, as the processes see them (nothing escaped)."""
    run = spec.run
    if run.command is not None:
        return list(run.command), list(run.args)
    target = ["-m", run.module] if run.module is not None else [run.script or ""]
    return list(AGENT), [*target, *run.args]


def container_env(spec: JobSpec) -> dict[str, str]:
    """Variables that the manifest gives to every container, as the processes see them.

    The operator's own come on top: see replica_env. Those of `env_from` are in the cluster alone.
    """
    return {**spec.run.env, CONFIG_ENV: spec.runtime_config.encode()}


def literal(text: str) -> str:
    """The text, written so that Kubernetes hands it to the process unchanged.

    In command, args and env Kubernetes replaces $(NAME) by a variable's value and $$ by $. What a
    job spec says is meant literally, on a cluster as on a laptop.
    """
    return _ACTIVE_DOLLAR.sub("$$", text)


def _checked(image: str) -> str:
    from k8sjob.spec.names import is_image_reference  # noqa: PLC0415 - as in _volumes

    if not is_image_reference(image):
        message = f"{image!r} is not an image reference: [registry/]path[:tag][@sha256:digest]"
        raise SpecError([Problem("image", message)])
    return image


@dataclass(frozen=True, slots=True)
class _Replica:
    """What differs between the roles. Amounts are quantities; shm None sets no size limit."""

    role: str
    count: int
    limits: Mapping[str, str | int]
    requests: Mapping[str, str | int]
    has_shm: bool
    shm: str | None


def _values(spec: JobSpec, image: str) -> dict[str, Any]:
    command, args = container_argv(spec)
    restricted = spec.security == "restricted"
    image_part = None if isinstance(spec.image, str) else spec.image
    return {
        "spec": spec,
        "image": image,
        "job_labels": {**spec.labels, MANAGED_BY: "k8sjob", **_queue_label(spec)},
        "pod_labels": {**spec.labels, MANAGED_BY: "k8sjob"},
        "pod_annotations": _annotations(spec),
        "nproc_per_node": str(spec.nproc_per_node),
        "backoff_limit": backoff_limit(spec),
        # Kueue starts a job by setting suspend to false, so it must begin suspended.
        "suspend": spec.policy.suspend or spec.kueue_queue is not None,
        "gang_size": (spec.gang and spec.gang.min_available) or spec.nnodes,
        "replicas": _replicas(spec),
        "container_name": CONTAINER_NAME,
        "command": [literal(word) for word in command],
        "args": [literal(word) for word in args],
        "env": {name: literal(value) for name, value in container_env(spec).items()},
        "port_name": PORT_NAME,
        "port": DEFAULT_PORT,
        "restricted": restricted,
        # For the whole pod only with a number: the operator's init container is root's otherwise,
        # and the kubelet would not start it.
        "run_as": IMAGE_UID if spec.builds_image else None,
        # A claim belongs to root when it is new: without the group a non-root user cannot write.
        "fs_group": IMAGE_UID if restricted or spec.builds_image else None,
        "pull_policy": image_part.pull_policy if image_part else None,
        "pull_secrets": list(dict.fromkeys(image_part.pull_secrets)) if image_part else [],
        "node_selector": _node_selector(spec, image_part.platform if image_part else None),
        "shm_volume": _SHM_VOLUME,
        "volumes": _volumes(spec),
    }


def _volumes(spec: JobSpec) -> list[Volume]:
    """The spec's volumes, and one for checkpoints that lie on none of them.

    A container's own files are gone when it is started again, and a non-root user could not make
    the folder. Rank 0 alone reads and writes it, so a folder of its pod is enough for restarts in
    the pod; a pod that is lost takes it along.
    """
    from k8sjob.spec import EmptyDir, Volume  # noqa: PLC0415 - there is a spec, so it is loaded

    volumes = list(spec.volumes)
    if spec.checkpoint is None or spec.checkpoint_volume is not None:
        return volumes
    folder = PurePosixPath(spec.checkpoint.dir)
    if any(PurePosixPath(code).is_relative_to(folder) for code in (WORKDIR, RUNTIME_HOME)):
        return volumes  # it would hide the code
    names = {volume.name for volume in spec.volumes}
    tries = ("checkpoints", *(f"checkpoints-{number}" for number in range(len(names))))
    name = next(name for name in tries if name not in names)
    return [*volumes, Volume(name=name, mount=str(folder), empty_dir=EmptyDir())]


def _queue_label(spec: JobSpec) -> dict[str, str]:
    return {} if spec.kueue_queue is None else {QUEUE: spec.kueue_queue}


def _annotations(spec: JobSpec) -> dict[str, str]:
    # An istio sidecar outlives the training, so the pod would never complete.
    wanted = {ISTIO: "false", **spec.annotations}
    return {key: value for key, value in wanted.items() if value is not None}


def _node_selector(spec: JobSpec, platform: str | None) -> dict[str, str]:
    selector = {}
    if platform is not None:
        selector["kubernetes.io/arch"] = platform.split("/")[1]
    if spec.resources.gpu_type is not None and spec.resources.gpu_label is not None:
        selector[spec.resources.gpu_label] = spec.resources.gpu_type
    return {**selector, **spec.node_selector}


def _replicas(spec: JobSpec) -> list[_Replica]:
    worker, master = spec.resources, spec.resources.of_master
    if spec.replicas.elastic is not None:
        return [_replica(Role.WORKER, spec.nnodes, worker)]
    first = _replica(Role.MASTER, 1, master)
    workers = spec.replicas.workers
    return [first, _replica(Role.WORKER, workers, worker)] if workers else [first]


def _replica(role: Role, count: int, resources: Resources) -> _Replica:
    limits: dict[str, str | int] = {}
    if resources.cpu is not None:
        limits["cpu"] = resources.cpu
    if resources.memory is not None:
        limits["memory"] = resources.memory
    if resources.gpus:
        limits[resources.gpu_resource] = resources.gpus
    limits.update(resources.extended)
    asked = resources.requests
    less = {"cpu": asked.cpu, "memory": asked.memory} if asked else {}
    return _Replica(
        role=role.value,
        count=count,
        limits=limits,
        requests={**limits, **{name: amount for name, amount in less.items() if amount}},
        has_shm=resources.shm != "0",
        shm=resources.shm,
    )

"""`resources` of a job spec, from the limits and requests of a PyTorchJob's containers."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Final

from k8sjob.adopt.meaning import same
from k8sjob.adopt.normal import Json, mappings
from k8sjob.contract import CONTAINER_NAME, Role

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["resources", "shm_volume"]

_GPU: Final = "nvidia.com/gpu"
_GPUS: Final = re.compile(r".*/gpu|nvidia\.com/(gpu|mig-).*")
_MASTERS_OWN: Final = ("gpus", "cpu", "memory", "shm", "extended", "requests")


def resources(by_role: Mapping[str, Json]) -> Json:
    """The Workers' resources, and beside them what the Master's have of their own."""
    made = {role: _of_pod(pod) for role, pod in by_role.items()}
    master, worker = made.get(Role.MASTER), made.get(Role.WORKER)
    if master is None or worker is None:
        return worker or master or {}
    own = {
        key: master[key]
        for key in _MASTERS_OWN
        if key in master and not same(master[key], worker.get(key))
    }
    # Without GPUs the Master's count must be written, since an absent one means "as the Workers".
    if "gpus" in worker and "gpus" not in master:
        own["gpus"] = 0
    return {**worker, "master": own} if own else worker


def _of_pod(pod: Json) -> Json:
    container = next(c for c in mappings(pod["containers"]) if c.get("name") == CONTAINER_NAME)
    given = container.get("resources", {})
    limits, asked = given.get("limits", {}), given.get("requests", {})
    gpu = next((name for name in limits if _GPUS.fullmatch(name)), _GPU)
    made: Json = {key: limits[key] for key in ("cpu", "memory") if key in limits}
    if gpu in limits:
        made["gpus"] = _count(limits[gpu])
        made["gpu_resource"] = gpu
    made["extended"] = {k: v for k, v in limits.items() if "/" in k and k != gpu}
    less = {k: asked[k] for k in ("cpu", "memory") if k in asked and asked[k] != limits.get(k)}
    if less:
        made["requests"] = less
    made |= _shm(pod)
    return made


def _count(amount: str) -> Any:
    return int(amount) if re.fullmatch("[0-9]{1,9}", amount) else amount


def _shm(pod: Json) -> Json:
    """Shared memory: 0 where nothing is mounted, no size where the memory is the limit."""
    volume = shm_volume(pod)
    if volume is None:
        return {"shm": "0"}
    size = volume["emptyDir"].get("sizeLimit")
    return {} if size is None else {"shm": size}


def shm_volume(pod: Json) -> Json | None:
    """The volume in memory that is mounted at /dev/shm in the container that trains."""
    for container in mappings(pod["containers"]):
        for mount in mappings(container.get("volumeMounts")):
            if container.get("name") == CONTAINER_NAME and mount.get("mountPath") == "/dev/shm":  # noqa: S108 - a mount point
                for volume in mappings(pod.get("volumes")):
                    source = volume.get("emptyDir")
                    if volume.get("name") == mount.get("name") and isinstance(source, dict):
                        return volume if source.get("medium") == "Memory" else None
    return None

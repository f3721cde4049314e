"""The shapes that a PyTorchJob's fields have: an apiserver refuses a manifest with others."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from k8sjob.errors import Problem, field_path

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["shape_problems"]

_ANY: Final = object()
_AMOUNT: Final = (str, int, float)
_NAMED: Final[dict[str, Any]] = {"name": str}
_CONTAINER: Final = {
    "name": str,
    "image": str,
    "imagePullPolicy": str,
    "command": [_ANY],
    "args": [_ANY],
    "env": [_NAMED],
    "envFrom": [{"configMapRef": {}, "secretRef": {}}],
    "ports": [_NAMED],
    "resources": {"limits": {"*": _AMOUNT}, "requests": {"*": _AMOUNT}},
    "securityContext": {},
    "volumeMounts": [{"name": str, "mountPath": str}],
}
_VOLUME: Final = {
    "name": str,
    "emptyDir": {"medium": str, "sizeLimit": _AMOUNT},
    "configMap": {},
    "secret": {},
    "hostPath": {},
    "persistentVolumeClaim": {},
}
_POD: Final = {
    "containers": [_CONTAINER],
    "initContainers": [_CONTAINER],
    "imagePullSecrets": [_NAMED],
    "nodeSelector": {},
    "securityContext": {},
    "volumes": [_VOLUME],
}
_METADATA: Final[dict[str, Any]] = {"labels": {}, "annotations": {}}
_JOB: Final = {
    "metadata": _METADATA,
    "spec": {
        "elasticPolicy": {"minReplicas": int, "maxReplicas": int, "maxRestarts": int},
        "pytorchReplicaSpecs": {"*": {"template": {"metadata": _METADATA, "spec": _POD}}},
        "runPolicy": {"schedulingPolicy": {"minResources": {"*": _AMOUNT}}},
    },
}
"""A mapping with the shapes of its keys, "*" for all keys; a list with that of its items; types.
Fields that are not here may hold anything: they go into the overlay as they are."""


def shape_problems(job: dict[str, Any]) -> list[Problem]:
    """One Problem for each field whose value has another shape than Kubernetes gives it.

    Args:
        job: a PyTorchJob that the operator's webhook accepts.
    """
    if not job["spec"]["pytorchReplicaSpecs"]:  # which the webhook lets through
        return [Problem("spec.pytorchReplicaSpecs", "no replicas; add Master, Worker or both")]
    return list(_problems(job, _JOB, ()))


def _problems(value: Any, shape: Any, path: tuple[str | int, ...]) -> Iterator[Problem]:
    if isinstance(shape, dict):
        if not isinstance(value, dict):
            yield _problem(value, "a mapping", path)
            return
        for key, item in value.items():
            below = shape.get(key, shape.get("*"))
            if below is not None and item is not None:  # a null is the same as no field
                yield from _problems(item, below, (*path, key))
    elif isinstance(shape, list):
        if not isinstance(value, list):
            yield _problem(value, "a list", path)
            return
        for index, item in enumerate(value):
            yield from _problems(item, shape[0], (*path, index))
    elif shape is not _ANY and (isinstance(value, bool) or not isinstance(value, shape)):
        words = {str: "text", int: "a whole number"}
        yield _problem(value, words.get(shape, "an amount"), path)


def _problem(value: Any, wanted: str, path: tuple[str | int, ...]) -> Problem:
    seen = ascii(value)
    seen = seen if len(seen) <= 80 else f"{seen[:80]}..."
    message = f"{seen} is not {wanted}; correct it, a cluster would refuse the manifest"
    return Problem(field_path(path), message)

"""The types of a PyTorchJob's fields, as the CRD of training operator v1.9.4 has them.

Only what k8sjob reads is described; other fields may hold anything. An apiserver refuses a field of
another type.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

__all__ = ["WrongType", "known_fields", "typed"]

_Path = tuple[str | int, ...]
_ANY: Final = "*"


class WrongType(NamedTuple):
    """A field of another type than the CRD's: where, the value, and what it must be."""

    path: _Path
    seen: Any
    expected: str


class _Quantity:
    """A quantity, as text or as a number."""


_METADATA: Final = {"labels": {_ANY: str}, "annotations": {_ANY: str}}
_CONTAINER: Final = {
    "name": str,
    "image": str,
    "imagePullPolicy": str,
    "command": [str],
    "args": [str],
    "env": [{"name": str, "value": str, "valueFrom": {}}],
    "envFrom": [{"configMapRef": {}, "secretRef": {}}],
    "ports": [{"name": str, "containerPort": int}],
    "resources": {"limits": {_ANY: _Quantity}, "requests": {_ANY: _Quantity}},
    "securityContext": {},
    "volumeMounts": [{"name": str, "mountPath": str}],
    "readinessProbe": {},
    "startupProbe": {},
}
_VOLUME: Final = {
    "name": str,
    "emptyDir": {"medium": str, "sizeLimit": _Quantity},
    "configMap": {},
    "secret": {},
    "hostPath": {},
    "persistentVolumeClaim": {},
}
_POD: Final = {
    "containers": [_CONTAINER],
    "initContainers": [_CONTAINER],
    "imagePullSecrets": [{"name": str}],
    "nodeSelector": {_ANY: str},
    "securityContext": {},
    "volumes": [_VOLUME],
    "restartPolicy": str,
    "hostIPC": bool,
}
_JOB: Final[dict[str, Any]] = {
    "apiVersion": str,
    "kind": str,
    "metadata": {"name": str, "namespace": str, **_METADATA},
    "spec": {
        "elasticPolicy": {
            "maxReplicas": int,
            "maxRestarts": int,
            "metrics": [{}],
            "minReplicas": int,
            "nProcPerNode": int,
            "rdzvBackend": str,
            "rdzvConf": [{"key": str, "value": str}],
            "rdzvHost": str,
            "rdzvId": str,
            "rdzvPort": int,
            "standalone": bool,
        },
        "nprocPerNode": None,  # text, and a common mistake: lint has a check of its own for it
        "pytorchReplicaSpecs": {
            _ANY: {
                "replicas": int,
                "restartPolicy": str,
                "template": {"metadata": _METADATA, "spec": _POD},
            }
        },
        "runPolicy": {
            "activeDeadlineSeconds": int,
            "backoffLimit": int,
            "cleanPodPolicy": str,
            "managedBy": str,
            "schedulingPolicy": {
                "minAvailable": int,
                "minResources": {_ANY: _Quantity},
                "priorityClass": str,
                "queue": str,
                "scheduleTimeoutSeconds": int,
            },
            "suspend": bool,
            "ttlSecondsAfterFinished": int,
        },
    },
    "status": None,
}
"""A mapping with the types of its keys ("*": of all others), a list with that of its items."""
_NAMES: Final = {
    str: "text",
    int: "a whole number",
    bool: "true or false",
    _Quantity: "a quantity",
}


def known_fields(*path: str) -> tuple[str, ...]:
    """The fields of the CRD at a path, "*" for any role; complete down to the pod templates."""
    shape = _JOB
    for step in path:
        shape = shape[step]
    return tuple(shape)


def typed(manifest: dict[str, Any]) -> tuple[dict[str, Any], list[WrongType]]:
    """The manifest without its fields of a wrong type and without nulls, and those fields.

    Items of lists keep their index: a wrong one is emptied.
    """
    wrong: list[WrongType] = []
    made: dict[str, Any] = _fit(manifest, _JOB, (), wrong)
    return made, wrong


def _fit(value: Any, shape: Any, path: _Path, wrong: list[WrongType]) -> Any:
    """The value if it has the shape; None if it has another or is null."""
    if value is None and not (path and isinstance(path[-1], int)):  # in a list it is an item
        return None
    if isinstance(shape, dict) and isinstance(value, dict):
        fitted = {
            key: _fit(item, shape.get(key, shape.get(_ANY)), (*path, key), wrong)
            for key, item in value.items()
        }
        return {key: item for key, item in fitted.items() if item is not None}
    if isinstance(shape, list) and isinstance(value, list):
        empty: Any = {} if isinstance(shape[0], dict) else ""
        items = (_fit(item, shape[0], (*path, i), wrong) for i, item in enumerate(value))
        return [empty if item is None else item for item in items]
    if shape is None or (isinstance(shape, type) and _is_a(value, shape)):
        return value
    expected = "a mapping" if isinstance(shape, dict) else "a list"
    wrong.append(WrongType(path, value, _NAMES[shape] if isinstance(shape, type) else expected))
    return None


def _is_a(value: Any, shape: type) -> bool:
    if shape is _Quantity:
        return isinstance(value, str | int | float) and not isinstance(value, bool)
    return isinstance(value, shape) and (shape is bool or not isinstance(value, bool))

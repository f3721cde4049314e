"""The types of a PyTorchJob's fields, as far as checks read them.

The CRD refuses a field of another type. Here it is told and taken away, so that the checks need not
ask what they are given.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

__all__ = ["Wrong", "shaped"]

Path = tuple[str | int, ...]
_ANY: Final = "*"


class Wrong(NamedTuple):
    """A field of another type than the CRD's."""

    path: Path
    seen: Any
    expected: str


class _Amount:
    """A quantity, as text or as a number."""


_METADATA: Final = {"labels": {_ANY: str}, "annotations": {_ANY: str}}
_CONTAINER: Final = {
    "name": str,
    "image": str,
    "imagePullPolicy": str,
    "command": [str],
    "args": [str],
    "env": [{"name": str, "value": str, "valueFrom": {}}],
    "ports": [{"name": str, "containerPort": int}],
    "resources": {"limits": {_ANY: _Amount}, "requests": {_ANY: _Amount}},
    "volumeMounts": [{"name": str, "mountPath": str}],
    "readinessProbe": {},
    "startupProbe": {},
}
_POD: Final = {
    "containers": [_CONTAINER],
    "initContainers": [_CONTAINER],
    "volumes": [{"name": str}],
    "restartPolicy": str,
    "hostIPC": bool,
}
_SHAPE: Final = {
    "metadata": {"name": str, "namespace": str, **_METADATA},
    "spec": {
        "runPolicy": {
            "activeDeadlineSeconds": int,
            "backoffLimit": int,
            "cleanPodPolicy": str,
            "schedulingPolicy": {},
            "suspend": bool,
            "ttlSecondsAfterFinished": int,
        },
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
        "pytorchReplicaSpecs": {
            _ANY: {
                "replicas": int,
                "restartPolicy": str,
                "template": {"metadata": _METADATA, "spec": _POD},
            }
        },
    },
}
_CALLED: Final = {
    str: "text",
    int: "a whole number",
    bool: "true or false",
    _Amount: "a quantity",
}


def shaped(manifest: dict[str, Any]) -> tuple[dict[str, Any], list[Wrong]]:
    """The manifest without what has a wrong type, and what that was.

    Items of lists keep their index: a wrong one is emptied.
    """
    wrong: list[Wrong] = []
    made: dict[str, Any] = _fit(manifest, _SHAPE, (), wrong)
    return made, wrong


def _fit(value: Any, shape: Any, path: Path, wrong: list[Wrong]) -> Any:
    """The value in its shape; None where it has none or is null."""
    if value is None:
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
    wrong.append(Wrong(path, value, _CALLED[shape] if isinstance(shape, type) else expected))
    return None


def _is_a(value: Any, shape: type) -> bool:
    if shape is _Amount:
        return isinstance(value, str | int | float) and not isinstance(value, bool)
    return isinstance(value, shape) and (shape is bool or not isinstance(value, bool))

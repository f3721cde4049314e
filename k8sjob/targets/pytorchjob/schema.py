"""The types of a PyTorchJob's fields, as the CRD of training operator v1.9.4 has them."""

from __future__ import annotations

from typing import Any, Final

from k8sjob.targets.schema import ANY, METADATA, POD_TEMPLATE, Quantity, WrongType, fit

JOB: Final[dict[str, Any]] = {
    "apiVersion": str,
    "kind": str,
    "metadata": {"name": str, "namespace": str, **METADATA},
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
            ANY: {
                "replicas": int,
                "restartPolicy": str,
                "template": POD_TEMPLATE,
            }
        },
        "runPolicy": {
            "activeDeadlineSeconds": int,
            "backoffLimit": int,
            "cleanPodPolicy": str,
            "managedBy": str,
            "schedulingPolicy": {
                "minAvailable": int,
                "minResources": {ANY: Quantity},
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


def known_fields(*path: str) -> tuple[str, ...]:
    """The fields of the CRD at a path, "*" for any role; complete down to the pod templates."""
    shape = JOB
    for step in path:
        shape = shape[step]
    return tuple(shape)


def typed(manifest: dict[str, Any]) -> tuple[dict[str, Any], list[WrongType]]:
    """The manifest without its fields of a wrong type and without nulls, and those fields."""
    return fit(manifest, JOB)

"""The types of manifests' and objects' fields, as far as k8sjob reads them; see field_types.

The shapes of each kind of job are in its folder.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from k8sjob.targets.field_types import ANY, Message, Quantity, Seconds

if TYPE_CHECKING:
    from k8sjob.kube.objects import Json

TEXTS: Final[Json] = {ANY: str}
QUANTITIES: Final[Json] = {ANY: Quantity}
METADATA: Final[Json] = {"labels": TEXTS, "annotations": TEXTS}

ABOUT: Final[Json] = {
    "apiVersion": str,
    "kind": str,
    "metadata": {"name": str, "namespace": str, **METADATA},
}

OPTIONAL_NAME: Final[Json] = {"name": str, "optional": bool}

RESOURCES: Final[Json] = {"limits": QUANTITIES, "requests": QUANTITIES}

VARIABLE: Final[Json] = {
    "name": str,
    "value": str,
    "valueFrom": {"secretKeyRef": OPTIONAL_NAME, "configMapKeyRef": OPTIONAL_NAME},
}

CONTAINER: Final[Json] = {
    "name": str,
    "image": str,
    "imagePullPolicy": str,
    "command": [str],
    "args": [str],
    "env": [VARIABLE],
    "envFrom": [{"configMapRef": OPTIONAL_NAME, "secretRef": OPTIONAL_NAME}],
    "ports": [{"name": str, "containerPort": int}],
    "resources": RESOURCES,
    "securityContext": {},
    "volumeMounts": [{"name": str, "mountPath": str}],
    "readinessProbe": {},
    "startupProbe": {},
}

VOLUME: Final[Json] = {
    "name": str,
    "emptyDir": {"medium": str, "sizeLimit": Quantity},
    "configMap": OPTIONAL_NAME,
    "secret": {"secretName": str, "optional": bool},
    "projected": {"sources": [{"configMap": OPTIONAL_NAME, "secret": OPTIONAL_NAME}]},
    "hostPath": {"path": str},
    "persistentVolumeClaim": {"claimName": str},
}

POD: Final[Json] = {
    "containers": [CONTAINER],
    "initContainers": [CONTAINER],
    "imagePullSecrets": [{"name": str}],
    "nodeSelector": TEXTS,
    "securityContext": {},
    "volumes": [VOLUME],
    "restartPolicy": str,
    "hostIPC": bool,
    "nodeName": str,
    "serviceAccountName": str,
    "priorityClassName": str,
    "runtimeClassName": str,
    "schedulerName": str,
    "hostNetwork": bool,
    "affinity": {"nodeAffinity": {}},
    "terminationGracePeriodSeconds": Seconds,
    "tolerations": [{"key": str, "operator": str, "value": str, "effect": str}],
    "schedulingGates": [{"name": str}],
}

POD_TEMPLATE: Final[Json] = {"metadata": METADATA, "spec": POD}

JOB_SPEC: Final[Json] = {
    "activeDeadlineSeconds": Seconds,
    "backoffLimit": int,
    "backoffLimitPerIndex": None,
    "completionMode": str,
    "completions": int,
    "managedBy": None,
    "manualSelector": None,
    "maxFailedIndexes": None,
    "parallelism": int,
    "podFailurePolicy": {
        "rules": [{"action": str, "onExitCodes": {"values": [int], "containerName": str}}]
    },
    "podReplacementPolicy": None,
    "selector": None,
    "successPolicy": None,
    "suspend": bool,
    "template": POD_TEMPLATE,
    "ttlSecondsAfterFinished": int,
}
"""All fields of JobSpec (k8s.io/api v0.34, batch/v1/types.go)."""

# --- objects as an apiserver returns them ---------------------------------------------------------

LIVE_METADATA: Final[Json] = {
    "name": str,
    "namespace": str,
    "uid": str,
    "resourceVersion": str,
    "continue": str,
    "creationTimestamp": str,
    "deletionTimestamp": str,
    "deletionGracePeriodSeconds": int,
    **METADATA,
    "finalizers": [str],
    "ownerReferences": [{"kind": str, "name": str, "uid": str, "controller": bool}],
}

CONDITION: Final[Json] = {
    "type": str,
    "status": str,
    "reason": str,
    "message": Message,
    "lastTransitionTime": str,
}

CONTAINER_STATE: Final[Json] = {
    "running": {"startedAt": str},
    "waiting": {"reason": str, "message": Message},
    "terminated": {
        "exitCode": int,
        "reason": str,
        "message": Message,
        "startedAt": str,
        "finishedAt": str,
    },
}

CONTAINER_STATUS: Final[Json] = {
    "name": str,
    "image": str,
    "imageID": str,
    "restartCount": int,
    "started": bool,
    "state": CONTAINER_STATE,
    "lastState": CONTAINER_STATE,
}

JOB_COUNT: Final[Json] = {"name": str, "active": int, "ready": int, "succeeded": int}

JOB_STATUS: Final[Json] = {
    "conditions": [CONDITION],
    "startTime": str,
    "completionTime": str,
    "active": int,
    "ready": int,
    "succeeded": int,
    "failed": int,
    "replicaStatuses": {ANY: {"active": int, "succeeded": int, "failed": int}},
    "replicatedJobsStatus": [JOB_COUNT],
    "jobsStatus": [JOB_COUNT],
}

QUOTA: Final[Json] = {"name": str, "nominalQuota": Quantity, "borrowingLimit": Quantity}

PENDING_WORKLOAD: Final[Json] = {
    "metadata": LIVE_METADATA,
    "priority": int,
    "positionInClusterQueue": int,
}

OBJECT: Final[Json] = {
    "kind": str,
    "apiVersion": str,
    "metadata": LIVE_METADATA,
    "spec": {},
    "status": {"conditions": [CONDITION]},
}

OBJECTS: Final[dict[str, Json]] = {
    "Status": {
        "status": str,
        "message": str,
        "reason": str,
        "code": int,
        "details": {
            "kind": str,
            "name": str,
            "uid": str,
            "causes": [{"field": str, "message": Message}],
        },
    },
    "ContainerOutput": {"container": str, "lines": [str]},
    "Pod": {
        "spec": POD,
        "status": {
            "phase": str,
            "reason": str,
            "message": Message,
            "startTime": str,
            "conditions": [CONDITION],
            "containerStatuses": [CONTAINER_STATUS],
            "initContainerStatuses": [CONTAINER_STATUS],
        },
    },
    "Event": {
        "type": str,
        "reason": str,
        "message": Message,
        "count": int,
        "series": {"count": int, "lastObservedTime": str},
        "firstTimestamp": str,
        "lastTimestamp": str,
        "eventTime": str,
        "involvedObject": {
            "kind": str,
            "name": str,
            "namespace": str,
            "uid": str,
            "fieldPath": str,
        },
    },
    "Node": {
        "spec": {"unschedulable": bool, "taints": [{"key": str, "value": str, "effect": str}]},
        "status": {"conditions": [CONDITION], "allocatable": QUANTITIES, "capacity": QUANTITIES},
    },
    "ResourceQuota": {
        "spec": {"hard": QUANTITIES},
        "status": {"hard": QUANTITIES, "used": QUANTITIES},
    },
    "Deployment": {
        "spec": {"replicas": int},
        "status": {"conditions": [CONDITION], "replicas": int, "readyReplicas": int},
    },
    "LocalQueue": {"spec": {"clusterQueue": str}},
    "ClusterQueue": {
        "spec": {
            "cohortName": str,
            "resourceGroups": [{"flavors": [{"name": str, "resources": [QUOTA]}]}],
            "namespaceSelector": {
                "matchLabels": TEXTS,
                "matchExpressions": [{"key": str, "operator": str, "values": [str]}],
            },
        },
    },
    "Workload": {
        "spec": {"active": bool, "priority": int, "queueName": str},
        "status": {
            "conditions": [CONDITION],
            "admissionChecks": [{"name": str, "state": str, "message": Message}],
            "requeueState": {"count": int, "requeueAt": str},
            "admission": {
                "clusterQueue": str,
                "podSetAssignments": [{"name": str, "flavors": TEXTS, "resourceUsage": QUANTITIES}],
            },
        },
    },
    "PendingWorkload": PENDING_WORKLOAD,
    "PendingWorkloadsSummary": {"items": [PENDING_WORKLOAD]},
    "PodGroup": {
        "spec": {"minMember": int, "queue": str, "minResources": QUANTITIES},
        "status": {"phase": str, "conditions": [CONDITION]},
    },
    "Queue": {
        "spec": {"capability": QUANTITIES},
        "status": {"state": str, "allocated": QUANTITIES},
    },
    "List": {"items": [None]},
}
"""The fields of an object beside those of OBJECT, by its kind."""

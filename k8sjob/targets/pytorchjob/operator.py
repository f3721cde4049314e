"""The training operator, kubeflow/training-operator v1.9.4: what it injects and what it refuses.

The types of a job's fields are those of its CRD. The environment of a replica is that of
pkg/controller.v1/pytorch/{envvar,master,elastic}.go and
pkg/apis/kubeflow.org/v1/pytorch_defaults.go; the admission webhook is that of
pkg/webhooks/pytorch/pytorchjob_webhook.go. The apiserver asks the webhook after it has checked the
CRD's schema; here a manifest of any shape is taken, and what has the wrong shape counts as absent.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Final

from k8sjob.contract import CONTAINER_NAME, DEFAULT_PORT, Role
from k8sjob.findings import invalid
from k8sjob.kube.objects import Object, at_path
from k8sjob.targets.api import PORT_NAME
from k8sjob.targets.field_types import ANY, Seconds
from k8sjob.targets.shapes import ABOUT, POD_TEMPLATE, QUANTITIES

if TYPE_CHECKING:
    from collections.abc import Iterator

    from k8sjob.findings import FieldPath, Finding


API_VERSION: Final = "kubeflow.org/v1"
KIND: Final = "PyTorchJob"
MANAGER: Final = "kubeflow.org/training-operator"
"""The value of runPolicy.managedBy if the operator itself works on a job."""

# Labels of the Pods and Services that the operator creates.
JOB_NAME: Final = "training.kubeflow.org/job-name"
REPLICA_TYPE: Final = "training.kubeflow.org/replica-type"
"""The role in lower case: "master", "worker"."""
REPLICA_INDEX: Final = "training.kubeflow.org/replica-index"
"""The number within the role, from 0."""

COUNTED: Final = {"Running": "active", "Succeeded": "succeeded", "Failed": "failed"}
"""Phases of Pods, and what status.replicaStatuses calls their number."""


_Json = dict[str, Any]
_DNS_1035: Final = r"[a-z]([-a-z0-9]*[a-z0-9])?"
_MANAGERS: Final = (MANAGER, "kueue.x-k8s.io/multikueue")
_REPLICAS: Final = ("spec", "pytorchReplicaSpecs")


CLOSED_PATHS: Final = (
    (),
    ("spec",),
    ("spec", "runPolicy"),
    ("spec", "runPolicy", "schedulingPolicy"),
    ("spec", "elasticPolicy"),
    ("spec", "pytorchReplicaSpecs", "*"),
    ("spec", "pytorchReplicaSpecs", "*", "template"),
)
"""The paths at which all fields of the CRD are known; "*" is any role."""

SHAPES: Final[dict[str, Any]] = {
    **ABOUT,
    "spec": {
        "nprocPerNode": None,
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
            ANY: {"replicas": int, "restartPolicy": str, "template": POD_TEMPLATE}
        },
        "runPolicy": {
            "activeDeadlineSeconds": Seconds,
            "backoffLimit": int,
            "cleanPodPolicy": str,
            "managedBy": str,
            "suspend": bool,
            "ttlSecondsAfterFinished": int,
            "schedulingPolicy": {
                "minAvailable": int,
                "minResources": QUANTITIES,
                "priorityClass": str,
                "queue": str,
                "scheduleTimeoutSeconds": int,
            },
        },
    },
}
"""The types of its fields, all of `spec` down to its Pod templates; lint checks nprocPerNode."""


def known_fields(*path: str) -> tuple[str, ...]:
    """The fields of the CRD at a path, "*" for any role; complete down to the pod templates."""
    fields: dict[str, Any] = {**SHAPES, "status": None}
    for step in path:
        fields = fields[step]
    return tuple(fields)


def operator_env(job: _Json, role: Role | str, index: int) -> dict[str, str]:
    """The variables injected by the operator into a replica of a valid PyTorchJob.

    Args:
        job: the parsed manifest; need not be one of k8sjob's.
        role: Master or Worker.
        index: the replica's index in its role, from 0.

    Raises:
        ValueError: the job has no such replica.
    """
    spec = job["spec"]
    counts = {name: r.get("replicas", 1) for name, r in spec["pytorchReplicaSpecs"].items()}
    role = Role(role)
    if not 0 <= index < counts.get(role, 0):
        name = job["metadata"]["name"]
        raise ValueError(f"{name} has no {role}-{index}: its replicas are {counts}")
    env = {"PYTHONUNBUFFERED": "1"}
    nproc, elastic = _nproc_per_node(spec), spec.get("elasticPolicy")
    if Role.MASTER in counts:
        rank = index + (role == Role.WORKER)
        env |= _master_env(job)
        env["WORLD_SIZE"] = str(sum(counts.values()) * _processes(nproc))
        env |= {"RANK": str(rank), "PET_NODE_RANK": str(rank)}
    if nproc is not None:
        env["PET_NPROC_PER_NODE"] = nproc
    if elastic is None:
        return env | {"PET_NNODES": str(sum(counts.values()))}
    return env | _elastic_env(job, elastic, counts[Role.WORKER])


def _master_env(job: _Json) -> dict[str, str]:
    address = f"{job['metadata']['name']}-master-0"
    port = str(_port(job["spec"]["pytorchReplicaSpecs"][Role.MASTER]))
    names = ("MASTER_PORT", "PET_MASTER_PORT", "MASTER_ADDR", "PET_MASTER_ADDR")
    return dict(zip(names, (port, port, address, address), strict=True))


def _elastic_env(job: _Json, policy: _Json, workers: int) -> dict[str, str]:
    host = policy.get("rdzvHost") or f"{job['metadata']['name']}-worker-0"
    port = policy.get("rdzvPort") or _port(job["spec"]["pytorchReplicaSpecs"][Role.WORKER])
    low, high = policy.get("minReplicas"), policy.get("maxReplicas")
    # A single bound counts for both; without any, the number of Workers does.
    low, high = (low or high or workers), (high or low or workers)
    env = {
        "PET_RDZV_ENDPOINT": f"{host}:{port}",
        "PET_RDZV_BACKEND": policy.get("rdzvBackend") or "c10d",
        "PET_NNODES": f"{low}:{high}",
    }
    for name, key in (
        ("PET_MAX_RESTARTS", "maxRestarts"),
        ("PET_NPROC_PER_NODE", "nProcPerNode"),
        ("PET_RDZV_ID", "rdzvId"),
    ):
        if policy.get(key) is not None:
            env[name] = str(policy[key])
    if policy.get("rdzvConf"):
        pairs = (f"{item.get('key', '')}={item.get('value', '')}" for item in policy["rdzvConf"])
        env["PET_RDZV_CONF"] = ",".join(pairs)
    if policy.get("standalone"):
        env["PET_STANDALONE"] = ""
    return env


def _nproc_per_node(spec: _Json) -> str | None:
    """Defaults to auto, unless the elastic policy has the number."""
    nproc: str | None = spec.get("nprocPerNode")
    if nproc is None and (spec.get("elasticPolicy") or {}).get("nProcPerNode") is None:
        return "auto"
    return nproc


def _processes(nproc: str | None) -> int:
    """The processes that the operator counts for WORLD_SIZE: auto, gpu and cpu are one to it."""
    return int(nproc) if nproc and re.fullmatch(r"[+-]?[0-9]+", nproc) else 1


def _port(replica: _Json) -> int:
    """The port of the name PORT_NAME; the operator adds it to the container where it is absent."""
    for container in replica["template"]["spec"]["containers"]:
        if container.get("name") == CONTAINER_NAME:
            for port in container.get("ports") or ():
                if port.get("name") == PORT_NAME:
                    number: int = port["containerPort"]
                    return number
    return DEFAULT_PORT


def webhook_problems(manifest: _Json) -> list[Finding]:
    """All reasons for which a cluster with the training operator would refuse the manifest.

    The kind is checked too, since the webhook is not even asked about another one.
    """
    spec = Object(manifest).spec
    return [
        *_identity(manifest),
        *_run_policy(Object(manifest).part("spec", "runPolicy")),
        *_elastic(spec),
        *_replicas(spec.get("pytorchReplicaSpecs")),
    ]


def _identity(manifest: _Json) -> Iterator[Finding]:
    for key, expected in (("apiVersion", API_VERSION), ("kind", KIND)):
        if (value := manifest.get(key)) != expected:
            yield invalid(
                (key,), f"{value!r} is not what the training operator watches: {expected!r}"
            )
    name = at_path(manifest, "metadata", "name")
    if not isinstance(name, str) or len(name) > 63 or not re.fullmatch(_DNS_1035, name):
        yield invalid(
            ("metadata", "name"),
            f"{name!r} is not a DNS-1035 label",
            "use at most 63 lower-case letters, digits and '-',"
            " starting with a letter and not ending with '-'",
        )


def _run_policy(policy: _Json) -> Iterator[Finding]:
    manager = policy.get("managedBy")
    if manager is not None and manager not in _MANAGERS:
        yield invalid(
            ("spec", "runPolicy", "managedBy"),
            f"{manager!r} is not a known controller",
            f"use {' or '.join(_MANAGERS)}",
        )


def _elastic(spec: _Json) -> Iterator[Finding]:
    policy = spec.get("elasticPolicy")
    if not isinstance(policy, dict):
        return
    if Role.WORKER not in Object(spec).part("pytorchReplicaSpecs"):
        yield invalid(
            (*_REPLICAS, Role.WORKER.value),
            "missing, but elasticPolicy needs Workers",
            "add Worker",
        )
    in_policy, general = policy.get("nProcPerNode"), spec.get("nprocPerNode")
    if in_policy is not None and general is not None:
        yield invalid(
            ("spec", "elasticPolicy", "nProcPerNode"),
            f"{in_policy!r} conflicts with spec.nprocPerNode {general!r}",
            "keep only the latter",
        )


def _replicas(replicas: Any) -> Iterator[Finding]:
    if not isinstance(replicas, dict):
        yield invalid(_REPLICAS, f"{replicas!r} is not a mapping", "add Master, Worker or both")
        return
    for role, replica in replicas.items():
        at = (*_REPLICAS, str(role))
        if role not in list(Role):
            yield invalid(at, f"{role!r} is not a replica type", "use exactly 'Master' or 'Worker'")
        yield from _containers(
            (*at, "template", "spec", "containers"),
            at_path(replica, "template", "spec", "containers"),
        )
        yield from _count(at, role, at_path(replica, "replicas"))


def _containers(at: FieldPath, containers: Any) -> Iterator[Finding]:
    if not isinstance(containers, list) or not containers:
        yield invalid(at, "no containers", f"add one that is named {CONTAINER_NAME!r}")
        return
    names = [at_path(container, "name") for container in containers]
    for index, container in enumerate(containers):
        if not at_path(container, "image"):
            yield invalid(
                (*at, index, "image"), f"container {names[index]!r} has no image", "add it"
            )
    if CONTAINER_NAME not in names:
        yield invalid(
            at, f"containers are named {names!r}", f"name the one that trains {CONTAINER_NAME!r}"
        )


def _count(at: FieldPath, role: str, count: Any) -> Iterator[Finding]:
    if role == Role.MASTER:
        if type(count) is not int or count != 1:
            yield invalid((*at, "replicas"), f"{count!r} is not 1", "a Master needs `replicas: 1`")
    elif count is not None and (type(count) is not int or count < 1):
        yield invalid(
            (*at, "replicas"), f"{count!r} is less than 1", f"set it to 1 or more, or remove {role}"
        )

"""The environment that the training operator gives to a replica's containers.

The source is pkg/controller.v1/pytorch/{envvar,master,elastic}.go and
pkg/apis/kubeflow.org/v1/pytorch_defaults.go of kubeflow/training-operator v1.9.4.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from k8sjob.contract import CONTAINER_NAME, DEFAULT_PORT, PORT_NAME, Role
from k8sjob.rendering.manifest import manifest

if TYPE_CHECKING:
    from k8sjob.spec import JobSpec

__all__ = ["operator_env", "replica_env"]

_Json = dict[str, Any]


def replica_env(spec: JobSpec, role: Role | str, index: int) -> dict[str, str]:
    """What the operator injects into a replica of the job, in the operator's order.

    It is appended to the variables of the manifest, so it wins over them. What differs on a laptop
    (addresses, the port) is the local back end's business.

    Args:
        spec: the job.
        role: Master or Worker.
        index: the replica's index in its role, from 0.

    Raises:
        ValueError: the job has no such replica.
    """
    return operator_env(manifest(spec), role, index)


def operator_env(job: _Json, role: Role | str, index: int) -> dict[str, str]:
    """The same as replica_env, from a PyTorchJob that the operator's webhook accepts.

    Args:
        job: the parsed manifest; need not be one of k8sjob's.
        role: Master or Worker.
        index: the replica's index in its role, from 0.

    Raises:
        ValueError: the job has no such replica.
    """
    spec = job["spec"]
    counts = {name: _count(replica) for name, replica in spec["pytorchReplicaSpecs"].items()}
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
    return {
        "MASTER_PORT": port,
        "PET_MASTER_PORT": port,
        "MASTER_ADDR": address,
        "PET_MASTER_ADDR": address,
    }


def _elastic_env(job: _Json, policy: _Json, workers: int) -> dict[str, str]:
    host = policy.get("rdzvHost") or f"{job['metadata']['name']}-worker-0"
    port = policy.get("rdzvPort") or _port(job["spec"]["pytorchReplicaSpecs"][Role.WORKER])
    low, high = policy.get("minReplicas"), policy.get("maxReplicas")
    # One bound alone stands for both; without any, the Workers do.
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


def _count(replica: _Json) -> int:
    count: int = replica.get("replicas", 1)
    return count


def _nproc_per_node(spec: _Json) -> str | None:
    """Defaults to auto, unless the elastic policy has the number."""
    given: str | None = spec.get("nprocPerNode")
    if given is None and (spec.get("elasticPolicy") or {}).get("nProcPerNode") is None:
        return "auto"
    return given


def _processes(nproc: str | None) -> int:
    """What the operator counts for WORLD_SIZE: auto, gpu and cpu are one process to it."""
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

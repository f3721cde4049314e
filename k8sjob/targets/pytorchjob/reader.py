"""PyTorchJobs that others wrote: the operator's defaults, and what of a job.yaml they say."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from k8sjob.contract import DEFAULT_PORT, PORT_NAME, Role
from k8sjob.errors import Problem
from k8sjob.kube.objects import Object, at_path, training
from k8sjob.targets.api import Authored
from k8sjob.targets.pytorchjob.target import PyTorchJob

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from k8sjob.kube.objects import Json
    from k8sjob.targets.api import Target


class PyTorchJobReader:
    """See k8sjob.targets.api.Reader."""

    target: Target = PyTorchJob()
    quantities: tuple[tuple[str, ...], ...] = (
        ("spec", "runPolicy", "schedulingPolicy", "minResources"),
    )

    def authored(self, job: Json, others: Sequence[Json]) -> Authored:  # noqa: ARG002 - it has none
        """As it is."""
        return Authored(job, [], [])

    def problems(self, job: Json) -> Iterator[Problem]:
        """Why a cluster would refuse it, and whether it has replicas, which no cluster checks."""
        yield from self.target.problems(job)
        if Object(job).spec.get("pytorchReplicaSpecs") == {}:
            yield Problem("spec.pytorchReplicaSpecs", "no replicas; add Master, Worker or both")

    def settle(self, job: Json) -> None:
        """As pkg/apis/kubeflow.org/v1/pytorch_defaults.go does it."""
        spec = job.setdefault("spec", {})
        policy = spec.setdefault("runPolicy", {})
        policy.setdefault("cleanPodPolicy", "None")
        policy.setdefault("suspend", False)
        elastic = spec.get("elasticPolicy")
        if elastic is None or elastic.get("nProcPerNode") is None:
            spec.setdefault("nprocPerNode", "auto")
        replicas = spec.get("pytorchReplicaSpecs", {})
        for replica in replicas.values():
            replica.setdefault("replicas", 1)
            replica.setdefault("restartPolicy", "OnFailure")
            _default_port(training(at_path(replica, "template", "spec", "containers")))
        if elastic is not None:  # the operator fills in an empty one, too
            _settle_elastic(elastic, at_path(replicas, Role.WORKER, "replicas"))

    def fields(self, job: Json) -> Json:
        """Of nprocPerNode, elasticPolicy and runPolicy."""
        spec = job["spec"]
        policy, replicas = spec["runPolicy"], spec["pytorchReplicaSpecs"]
        return {
            "replicas": _replicas(spec),
            "policy": {
                "restart_policy": next(iter(replicas.values()))["restartPolicy"],
                "max_restarts": _max_restarts(spec),
                "clean_pod_policy": policy["cleanPodPolicy"],
                "ttl_after_finished": policy.get("ttlSecondsAfterFinished"),
                "active_deadline": policy.get("activeDeadlineSeconds"),
                "suspend": policy["suspend"],
            },
        }


def _default_port(container: Json) -> None:
    ports = container.setdefault("ports", []) if container else []
    if PORT_NAME not in [at_path(port, "name") for port in ports]:
        ports.append({"name": PORT_NAME, "containerPort": DEFAULT_PORT})


def _settle_elastic(policy: Json, workers: Any) -> None:
    policy.setdefault("rdzvBackend", "c10d")
    least, most = policy.get("minReplicas"), policy.get("maxReplicas")
    for key, other in (("minReplicas", most), ("maxReplicas", least)):
        default = other if other is not None else workers
        if default is not None:
            policy.setdefault(key, default)


def _replicas(spec: Json) -> Json:
    replicas, elastic = spec["pytorchReplicaSpecs"], spec.get("elasticPolicy")
    nodes = sum(replica["replicas"] for replica in replicas.values())
    made: Json = {"workers": nodes - 1}
    nproc = spec.get("nprocPerNode")
    if isinstance(nproc, str) and re.fullmatch("[0-9]{1,9}", nproc) and int(nproc) > 1:
        made["nproc_per_node"] = int(nproc)
    if elastic and Role.MASTER not in replicas:
        made["elastic"] = {"min": elastic.get("minReplicas"), "max": elastic.get("maxReplicas")}
    return made


def _max_restarts(spec: Json) -> int | None:
    """The restarts of the whole group from which k8sjob would derive this backoffLimit."""
    limit = spec["runPolicy"].get("backoffLimit")
    elastic = spec.get("elasticPolicy") or {}
    if not isinstance(limit, int):
        return elastic.get("maxRestarts")
    nodes = sum(replica["replicas"] for replica in spec["pytorchReplicaSpecs"].values())
    most = elastic.get("maxReplicas") or nodes
    return max(1, (limit - 1) // most) if limit else 0

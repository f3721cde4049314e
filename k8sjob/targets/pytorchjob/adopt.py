"""PyTorchJobs that others wrote."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from k8sjob.contract import DEFAULT_PORT, Role
from k8sjob.findings import invalid
from k8sjob.kube.objects import Object, at_path, training
from k8sjob.targets.api import PORT_NAME, Authored, ManifestReader, Target
from k8sjob.targets.pytorchjob.target import PYTORCHJOB

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from k8sjob.findings import Finding
    from k8sjob.kube.objects import Json


class PyTorchJobReader(ManifestReader):
    """The operator's defaults, and the job.yaml fields of a PyTorchJob; see ManifestReader."""

    quantities = (("spec", "runPolicy", "schedulingPolicy", "minResources"),)

    target: Target = PYTORCHJOB

    def authored(self, job: Json, documents: Sequence[Json]) -> Authored:  # noqa: ARG002 - it has none
        """The job as it is."""
        return Authored(job, [], [])

    def problems(self, job: Json) -> Iterator[Finding]:
        """Why a cluster would refuse it, and whether it has replicas, which no cluster checks."""
        yield from self.target.problems(job)
        if Object(job).spec.get("pytorchReplicaSpecs") == {}:
            yield invalid(
                ("spec", "pytorchReplicaSpecs"), "no replicas", "add Master, Worker or both"
            )

    def settle(self, job: Json) -> None:
        """Fill in defaults as pkg/apis/kubeflow.org/v1/pytorch_defaults.go does."""
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
            pod = at_path(replica, "template", "spec") or {}
            _default_port(training(pod.get("containers")))
            if deadline := policy.get("activeDeadlineSeconds"):
                # As k8sjob renders it: the operator's own deadline has no timer (see lint).
                pod.setdefault("activeDeadlineSeconds", deadline)
        if elastic is not None:  # the operator fills in an empty one, too
            _settle_elastic(elastic, at_path(replicas, Role.WORKER, "replicas"))

    def fields(self, job: Json) -> Json:
        """The fields from nprocPerNode, elasticPolicy and runPolicy."""
        spec = job["spec"]
        policy, replicas = spec["runPolicy"], spec["pytorchReplicaSpecs"]
        gang = policy.get("schedulingPolicy") or {}
        ours = {"min_available": gang.get("minAvailable"), "queue": gang.get("queue")}
        return {
            "replicas": _replicas(spec),
            "gang": ours if gang else None,
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
    for key, opposite in (("minReplicas", most), ("maxReplicas", least)):
        default = opposite if opposite is not None else workers
        if default is not None:
            policy.setdefault(key, default)


def _replicas(spec: Json) -> Json:
    replicas, elastic = spec["pytorchReplicaSpecs"], spec.get("elasticPolicy")
    nodes = sum(replica["replicas"] for replica in replicas.values())
    fields: Json = {"workers": nodes - 1}
    nproc = spec.get("nprocPerNode")
    if isinstance(nproc, str) and re.fullmatch("[0-9]{1,9}", nproc) and int(nproc) > 1:
        fields["nproc_per_node"] = int(nproc)
    if elastic and Role.MASTER not in replicas:
        fields["elastic"] = {"min": elastic.get("minReplicas"), "max": elastic.get("maxReplicas")}
    return fields


def _max_restarts(spec: Json) -> int | None:
    """The restarts of the whole group from which k8sjob would derive this backoffLimit."""
    limit = spec["runPolicy"].get("backoffLimit")
    elastic = spec.get("elasticPolicy") or {}
    if not isinstance(limit, int):
        return elastic.get("maxRestarts")
    nodes = sum(replica["replicas"] for replica in spec["pytorchReplicaSpecs"].values())
    most = elastic.get("maxReplicas") or nodes
    return max(1, (limit - 1) // most) if limit else 0

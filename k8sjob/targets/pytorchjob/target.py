"""How a spec becomes a PyTorchJob."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Final

from k8sjob.contract import Role
from k8sjob.findings import invalid
from k8sjob.kube.api_resources import Controller
from k8sjob.kube.objects import at_path
from k8sjob.targets.api import Target
from k8sjob.targets.field_types import type_problems
from k8sjob.targets.pytorchjob import operator
from k8sjob.targets.pytorchjob.job import PyTorchJob
from k8sjob.targets.pytorchjob.pods import PyTorchJobPods

if TYPE_CHECKING:
    from collections.abc import Iterator

    from k8sjob.findings import Finding
    from k8sjob.kube.objects import Json
    from k8sjob.rules import Rules
    from k8sjob.spec import JobSpec
    from k8sjob.targets.api import Job


class PyTorchJobTarget(Target):
    """kubeflow.org/v1, kept by the training operator."""

    name = "pytorchjob"
    kind = operator.KIND
    api_version = operator.API_VERSION
    resource = "pytorchjobs"
    job_type = PyTorchJob
    pods = PyTorchJobPods()
    controller = Controller(
        kind=operator.KIND,
        name="the training operator",
        webhooks="training-operator.kubeflow.org",
        deployment="control-plane=kubeflow-training-operator",
        namespace="kubeflow",
        missing="ask for it (v1.9)",
        init_image="alpine:3.10",
        image_flag="--pytorch-init-container-image",
        template_flag="--pytorch-init-container-template-file",
        gang_flag="--gang-scheduler-name",
    )
    file = "pytorchjob.yaml"
    shapes = operator.SHAPES
    policy_at = ("spec", "runPolicy")
    sources = {  # noqa: RUF012 - as in Target
        "cleanPodPolicy": ("policy", "clean_pod_policy"),
        "backoffLimit": ("policy", "max_restarts"),
        "restartPolicy": ("policy", "restart_policy"),
        "minReplicas": ("replicas", "elastic"),
        "maxReplicas": ("replicas", "elastic"),
        "nprocPerNode": ("replicas", "nproc_per_node"),
    }
    manager = operator.MANAGER

    def refusals(self, spec: JobSpec) -> Iterator[Finding]:
        """A rendezvous that is not the agent's: it would leave at its start, or wait for ever."""
        policy = at_path(spec.overlay, "spec", "elasticPolicy")
        step = "remove it, or let torchrun start the job (run.command)"
        for field, pattern, words in (
            ("rdzvBackend", "c10d", "k8sjob's agent joins by c10d"),
            ("rdzvHost", rf"{spec.name}-worker-\d+(\..*)?", "k8sjob's agent joins at a pod"),
        ):
            value = at_path(policy, field)
            if spec.uses_agent and value is not None and not re.fullmatch(pattern, str(value)):
                path = ("overlay", "spec", "elasticPolicy", field)
                yield invalid(path, f"{value!r}: {words}", step)

    def values(self, spec: JobSpec) -> dict[str, Any]:
        """The template's values, beside those that all kinds have."""
        return {
            "nproc_per_node": str(spec.nproc_per_node),
            "backoff_limit": backoff_limit(spec),
            "gang_size": (spec.gang and spec.gang.min_available) or spec.nnodes,
            "injected": {},
            "fields": {},
        }

    def problems(self, manifest: Json) -> list[Finding]:
        """The problems that the operator's webhook reports, or else those of the CRD's types."""
        refused = operator.webhook_problems(manifest)
        return refused or list(type_problems(self.typed(manifest)[1]))

    @property
    def rules(self) -> Rules[Any]:
        """What the operator makes of the fields."""
        from k8sjob.targets.pytorchjob.lint import RULES  # noqa: PLC0415 - only for lint

        return RULES

    def minimal(self, name: str, pod: Json) -> Job:
        """Only a Master."""
        master = {"replicas": 1, "template": {"spec": pod}}
        about = {"apiVersion": self.api_version, "kind": self.kind, "metadata": {"name": name}}
        return self.job({**about, "spec": {"pytorchReplicaSpecs": {Role.MASTER.value: master}}})


PYTORCHJOB: Final = PyTorchJobTarget()


def backoff_limit(spec: JobSpec) -> int:
    """runPolicy.backoffLimit for `max_restarts` restarts of the whole group.

    The operator fails a job as soon as the restart counts of all containers of all its running
    pods, init containers included, add up to the limit. When one replica is lost its peers fail
    with it, so one restart of the group is up to one restart of each of its nodes:
    max_restarts x nodes of them must pass, and the next one may end the job. An elastic job may
    have grown to its upper bound. Without restarts the limit is 0, which also ends a job whose
    pod is lost before it ever ran.

    Returns:
        max_restarts x nodes + 1, or 0.
    """
    elastic = spec.replicas.elastic
    nodes = elastic.max if elastic else spec.nnodes
    restarts = spec.policy.max_restarts
    return restarts * nodes + 1 if restarts else 0

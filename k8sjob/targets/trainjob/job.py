"""TrainJobs as an apiserver has them, each with its TrainingRuntime.

Trainer makes a JobSet of the job's name from both, and JobSet makes of that an Indexed Job.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from k8sjob.kube.objects import Object, training
from k8sjob.targets.indexed.job import Indexed
from k8sjob.targets.indexed.pods import CHILD_NAME, NODE

if TYPE_CHECKING:
    from k8sjob.contract import Role
    from k8sjob.kube.objects import Json

PORT: Final = 29500
"""PET_MASTER_PORT, which Trainer injects."""
KUEUE: Final = "kueue.x-k8s.io/manager"
"""Whose runtimePatches put Pods where their quota is."""


class TrainJob(Indexed):
    """A TrainJob of trainer.kubeflow.org/v1alpha1."""

    job_at = ("runtime", "spec", "template", "spec", "replicatedJobs", 0, "template", "spec")
    nodes_at = ("spec", "trainer")
    limits = ("suspend",)

    @property
    def _trainer(self) -> Json:
        return self.part("spec", "trainer")

    @property
    def is_training(self) -> bool:
        """Yes."""
        return True

    @property
    def job_spec(self) -> Json:
        """The Job that was made of it; before that, what its runtime and itself say of it."""
        if self.child is not None and (spec := Object(self.child).spec):
            return dict(spec)
        # As Trainer does: spec.trainer takes precedence, and the runtime has everything else.
        trainer, base = self._trainer, super().job_spec
        template, containers = Object(base).part("template"), containers_of(base)
        node = training(containers)
        process: Json = {k: trainer[k] for k in ("image", "command", "args") if k in trainer}
        process |= {"name": NODE, "env": [*(node.get("env") or ()), *(trainer.get("env") or ())]}
        if "resourcesPerNode" in trainer:
            process["resources"] = trainer["resourcesPerNode"]
        sidecars = [container for container in containers if container is not node]
        spec = {**Object(template).spec, "containers": [{**node, **process}, *sidecars]}
        return {**base, "template": {**template, "spec": spec}}

    @property
    def nodes(self) -> int:
        """spec.trainer.numNodes, or the completions of its Job."""
        return int(self._trainer.get("numNodes") or super().nodes)

    @property
    def nproc_per_node(self) -> str:
        """spec.trainer.numProcPerNode, or what was injected."""
        return str(self._trainer.get("numProcPerNode") or super().nproc_per_node)

    @property
    def active_deadline(self) -> int | None:
        """The shorter deadline: its own, or its Job's."""
        deadlines = (self.spec.get("activeDeadlineSeconds"), super().active_deadline)
        return min((seconds for seconds in deadlines if seconds is not None), default=None)

    @property
    def written_spec(self) -> Json:
        """The spec without what Kueue adds to it."""
        spec = dict(self.spec)
        patches = spec.pop("runtimePatches", None) or ()
        theirs = [patch for patch in patches if patch.get("manager") != KUEUE]
        return {**spec, "runtimePatches": theirs} if theirs else spec

    def injected_env(self, role: Role | str, index: int) -> dict[str, str]:
        """Trainer's variables (torch.go, EnforceMLPolicy), and the rank."""
        return {
            **super().injected_env(role, index),
            "PET_NNODES": str(self.nodes),
            "PET_NPROC_PER_NODE": self.nproc_per_node,
            "PET_MASTER_ADDR": f"{self.name}{CHILD_NAME}-0.{self.name}",
            "PET_MASTER_PORT": str(PORT),
        }


def containers_of(spec: Json) -> list[Json]:
    """The containers of a Job's spec."""
    return list(Object(spec).part("template", "spec").get("containers") or ())

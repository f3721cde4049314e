"""TrainJobs as an apiserver has them, each with its TrainingRuntime.

Trainer makes a JobSet of the job's name from both, and JobSet makes of that an Indexed Job.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from k8sjob.kube.api_resources import path
from k8sjob.kube.gangs import GANG_QUEUE
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
GROUP: Final = "trainer.kubeflow.org"
STEP: Final = f"{GROUP}/trainjob-ancestor-step"
"""The label of the replicated Job that spec.trainer is about; its value is "trainer"."""
SET: Final = ("runtime", "spec", "template", "spec")
"""The path of the JobSet's spec, where the runtime is in the job."""
CLUSTER_WIDE: Final = "ClusterTrainingRuntime"
"""The default of runtimeRef.kind."""
NAMESPACED: Final = "TrainingRuntime"
PATCHED_JOBS: Final = ("trainingRuntimeSpec", "template", "spec", "replicatedJobs")
"""The path in one of spec.runtimePatches of its patches of replicated Jobs."""
PATCHED_PODS: Final = ("template", "spec", "template")
"""The path of the Pod template in such a patch, and in a replicated Job."""


class TrainJob(Indexed):
    """A TrainJob of trainer.kubeflow.org/v1alpha1."""

    job_at = (*SET, "replicatedJobs", 0, "template", "spec")
    nodes_at = ("spec", "trainer")
    limits = ("suspend",)

    @property
    def _trainer(self) -> Json:
        return self.part("spec", "trainer")

    @property
    def reference(self) -> tuple[str, str]:
        """The kind and the name of its runtime."""
        reference = self.part("spec", "runtimeRef")
        return str(reference.get("kind") or CLUSTER_WIDE), str(reference.get("name") or "")

    @property
    def shares_companion(self) -> bool:
        """Whether it names another runtime than the TrainingRuntime of its own name."""
        return self.reference != (NAMESPACED, self.name)

    def companion_path(self, namespace: str) -> str:
        """The path of its runtime; empty if it names none."""
        kind, name = self.reference
        where = namespace if kind == NAMESPACED else ""
        version = self.target.api_version
        return path(f"{kind.lower()}s", where, name, api_version=version) if name else ""

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
        merged = {**template, "spec": spec}
        for patch in self.spec.get("runtimePatches") or ():
            for part in Object(patch).part(*PATCHED_JOBS[:-1]).get(PATCHED_JOBS[-1]) or ():
                if part.get("name") == NODE:
                    merged = _patched(merged, Object(part).part(*PATCHED_PODS))
        return {**base, "template": merged}

    @property
    def nodes(self) -> int:
        """spec.trainer.numNodes, that of its runtime, or the completions of its Job."""
        of_runtime = self.at("runtime", "spec", "mlPolicy", "numNodes")
        return int(self._trainer.get("numNodes") or of_runtime or super().nodes)

    @property
    def nproc_per_node(self) -> str:
        """spec.trainer.numProcPerNode, or what was injected."""
        return str(self._trainer.get("numProcPerNode") or super().nproc_per_node)

    @property
    def gang(self) -> Json | None:
        """With the Queue that Trainer reads, an annotation of the runtime's template."""
        runtime = Object(self.at("runtime", "spec", "template") or {})
        return super().gang and {"queue": runtime.annotations.get(GANG_QUEUE)}

    @property
    def active_deadline(self) -> int | None:
        """The shorter deadline: its own, or its Job's."""
        deadlines = (self.spec.get("activeDeadlineSeconds"), super().active_deadline)
        return min((seconds for seconds in deadlines if seconds is not None), default=None)

    @property
    def written_spec(self) -> Json:
        """The spec without what Kueue adds to it, and the times that Trainer's webhook adds."""
        spec = dict(self.spec)
        patches = spec.pop("runtimePatches", None) or ()
        patches = [{key: patch[key] for key in patch if key != "time"} for patch in patches]
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


def _patched(base: Any, patch: Any) -> Any:
    """A value after a patch, as strategic merges do with Pods: lists merge by their keys."""
    if isinstance(patch, dict):
        before = base if isinstance(base, dict) else {}
        return {**before, **{k: _patched(before.get(k), v) for k, v in patch.items()}}
    if not (isinstance(patch, list) and isinstance(base, list)):
        return patch
    fields = [entry.keys() if isinstance(entry, dict) else () for entry in (*base, *patch)]
    # Two mounts of one volume share its name.
    key = next((key for key in ("mountPath", "name") if all(key in names for names in fields)), "")
    by_key = {entry[key]: entry for entry in base} if key else {}
    for entry in patch if key else ():
        by_key[entry[key]] = _patched(by_key.get(entry[key]), entry)
    return list(by_key.values()) if key else patch


def containers_of(spec: Json) -> list[Json]:
    """The containers of a Job's spec."""
    return list(Object(spec).part("template", "spec").get("containers") or ())

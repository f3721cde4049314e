"""TrainJobs that others wrote, with the TrainingRuntime or ClusterTrainingRuntime that they name.

Trainer takes the process of each node from spec.trainer first, then from the runtime
(pkg/runtime/framework/plugins/torch/torch.go, jobset/builder.go); here it is in the runtime alone.
"""

from __future__ import annotations

import copy
import math
from typing import TYPE_CHECKING, Final

from k8sjob.errors import Problem, SpecError
from k8sjob.kube.capacity import amounts
from k8sjob.kube.objects import Object, at_path, training
from k8sjob.targets.api import Authored
from k8sjob.targets.indexed_reader import IndexedReader
from k8sjob.targets.jobset.reader import join, settle_set
from k8sjob.targets.jobset.target import NODE
from k8sjob.targets.schema import fit, type_problems
from k8sjob.targets.trainjob.target import TrainJob

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from k8sjob.kube.objects import Json

_PROCESS: Final = {"image", "command", "args", "resourcesPerNode"}
_SET: Final = ("runtime", "spec", "template", "spec")
_KIND: Final = "ClusterTrainingRuntime"
"""What runtimeRef.kind is by default."""


class TrainJobReader(IndexedReader):
    """See k8sjob.targets.api.Reader."""

    def __init__(self) -> None:
        super().__init__(TrainJob(), NODE)

    def authored(self, job: Json, others: Sequence[Json]) -> Authored:
        """With its runtime as `runtime`, and the whole of its process there."""
        spec = job["spec"] = self.target.written(job)
        reference = spec.get("runtimeRef") or {}
        kind, name = reference.get("kind") or _KIND, str(reference.get("name"))
        found = [one for one in others if (one.get("kind"), Object(one).name) == (kind, name)]
        if not found:
            message = f"the {kind} {name} is not in the file, and the Pods are in it; add it:"
            step = f"kubectl get {kind.lower()} {name} -o yaml"
            raise SpecError([Problem("spec.runtimeRef", f"{message} {step}")])
        runtime = copy.deepcopy(found[0])
        if problems := list(type_problems(fit(runtime, TrainJob.shapes["runtime"])[1])):
            raise SpecError(problems)
        own = kind == "TrainingRuntime" and name == Object(job).name
        became = f"the {kind} {name} became a TrainingRuntime of the job's name, without its labels"
        notes = [] if own else [became]
        job["spec"] = {
            **spec,
            "runtimeRef": {
                "apiGroup": "trainer.kubeflow.org",
                "kind": "TrainingRuntime",
                "name": Object(job).name,
            },
        }
        job["runtime"] = {
            "apiVersion": runtime.get("apiVersion"),
            "kind": "TrainingRuntime",
            "metadata": {"name": Object(job).name, "namespace": Object(job).namespace or None},
            "spec": runtime.get("spec") or {},
        }
        notes += join(at_path(job, *_SET) or {}, Object(job).name, _SET)
        notes += self._move_process(job)
        notes += self.rendered_names(job)
        return Authored(job, notes, found)

    def _move_process(self, job: Json) -> Iterator[str]:
        """What spec.trainer says of the container goes there; the number of nodes comes back."""
        policy = job["runtime"]["spec"].get("mlPolicy") or {}
        torch = policy.get("torch") or {}
        trainer = dict(job["spec"].get("trainer") or {})
        of_job = at_path(job, *self.target.job_at)
        nodes, nproc = policy.pop("numNodes", 1), torch.pop("numProcPerNode", "auto")
        nodes, nproc = trainer.get("numNodes", nodes), trainer.get("numProcPerNode", nproc)
        of_job["completions"] = of_job["parallelism"] = nodes
        container = training(at_path(of_job, "template", "spec", "containers"))
        for key in _PROCESS & trainer.keys():
            container["resources" if key == "resourcesPerNode" else key] = trainer[key]
        env = {one.get("name"): one for one in (container.get("env") or [])}
        env |= {one.get("name"): one for one in trainer.get("env") or []}
        if env:
            container["env"] = list(env.values())
        if not str(nproc).isdecimal():
            given, (nproc, each) = nproc, _processes(Object(container).part("resources"))
            yield f"numProcPerNode is {given}; in what k8sjob renders, {nproc}: one for each {each}"
        if deadline := job["spec"].pop("activeDeadlineSeconds", None):
            of_job["activeDeadlineSeconds"] = min(
                deadline, of_job.get("activeDeadlineSeconds") or deadline
            )
            yield "activeDeadlineSeconds is that of the Job below in what k8sjob renders"
        job["spec"]["trainer"] = {"numNodes": nodes, "numProcPerNode": int(nproc)}

    def settle(self, job: Json) -> None:
        """The defaults of Trainer and of JobSet."""
        settle_set(at_path(job, *_SET))
        node = at_path(job, *_SET)["replicatedJobs"][0]
        labels = Object(node["template"]).labels
        labels.pop("trainer.kubeflow.org/trainjob-ancestor-step", None)
        if not labels:
            node["template"].pop("metadata", None)
        super().settle(job)


def _processes(resources: Json) -> tuple[int, str]:
    """How many processes Trainer starts by itself in a node, and for each of what (torch.go)."""
    requests, limits = (amounts(resources.get(key) or {}) for key in ("requests", "limits"))
    for one in (requests, limits):
        if gpus := [count for name, count in one.items() if "gpu" in name.lower() and count]:
            return math.ceil(gpus[0]), "GPU"
    return max(1, math.ceil(requests.get("cpu") or limits.get("cpu") or 0)), "CPU"

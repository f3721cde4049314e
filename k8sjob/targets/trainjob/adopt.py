"""TrainJobs that others wrote, with the TrainingRuntime or ClusterTrainingRuntime that they name.

Trainer takes the process of each node from spec.trainer first, then from the runtime; read, the
latter has it.
"""

from __future__ import annotations

import copy
import math
import shlex
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from k8sjob.errors import SpecError
from k8sjob.findings import invalid
from k8sjob.kube.capacity import amounts
from k8sjob.kube.objects import Object, at_path, training
from k8sjob.targets.api import Authored
from k8sjob.targets.field_types import fit, type_problems
from k8sjob.targets.indexed.adopt import IndexedReader
from k8sjob.targets.jobset.adopt import join, settle_set
from k8sjob.targets.trainjob.job import KUEUE
from k8sjob.targets.trainjob.target import GROUP, SET, TrainJobTarget

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from k8sjob.kube.objects import Json

_PROCESS: Final = {"image", "command", "args", "resourcesPerNode"}
_KIND: Final = "ClusterTrainingRuntime"
"""The default of runtimeRef.kind."""


class TrainJobReader(IndexedReader):
    """The reader of TrainJobs."""

    target = TrainJobTarget()

    def authored(self, job: Json, documents: Sequence[Json]) -> Authored:
        """With its runtime as `runtime`, and the whole of its process there."""
        original, spec = Object(job).spec, self.target.job(job).written_spec
        job["spec"] = spec
        reference = spec.get("runtimeRef") or {}
        kind, name = reference.get("kind") or _KIND, reference.get("name")
        if not name:
            raise SpecError(
                [invalid(("spec", "runtimeRef", "name"), "no runtime is named", "add its name")]
            )
        if kind not in (_KIND, "TrainingRuntime"):
            message, step = (
                f"{kind!r} is not a runtime of Trainer's",
                f"use TrainingRuntime or {_KIND}",
            )
            raise SpecError([invalid(("spec", "runtimeRef", "kind"), message, step)])
        runtimes = [doc for doc in documents if (doc.get("kind"), Object(doc).name) == (kind, name)]
        if not runtimes:
            message = f"the {kind} {name} is not in the file, and the Pods are in it"
            step = f"add it: kubectl get {kind.lower()} {shlex.quote(str(name))} -o yaml"
            raise SpecError([invalid(("spec", "runtimeRef"), message, step)])
        if runtimes[1:]:
            message = f"the file has {len(runtimes)} {kind}s {name}"
            raise SpecError([invalid(("spec", "runtimeRef"), message, "keep the intended one")])
        runtime = copy.deepcopy(runtimes[0])
        if problems := list(type_problems(fit(runtime, self.target.shapes["runtime"])[1])):
            raise SpecError([replace(p, path=("runtime", *p.path)) for p in problems])
        if (version := runtime.get("apiVersion")) != self.target.api_version:
            message = (
                f"{version!r} is not {self.target.api_version!r}, the only version that k8sjob"
            )
            raise SpecError(
                [invalid(("runtime", "apiVersion"), f"{message} knows", f"convert the {kind}")]
            )
        job_name = Object(job).name
        became = f"the {kind} {name} became a TrainingRuntime of the job's name, without its labels"
        notes = [] if (kind, name) == ("TrainingRuntime", job_name) else [became]
        if len(spec.get("runtimePatches") or ()) < len(original.get("runtimePatches") or ()):
            notes.append(f"left out, since Kueue sets it again: the runtimePatches of {KUEUE}")
        spec["runtimeRef"] = {"apiGroup": GROUP, "kind": "TrainingRuntime", "name": job_name}
        job["runtime"] = {
            "apiVersion": runtime.get("apiVersion"),
            "kind": "TrainingRuntime",
            "metadata": {"name": job_name, "namespace": Object(job).namespace or None},
            "spec": runtime.get("spec") or {},
        }
        notes += join(at_path(job, *SET) or {}, job_name, SET)
        notes += self._move_process(job)
        notes += self.rendered_names(job)
        return Authored(job, notes, runtimes)

    def _move_process(self, job: Json) -> Iterator[str]:
        """Move spec.trainer's fields into the container; return the number of nodes."""
        policy = job["runtime"]["spec"].get("mlPolicy") or {}
        torch = policy.get("torch") or {}
        trainer = dict(job["spec"].get("trainer") or {})
        of_job = at_path(job, *self.target.job_type.job_at)
        nodes, nproc = policy.pop("numNodes", 1), torch.pop("numProcPerNode", "auto")
        nodes, nproc = trainer.get("numNodes", nodes), trainer.get("numProcPerNode", nproc)
        of_job["completions"] = of_job["parallelism"] = nodes
        container = training(at_path(of_job, "template", "spec", "containers"))
        for key in _PROCESS & trainer.keys():
            container["resources" if key == "resourcesPerNode" else key] = trainer[key]
        env = {variable.get("name"): variable for variable in (container.get("env") or [])}
        env |= {variable.get("name"): variable for variable in trainer.get("env") or []}
        if env:
            container["env"] = list(env.values())
        if not str(nproc).isdecimal():
            asked, (nproc, each) = nproc, _processes(Object(container).part("resources"))
            yield f"numProcPerNode is {asked}; in the rendered manifest {nproc}, one per {each}"
        if deadline := job["spec"].pop("activeDeadlineSeconds", None):
            job_deadline = of_job.get("activeDeadlineSeconds") or deadline
            of_job["activeDeadlineSeconds"] = min(deadline, job_deadline)
            yield "activeDeadlineSeconds is that of the Job below in the rendered manifest"
        job["spec"]["trainer"] = {"numNodes": nodes, "numProcPerNode": int(nproc)}

    def settle(self, job: Json) -> None:
        """Fill in the defaults of Trainer and of JobSet."""
        settle_set(at_path(job, *SET))
        node = at_path(job, *SET)["replicatedJobs"][0]
        labels = Object(node["template"]).labels
        labels.pop("trainer.kubeflow.org/trainjob-ancestor-step", None)
        if not labels:
            node["template"].pop("metadata", None)
        super().settle(job)


def _processes(resources: Json) -> tuple[int, str]:
    """The processes that Trainer starts in a node, and per which resource (torch.go)."""
    requests, limits = (amounts(resources.get(key) or {}) for key in ("requests", "limits"))
    for quantities in (requests, limits):
        if gpus := [count for name, count in quantities.items() if "gpu" in name.lower() and count]:
            return math.ceil(gpus[0]), "GPU"
    return max(1, math.ceil(requests.get("cpu") or limits.get("cpu") or 0)), "CPU"

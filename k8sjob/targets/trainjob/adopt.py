"""TrainJobs that others wrote, with the TrainingRuntime or ClusterTrainingRuntime that they name.

Trainer takes the process of each node from spec.trainer first, then from the runtime; read, the
latter has it.
"""

from __future__ import annotations

import copy
import math
import shlex
from typing import TYPE_CHECKING, Final

from k8sjob.errors import SpecError
from k8sjob.findings import invalid
from k8sjob.kube.capacity import amounts
from k8sjob.kube.objects import Object, at_path, training
from k8sjob.targets.api import Authored
from k8sjob.targets.field_types import fit, type_problems
from k8sjob.targets.indexed.adopt import IndexedReader
from k8sjob.targets.indexed.pods import NODE
from k8sjob.targets.jobset.adopt import join, settle_set
from k8sjob.targets.trainjob.job import (
    CLUSTER_WIDE,
    GROUP,
    KUEUE,
    NAMESPACED,
    PATCHED_JOBS,
    PATCHED_PODS,
    SET,
    TrainJob,
)
from k8sjob.targets.trainjob.target import TRAINJOB, TrainJobTarget

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from k8sjob.kube.objects import Json

_NODES: Final = "numNodes"
_GRACE: Final = "terminationGracePeriodSeconds"
_PROCESS: Final = {"image", "command", "args", "resourcesPerNode"}


class TrainJobReader(IndexedReader):
    """The reader of TrainJobs."""

    target: TrainJobTarget = TRAINJOB

    def authored(self, job: Json, documents: Sequence[Json]) -> Authored:
        """With its runtime as `runtime`, and the whole of its process there.

        Where the runtime is not of the job's name, with what the job itself says of its Pods.
        """
        original = Object(job).spec
        job["spec"] = spec = self.target.job(job).written_spec
        trainjob = self.target.job(dict(job))
        kind, name = trainjob.reference
        runtimes = [doc for doc in documents if (doc.get("kind"), Object(doc).name) == (kind, name)]
        _check_reference(trainjob, runtimes)
        runtime = copy.deepcopy(runtimes[0]) if runtimes else {}
        if problems := list(type_problems(fit(runtime, self.target.shapes["runtime"])[1])):
            raise SpecError([p._replace(path=("runtime", *p.path)) for p in problems])
        notes = []
        if len(spec.get("runtimePatches") or ()) < len(original.get("runtimePatches") or ()):
            notes.append(f"left out, since Kueue sets it again: the runtimePatches of {KUEUE}")
        spec["runtimeRef"] = {"apiGroup": GROUP, "kind": kind, "name": name}
        job["runtime"] = {
            "apiVersion": self.target.api_version,
            "kind": NAMESPACED,
            "metadata": {"name": trainjob.name, "namespace": trainjob.namespace or None},
            "spec": runtime.get("spec") or {},
        }
        if trainjob.shares_companion:
            notes.append(f"the {kind} {name} is kept: `runtime` names it, and it stays as it is")
            process = trainjob.part("spec", "trainer")
            if not runtimes and "command" in process and "args" not in process:
                notes.append("arguments of the runtime, if it has any, belong into run.args")
            job["runtime"]["spec"] = _said(trainjob, job["runtime"]["spec"])
            patches = [_without_pods(patch) for patch in spec.pop("runtimePatches", ())]
            if patches := [patch for patch in patches if patch.keys() > {"manager"}]:
                spec["runtimePatches"] = patches
        notes += join(at_path(job, *SET) or {}, trainjob.name, SET)
        notes += self._move_process(job)
        notes += self.rendered_names(job)
        return Authored(job, notes, runtimes)

    def _move_process(self, job: Json) -> Iterator[str]:
        """Move spec.trainer's fields into the container; return the number of nodes."""
        policy = job["runtime"]["spec"].get("mlPolicy") or {}
        torch = policy.get("torch") or {}
        trainer = dict(job["spec"].get("trainer") or {})
        of_job = at_path(job, *self.target.job_type.job_at)
        nodes, nproc = policy.pop(_NODES, 1), torch.pop("numProcPerNode", "auto")
        nodes, nproc = trainer.get(_NODES, nodes), trainer.get("numProcPerNode", nproc)
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
        if deadline := of_job.pop("activeDeadlineSeconds", None):
            own_deadline = job["spec"].get("activeDeadlineSeconds") or deadline
            job["spec"]["activeDeadlineSeconds"] = min(deadline, own_deadline)
            yield "activeDeadlineSeconds of the Job is the TrainJob's in the rendered manifest"
        job["spec"]["trainer"] = {_NODES: nodes, "numProcPerNode": int(nproc)}

    def settle(self, job: Json) -> None:
        """Fill in the defaults of Trainer and of JobSet."""
        settle_set(at_path(job, *SET))
        node = at_path(job, *SET)["replicatedJobs"][0]
        labels = Object(node["template"]).labels
        labels.pop("trainer.kubeflow.org/trainjob-ancestor-step", None)
        if not labels:
            node["template"].pop("metadata", None)
        super().settle(job)

    def fields(self, document: Json) -> Json:
        """Those of its Indexed Job; restarts are up to the runtime where that stays."""
        fields, job = super().fields(document), self.target.job(document)
        if job.shares_companion:
            kind, name = job.reference
            fields["runtime"] = name if kind == CLUSTER_WIDE else {"kind": kind, "name": name}
            del fields["policy"]["restart_policy"], fields["policy"]["max_restarts"]
        return fields


def _check_reference(job: TrainJob, runtimes: Sequence[Json]) -> None:
    """Refuse a job of whose runtime too little is known.

    Raises:
        SpecError: with the reason.
    """
    (kind, name), at = job.reference, ("spec", "runtimeRef")
    image = job.part("spec", "trainer").get("image")
    versions = [runtime.get("apiVersion") for runtime in runtimes]
    missing = f"the {kind} {name} is not in the file, and"
    step = f"add it: kubectl get {kind.lower()} {shlex.quote(name)} -o yaml"
    problem = None
    if not name:
        problem = invalid((*at, "name"), "no runtime is named", "add its name")
    elif kind not in (CLUSTER_WIDE, NAMESPACED):
        message = f"{kind!r} is not a runtime of Trainer's"
        problem = invalid((*at, "kind"), message, f"use {NAMESPACED} or {CLUSTER_WIDE}")
    elif not runtimes and not job.shares_companion:
        problem = invalid(at, f"{missing} the Pods are in it", step)
    elif not runtimes and not image:
        problem = invalid(at, f"{missing} the image is in it", step)
    elif runtimes[1:]:
        message = f"the file has {len(runtimes)} {kind}s {name}"
        problem = invalid(at, message, "keep the intended one")
    elif runtimes and versions != [job.target.api_version]:
        message = f"{versions[0]!r} is not {job.target.api_version!r}, the only version that k8sjob"
        problem = invalid(("runtime", "apiVersion"), f"{message} knows", f"convert the {kind}")
    if problem:
        raise SpecError([problem])


def _said(job: TrainJob, runtime: Json) -> Json:
    """The spec of a runtime with what a job says of its Pods, and the process of its runtime."""
    of_job = copy.deepcopy(job.own.job_spec)
    replicated = at_path({"runtime": {"spec": runtime}}, *SET, "replicatedJobs") or ()
    node: Json = next((part for part in replicated if part.get("name") == NODE), {})
    container = training(of_job["template"]["spec"]["containers"])
    process = training(at_path(node, *PATCHED_PODS, "spec", "containers"))
    for key in ("image", "command", "args", "resources"):
        if key in process:
            container.setdefault(key, process[key])
    # What the runtime decides is as k8sjob renders it, so that no field of job.yaml tells of it.
    pod = {"restartPolicy": "Never", "automountServiceAccountToken": False}
    if grace := at_path(node, *PATCHED_PODS, "spec", _GRACE):
        of_job["template"]["spec"].setdefault(_GRACE, grace)
    of_job["template"]["spec"] |= pod
    of_job |= {"completionMode": "Indexed", "backoffLimit": 0}
    counts = {key: value for key, value in (runtime.get("mlPolicy") or {}).items() if key == _NODES}
    template = {"spec": {"replicatedJobs": [{"name": NODE, "template": {"spec": of_job}}]}}
    return {"mlPolicy": counts, "template": template}


def _without_pods(patch: Json) -> Json:
    """One of the runtimePatches without what it says of the Pods that train."""
    patch = copy.deepcopy(patch)
    parts = at_path(patch, *PATCHED_JOBS) or []
    for part in parts:
        if part.get("name") == NODE:
            (part.get("template") or {}).pop("spec", None)
    parts[:] = [part for part in parts if part.get("template") or part.get("name") != NODE]
    if not parts:
        Object(patch).part(*PATCHED_JOBS[:2]).pop("spec", None)
        if not Object(patch).part(*PATCHED_JOBS[:2]):
            patch.pop(PATCHED_JOBS[0], None)
    return patch


def _processes(resources: Json) -> tuple[int, str]:
    """The processes that Trainer starts in a node, and per which resource (torch.go)."""
    requests, limits = (amounts(resources.get(key) or {}) for key in ("requests", "limits"))
    for quantities in (requests, limits):
        if gpus := [count for name, count in quantities.items() if "gpu" in name.lower() and count]:
            return math.ceil(gpus[0]), "GPU"
    return max(1, math.ceil(requests.get("cpu") or limits.get("cpu") or 0)), "CPU"

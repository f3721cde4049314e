"""TrainJobs: trainer.kubeflow.org/v1alpha1, as k8sjob renders them and as others write them.

Trainer makes a JobSet of the job's name from a TrainingRuntime and the TrainJob, and JobSet makes
of that an Indexed Job, NAME-node-0. What a person asks for first is in the TrainJob: the image, the
process, the resources, the number of nodes. Everything else is in a TrainingRuntime of the job's
own, since a TrainJob's `runtimePatches` reach few fields of Pods and none of Jobs.

Only the variables PET_* are injected, and the webhook takes none of these names from a TrainJob.

Others' come with the TrainingRuntime or ClusterTrainingRuntime that they name. Trainer takes the
process of each node from spec.trainer first, then from the runtime; read, the latter has it.

Behavior: Kubeflow Trainer 2.3.0, pkg/runtime/framework/plugins/{torch,jobset}, pkg/webhooks.
"""

from __future__ import annotations

import copy
import math
import shlex
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from k8sjob.errors import SpecError
from k8sjob.findings import invalid
from k8sjob.kube.api_resources import Controller
from k8sjob.kube.capacity import amounts
from k8sjob.kube.objects import Object, at_path, training
from k8sjob.targets.api import Authored, Companion, Job, Made
from k8sjob.targets.field_types import ABOUT, METADATA, WrongType, fit, shape, type_problems
from k8sjob.targets.indexed import CHILD_NAME, NODE, Indexed
from k8sjob.targets.indexed_reader import IndexedReader
from k8sjob.targets.jobset import JobSet, join, settle_set

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from k8sjob.contract import Role
    from k8sjob.findings import Finding
    from k8sjob.kube.objects import Json
    from k8sjob.spec import JobSpec

_GROUP: Final = "trainer.kubeflow.org"
_PORT: Final = 29500
"""PET_MASTER_PORT, which Trainer injects."""
_SPEC_FIELDS: Final = (
    "activeDeadlineSeconds initializer managedBy runtimePatches runtimeRef suspend trainer"
)
"""The fields of TrainJobSpec, pkg/apis/trainer/v1alpha1/trainjob_types.go."""
_OVERRIDES: Final = "podTemplateOverrides"
_KUEUE: Final = "kueue.x-k8s.io/manager"
"""Whose runtimePatches put Pods where their quota is."""
_SET: Final = ("runtime", "spec", "template", "spec")
"""The path of the JobSet's spec, where the runtime is in the job."""


class TrainJob(Indexed):
    """trainer.kubeflow.org/v1alpha1, kept by Kubeflow Trainer."""

    name = "trainjob"
    kind = "TrainJob"
    api_version = f"{_GROUP}/v1alpha1"
    resource = "trainjobs"
    job_label = JobSet.job_label
    owner_label = JobSet.owner_label
    controller = Controller(
        kind="TrainJob",
        name="Kubeflow Trainer",
        webhooks=_GROUP,
        deployment="app.kubernetes.io/name=trainer,app.kubernetes.io/component=manager",
        namespace="kubeflow-system",
        missing="ask for it (2.3), with JobSet",
        delay=600,  # the Job controller's, see IndexedJob
        target="trainjob",
        companions="trainingruntimes",
    )
    creations = (
        *JobSet.creations,
        ("TrainJobResourcesCreationFailed", "SuccessfulCreate", "Created pod: "),
    )
    template = "trainjob.yaml.j2"
    file = "trainjob.yaml"
    companion = Companion(
        "trainingruntimes",
        "trainingruntime.yaml.j2",
        "Trainer's webhook refuses each change of the job without it, as suspend and resume",
        api_version=f"{_GROUP}/v1alpha1",
        key="runtime",
        missed=(
            "specified trainingRuntime must be created before",
            # Kueue's (getChildJobSet, pkg/controller/jobs/trainjob): either may answer first.
            "denied the request: runtime '",
            "TrainingRuntime specified in TrainJob",
        ),
    )
    made = (Made(JobSet.kind, JobSet.resource, JobSet.api_version), *JobSet.made)
    kueue_framework = "trainer.kubeflow.org/trainjob"
    kueue_patch = {"runtimePatches": [{"manager": _KUEUE}]}  # noqa: RUF012 - as in Target
    shared_kind = False
    process_at = ("spec", "trainer")
    spec_fields = frozenset(_SPEC_FIELDS.split())

    shapes = {**ABOUT, "spec": shape("TrainJob"), "runtime": shape("TrainingRuntime")}  # noqa: RUF012 - as in Target
    job_at = ("runtime", "spec", "template", "spec", "replicatedJobs", 0, "template", "spec")
    nodes_at = ("spec", "trainer")
    container_name = NODE
    manager = f"{_GROUP}/trainjob-controller"
    limits = ("suspend",)
    no_gang = "its PodGroup is that of spec.podGroupPolicy, which overlay.runtime can have"

    def refusals(self, spec: JobSpec) -> Iterator[Finding]:
        """The fields that an Indexed Job lacks, and those that Trainer lacks or changes."""
        yield from super().refusals(spec)
        kinds = "pytorchjob, job or jobset"
        if spec.replicas.elastic is not None:
            why = "Trainer has one number of nodes, and injects it as PET_NNODES"
            yield self._lacks(("replicas", "elastic"), why, kinds)
        if spec.policy.ttl_after_finished is not None:
            why = "only its JobSet could have one, and a TrainJob that failed would run again then"
            yield self._lacks(("policy", "ttl_after_finished"), why, kinds)
        if spec.run.command == ("tune", "run"):  # TorchTuneEntrypoint, pkg/constants
            why = "Trainer rewrites `tune run` and injects no address; put run.args into it"
            yield self._lacks(("run", "command"), why, kinds)

    def typed(self, manifest: Json) -> tuple[Json, list[WrongType]]:
        """The typed fields of a job, or of a runtime by itself."""
        if manifest.get("kind") == self.kind:
            return super().typed(manifest)
        return fit(manifest, {**self.shapes["runtime"], "metadata": {"name": str, **METADATA}})

    def values(self, spec: JobSpec) -> dict[str, Any]:
        """The values for the templates of both objects."""
        values = super().values(spec)
        return {
            **values,
            "nproc_per_node": spec.nproc_per_node,
            "container_name": self.container_name,
            "process_apart": True,
            "port": _PORT,
            "fields": _without_pet(values["fields"]),
        }

    def _env(self, spec: JobSpec) -> dict[str, str]:
        """The variables that Trainer does not inject."""
        return {**_without_pet(super()._env(spec)), "MASTER_PORT": str(_PORT)}

    def injected_env(self, job: Job, role: Role | str, index: int) -> dict[str, str]:
        """Trainer's variables (torch.go, EnforceMLPolicy), and the rank."""
        return {
            **super().injected_env(job, role, index),
            "PET_NNODES": str(self._nodes(job)),
            "PET_NPROC_PER_NODE": self.nproc_per_node(job),
            "PET_MASTER_ADDR": f"{job.name}{CHILD_NAME}-0.{job.name}",
            "PET_MASTER_PORT": str(_PORT),
        }

    def basic_problems(self, manifest: Json) -> Iterator[Finding]:
        """A field that Trainer 2.3 has no longer, too, which a server drops unless it is strict."""
        yield from super().basic_problems(manifest)
        if _OVERRIDES in Object(manifest).spec:
            step = "move its fields into the Pod template of the runtime, or to runtimePatches"
            yield invalid(("spec", _OVERRIDES), "Trainer 2.3 no longer has it", step)

    def job_problems(self, job: Job) -> list[Finding]:
        """The problems of an Indexed Job, and the fields that Trainer ignores in the runtime."""
        trainer, node = _trainer(job), training(_containers(super()._job(job)))
        at = (*self.job_at, "template", "spec", "containers", NODE)
        taken: list[tuple[str, ...]] = [
            (key,) for key in ("image", "command", "args", "resources") if key in node
        ]
        names = {variable.get("name") for variable in trainer.get("env") or ()}
        below = (variable.get("name") for variable in node.get("env") or ())
        taken += [("env", name) for name in below if name in names]
        message = "spec.trainer has another value, which takes precedence"
        reference = job.part("spec", "runtimeRef")
        kind, name = reference.get("kind"), reference.get("name")
        another = (kind, name) != ("TrainingRuntime", job.name)
        why = f"{kind} {name} is not the job's own TrainingRuntime"
        step = "change that in overlay.runtime"
        unnamed = job.at("runtime", "metadata", "name") != job.name
        return [
            *super().job_problems(job),
            *([invalid(("spec", "runtimeRef"), why, step)] if another else ()),
            *(
                [invalid(("runtime", "metadata", "name"), "it is the job's", "keep it")]
                if unnamed
                else ()
            ),
            *(invalid((*at, *field), message, "set it in the job spec") for field in taken),
        ]

    def minimal(self, name: str, pod: Json) -> Job:
        """One node, with a TrainingRuntime of the same name."""
        named = [{**container, "name": NODE} for container in pod["containers"]]
        template = {"spec": {**pod, "containers": named, "restartPolicy": "Never"}}
        job = {"completionMode": "Indexed", "template": template}
        labels = {f"{_GROUP}/trainjob-ancestor-step": "trainer"}
        node = {"name": NODE, "template": {"metadata": {"labels": labels}, "spec": job}}
        about = {"apiVersion": self.api_version, "metadata": {"name": name}}
        kind = "TrainingRuntime"
        runtime = {"template": {"spec": {"replicatedJobs": [node]}}}
        reference = {"apiGroup": _GROUP, "kind": kind, "name": name}
        return Job(
            {**about, "kind": self.kind, "spec": {"runtimeRef": reference}},
            self,
            {**about, "kind": kind, "spec": runtime},
        )

    def refused(self, name: str, pod: Json) -> Job:
        """With two replicas of the replicated Job in the runtime.

        A TrainJob without its runtime may be refused by Kueue's webhook before Trainer's.
        """
        job = self.minimal(name, pod)
        (node,) = job.at(*_SET, "replicatedJobs")
        node["replicas"] = 2
        return job

    # --- a job

    def is_training(self, job: Job) -> bool:  # noqa: ARG002 - each is
        """Yes."""
        return True

    def _job(self, job: Job) -> Json:
        """The Job that was made of it; before that, what its runtime and itself say of it."""
        if job.child is not None and (spec := Object(job.child).spec):
            return dict(spec)
        trainer, base = _trainer(job), super()._job(job)
        template, containers = Object(base).part("template"), _containers(base)
        node = training(containers)
        process: Json = {k: trainer[k] for k in ("image", "command", "args") if k in trainer}
        process |= {"name": NODE, "env": [*(node.get("env") or ()), *(trainer.get("env") or ())]}
        if "resourcesPerNode" in trainer:
            process["resources"] = trainer["resourcesPerNode"]
        sidecars = [container for container in containers if container is not node]
        spec = {**Object(template).spec, "containers": [{**node, **process}, *sidecars]}
        return {**base, "template": {**template, "spec": spec}}

    def _nodes(self, job: Job) -> int:
        return int(_trainer(job).get("numNodes") or super()._nodes(job))

    def nproc_per_node(self, job: Job) -> str:
        """spec.trainer.numProcPerNode, or what was injected."""
        return str(_trainer(job).get("numProcPerNode") or super().nproc_per_node(job))

    def active_deadline(self, job: Job) -> int | None:
        """The shorter deadline: its own, or its Job's."""
        deadlines = (job.spec.get("activeDeadlineSeconds"), super().active_deadline(job))
        return min((seconds for seconds in deadlines if seconds is not None), default=None)

    def written(self, job: Job) -> Json:
        """The spec without what Kueue adds to it."""
        spec = dict(job.spec)
        patches = spec.pop("runtimePatches", None) or ()
        theirs = [patch for patch in patches if patch.get("manager") != _KUEUE]
        return {**spec, "runtimePatches": theirs} if theirs else spec


def _trainer(job: Job) -> Json:
    return job.part("spec", "trainer")


def _containers(spec: Json) -> list[Json]:
    return list(Object(spec).part("template", "spec").get("containers") or ())


def _without_pet(variables: dict[str, str]) -> dict[str, str]:
    return {name: value for name, value in variables.items() if not name.startswith("PET_")}


_PROCESS: Final = {"image", "command", "args", "resourcesPerNode"}
_KIND: Final = "ClusterTrainingRuntime"
"""The default of runtimeRef.kind."""


class TrainJobReader(IndexedReader):
    """The reader of TrainJobs."""

    def authored(self, job: Json, documents: Sequence[Json]) -> Authored:
        """With its runtime as `runtime`, and the whole of its process there."""
        original, spec = Object(job).spec, self.target.written(Job(job, self.target))
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
        if problems := list(type_problems(fit(runtime, TrainJob.shapes["runtime"])[1])):
            raise SpecError([replace(p, path=("runtime", *p.path)) for p in problems])
        if (version := runtime.get("apiVersion")) != TrainJob.api_version:
            message = f"{version!r} is not {TrainJob.api_version!r}, the only version that k8sjob"
            raise SpecError(
                [invalid(("runtime", "apiVersion"), f"{message} knows", f"convert the {kind}")]
            )
        job_name = Object(job).name
        became = f"the {kind} {name} became a TrainingRuntime of the job's name, without its labels"
        notes = [] if (kind, name) == ("TrainingRuntime", job_name) else [became]
        if len(spec.get("runtimePatches") or ()) < len(original.get("runtimePatches") or ()):
            notes.append(f"left out, since Kueue sets it again: the runtimePatches of {_KUEUE}")
        spec["runtimeRef"] = {"apiGroup": _GROUP, "kind": "TrainingRuntime", "name": job_name}
        job["runtime"] = {
            "apiVersion": runtime.get("apiVersion"),
            "kind": "TrainingRuntime",
            "metadata": {"name": job_name, "namespace": Object(job).namespace or None},
            "spec": runtime.get("spec") or {},
        }
        notes += join(at_path(job, *_SET) or {}, job_name, _SET)
        notes += self._move_process(job)
        notes += self.rendered_names(job)
        return Authored(job, notes, runtimes)

    def _move_process(self, job: Json) -> Iterator[str]:
        """Move spec.trainer's fields into the container; return the number of nodes."""
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
        settle_set(at_path(job, *_SET))
        node = at_path(job, *_SET)["replicatedJobs"][0]
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

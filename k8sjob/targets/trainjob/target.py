"""How a spec becomes a TrainJob, trainer.kubeflow.org/v1alpha1, and its TrainingRuntime.

Trainer makes a JobSet of the job's name from a TrainingRuntime and the TrainJob, and JobSet makes
of that an Indexed Job, NAME-node-0. What a person asks for first is in the TrainJob: the image, the
process, the resources, the number of nodes. Everything else is in a TrainingRuntime of the job's
own, since a TrainJob's `runtimePatches` reach few fields of Pods and none of Jobs. With `runtime`
in job.yaml it is laid over a runtime that exists, see k8sjob.targets.trainjob.existing.

Only the variables PET_* are injected, and the webhook takes none of these names from a TrainJob.

Behavior: Kubeflow Trainer 2.3.0, pkg/runtime/framework/plugins/{torch,jobset}, pkg/webhooks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from k8sjob.findings import invalid
from k8sjob.kube.api_resources import Controller
from k8sjob.kube.objects import Object, at_path, training
from k8sjob.targets.api import Companion, Level
from k8sjob.targets.field_types import Seconds, WrongType, fit
from k8sjob.targets.indexed.pods import NODE
from k8sjob.targets.indexed.target import IndexedTarget
from k8sjob.targets.jobset.target import JOB_SET_SPEC, JobSetTarget
from k8sjob.targets.shapes import ABOUT, METADATA, POD_TEMPLATE, RESOURCES, VARIABLE
from k8sjob.targets.trainjob.existing import over_runtime, runtime_problems, unsaid
from k8sjob.targets.trainjob.job import (
    GROUP,
    KUEUE,
    NAMESPACED,
    PORT,
    SET,
    STEP,
    TrainJob,
    containers_of,
)
from k8sjob.targets.trainjob.pods import TrainJobPods

if TYPE_CHECKING:
    from collections.abc import Iterator

    from k8sjob.findings import FieldPath, Finding
    from k8sjob.kube.objects import Json
    from k8sjob.spec import JobSpec
    from k8sjob.targets.api import Job
    from k8sjob.targets.indexed.job import Indexed

_OVERRIDES: Final = "podTemplateOverrides"
_SPEC: Final[Json] = {
    "activeDeadlineSeconds": Seconds,
    "initializer": None,
    "managedBy": None,
    "runtimePatches": [
        {
            "manager": str,
            "trainingRuntimeSpec": {
                "template": {
                    "metadata": METADATA,
                    "spec": {
                        "replicatedJobs": [
                            {"name": str, "template": {"spec": {"template": POD_TEMPLATE}}}
                        ]
                    },
                }
            },
        }
    ],
    "runtimeRef": {"name": str, "apiGroup": str, "kind": str},
    "suspend": bool,
    "trainer": {
        "args": [str],
        "command": [str],
        "env": [VARIABLE],
        "image": str,
        "numNodes": int,
        "numProcPerNode": None,  # until Trainer 2.1 also "auto", "cpu" or "gpu"
        "resourcesPerNode": RESOURCES,
    },
}
"""All fields of TrainJobSpec (pkg/apis/trainer/v1alpha1/trainjob_types.go)."""
_RUNTIME: Final[Json] = {
    "apiVersion": str,
    "kind": str,
    "metadata": {"name": str},
    "spec": {
        "mlPolicy": {"numNodes": int, "torch": {"numProcPerNode": None}},
        "template": {"metadata": METADATA, "spec": JOB_SET_SPEC},
    },
}


class TrainJobTarget(IndexedTarget):
    """trainer.kubeflow.org/v1alpha1, kept by Kubeflow Trainer."""

    name = "trainjob"
    kind = "TrainJob"
    api_version = f"{GROUP}/v1alpha1"
    resource = "trainjobs"
    job_type = TrainJob
    pods = TrainJobPods()
    controller = Controller(
        kind="TrainJob",
        name="Kubeflow Trainer",
        webhooks=GROUP,
        deployment="app.kubernetes.io/name=trainer,app.kubernetes.io/component=manager",
        namespace="kubeflow-system",
        missing="ask for it (2.3), with JobSet",
        delay=600,  # the Job controller's, see BatchJobTarget
        target="trainjob",
        companions="trainingruntimes",
        # Before 2.2 they were podTemplateOverrides, and before 2.3 without the grace period.
        newest=r'spec\.runtimePatches(?:[^"]*\.terminationGracePeriodSeconds)?',
    )
    file = "trainjob.yaml"
    shapes = {**ABOUT, "spec": _SPEC, "runtime": _RUNTIME}  # noqa: RUF012 - as in Target
    objects = {"TrainingRuntime": _RUNTIME}  # noqa: RUF012 - as in Target
    companion = Companion(
        "trainingruntimes",
        "trainingruntime.yaml.j2",
        "Trainer's webhook refuses each change of the job without it, as suspend and resume",
        api_version=f"{GROUP}/v1alpha1",
        key="runtime",
        missed=(
            "specified trainingRuntime must be created before",
            # Kueue's (getChildJobSet, pkg/controller/jobs/trainjob): either may answer first.
            "denied the request: runtime '",
            "TrainingRuntime specified in TrainJob",
        ),
        shared="clustertrainingruntimes",
    )
    levels = (
        Level(JobSetTarget.kind, JobSetTarget.resource, JobSetTarget.api_version),
        *JobSetTarget.levels,
    )
    kueue_patch = {"runtimePatches": [{"manager": KUEUE}]}  # noqa: RUF012 - as in Target
    shared_kind = False
    process_at = ("spec", "trainer")
    container_name = NODE
    manager = f"{GROUP}/trainjob-controller"
    no_gang = "its PodGroup is that of spec.podGroupPolicy, which overlay.runtime can have"

    def job(self, document: Json) -> TrainJob:
        """The job from its Job.document, or from its object alone."""
        return TrainJob.of(self, document)

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
        if at_path(spec.overlay, "spec", "runtimeRef") is not None:
            message, step = "it has its own field", "set `runtime` in the job spec"
            yield invalid(("overlay", "spec", "runtimeRef"), message, step)
        yield from unsaid(spec)

    def runtime_policy(self, spec: JobSpec) -> str:
        """OnFailure over a runtime that exists: JobSet's default, by which containers restart."""
        return super().runtime_policy(spec) if spec.runtime is None else "OnFailure"

    def finished(self, job: Job) -> Job:
        """Over a runtime that exists: with the fields of its Pods in one of its runtimePatches."""
        return over_runtime(job) if job.shares_companion else job

    def companion_problems(self, job: Job, companion: Json) -> Iterator[Finding]:
        """What of a runtime that exists does not go with the job."""
        return runtime_problems(job, companion)

    def typed(self, manifest: Json) -> tuple[Json, list[WrongType]]:
        """The typed fields of a job, or of a runtime by itself."""
        if manifest.get("kind") == self.kind:
            return super().typed(manifest)
        about = {"name": str, **METADATA}
        return fit(manifest, {**_RUNTIME, "metadata": about})

    def values(self, spec: JobSpec) -> dict[str, Any]:
        """The values for the templates of both objects."""
        values = super().values(spec)
        return {
            **values,
            "nproc_per_node": spec.nproc_per_node,
            "container_name": self.container_name,
            "process_apart": True,
            "port": PORT,
            "runtime": spec.existing_runtime or {"kind": NAMESPACED, "name": spec.name},
            "fields": _without_pet(values["fields"]),
        }

    def _env(self, spec: JobSpec) -> dict[str, str]:
        """The variables that Trainer does not inject."""
        return {**_without_pet(super()._env(spec)), "MASTER_PORT": str(PORT)}

    def basic_problems(self, manifest: Json) -> Iterator[Finding]:
        """A field that Trainer 2.3 has no longer, too, which a server drops unless it is strict."""
        yield from super().basic_problems(manifest)
        if _OVERRIDES in Object(manifest).spec:
            step = "move its fields into the Pod template of the runtime, or to runtimePatches"
            yield invalid(("spec", _OVERRIDES), "Trainer 2.3 no longer has it", step)

    def job_problems(self, job: Indexed) -> list[Finding]:
        """The problems of an Indexed Job, and the fields that Trainer ignores in the runtime."""
        trainer, containers = job.part("spec", "trainer"), containers_of(job.at(*job.job_at) or {})
        node = training(containers)
        at: FieldPath = (*job.job_at, "template", "spec", "containers")
        at = (*at, containers.index(node)) if node else at
        process = ("image", "command", "args", "resources")
        taken: list[FieldPath] = [(key,) for key in process if key in node]
        names = {variable.get("name") for variable in trainer.get("env") or ()}
        below = enumerate(node.get("env") or ())
        taken += [("env", index) for index, variable in below if variable.get("name") in names]
        problems = super().job_problems(job)
        if job.at("runtime", "metadata", "name") != job.name:
            problems.append(invalid(("runtime", "metadata", "name"), "it is the job's", "keep it"))
        message = "spec.trainer has another value, which takes precedence"
        step = "set it in the job spec"
        return problems + [invalid((*at, *field), message, step) for field in taken]

    def minimal(self, name: str, pod: Json) -> Job:
        """One node, with a TrainingRuntime of the same name."""
        named = [{**container, "name": NODE} for container in pod["containers"]]
        template = {"spec": {**pod, "containers": named, "restartPolicy": "Never"}}
        job = {"completionMode": "Indexed", "template": template}
        labels = {STEP: "trainer"}
        node = {"name": NODE, "template": {"metadata": {"labels": labels}, "spec": job}}
        about = {"apiVersion": self.api_version, "metadata": {"name": name}}
        of_runtime = {"template": {"spec": {"replicatedJobs": [node]}}}
        runtime = {**about, "kind": NAMESPACED, "spec": of_runtime}
        spec = {"runtimeRef": {"apiGroup": GROUP, "kind": NAMESPACED, "name": name}}
        return self.job({**about, "kind": self.kind, "spec": spec, "runtime": runtime})

    def refused(self, name: str, pod: Json) -> Job:
        """With two replicas of the replicated Job in the runtime.

        A TrainJob without its runtime may be refused by Kueue's webhook before Trainer's.
        """
        job = self.minimal(name, pod)
        (node,) = job.at(*SET, "replicatedJobs")
        node["replicas"] = 2
        return job


TRAINJOB: Final = TrainJobTarget()


def _without_pet(variables: dict[str, str]) -> dict[str, str]:
    return {name: value for name, value in variables.items() if not name.startswith("PET_")}

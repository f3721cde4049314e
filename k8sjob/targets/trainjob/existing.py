"""TrainJobs over a runtime that exists, which belongs to the administrators of the platform.

Such a job is rendered with a TrainingRuntime of its own as every other. Then the few fields of its
Pods that a TrainJob can say become one of its `runtimePatches`, which Trainer merges into the
runtime. What the job spec says beyond them is refused; what k8sjob only adds by itself is dropped.

Behavior: Kubeflow Trainer 2.3.0, pkg/apis/trainer/v1alpha1/trainjob_types.go, and
pkg/runtime/core/trainingruntime.go for the merge.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from k8sjob.contract import CONTAINER_NAMES
from k8sjob.findings import invalid
from k8sjob.kube.objects import Object, at_path, training
from k8sjob.targets.indexed.pods import NODE
from k8sjob.targets.trainjob.job import NAMESPACED, PATCHED_JOBS, PATCHED_PODS, SET, STEP, TrainJob

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

    from k8sjob.findings import FieldPath, Finding
    from k8sjob.kube.objects import Json
    from k8sjob.spec import JobSpec
    from k8sjob.targets.api import Job

MANAGER: Final = "k8sjob.dev/job"
"""The manager of the patch, which the webhook requires as DOMAIN/PATH."""
_CONTAINERS: Final = ("initContainers", "containers")
_PATCHED: Final = {
    "metadata": ("labels", "annotations"),
    "spec": (
        *("serviceAccountName", "volumes", *_CONTAINERS, "imagePullSecrets", "securityContext"),
        *("nodeSelector", "affinity", "tolerations", "schedulingGates"),
        "terminationGracePeriodSeconds",
    ),
}
"""The fields of a Pod template that a patch has (PodTemplatePatch, PodSpecPatch)."""
_PATCHED_CONTAINER: Final = ("name", "env", "volumeMounts", "securityContext")
"""The fields of a container that a patch has (ContainerPatch)."""
_TRAINER: Final = ("image", "command", "args", "resources")
"""The fields of the training container that spec.trainer has instead."""
_UNSAID: Final[tuple[FieldPath, ...]] = (
    *(("service_account_token",), ("topology_spread",), ("runtime_class",), ("host_network",)),
    *(("priority_class",), ("run", "env_from"), ("image", "pull_policy")),
    ("policy", "restart_policy"),
)
"""The fields of job.yaml that no TrainJob has."""


def unsaid(spec: JobSpec) -> Iterator[Finding]:
    """The fields of a job spec that a TrainJob cannot say over a runtime that exists."""
    if (runtime := spec.existing_runtime) is None:
        return
    if (runtime.kind, runtime.name) == (NAMESPACED, spec.name):
        message = f"the {NAMESPACED} of the job's name is the job's own"
        yield invalid(("runtime",), message, "give the job another name, or remove it")
    document = spec.model_dump()
    fields = [path for path in _UNSAID if at_path(document, *path)]
    fields += [("overlay", key) for key in spec.overlay if key == "runtime"]
    for path in _patch_of(spec.pod_template)[1]:
        container = at_path(spec.pod_template, *path[:-1])
        trains = path[:2] == ("spec", "containers") and path[3:] in {(key,) for key in _TRAINER}
        if not (trains and container.get("name") in (None, *CONTAINER_NAMES)):
            fields.append(("pod_template", *path))
    for field in fields:
        message = f"the {runtime.kind} {runtime.name} decides this"
        step = "remove it; or remove `runtime`, if you may create TrainingRuntimes"
        yield invalid(field, message, step)


def over_runtime(job: Job) -> Job:
    """The job with the fields of its Pods in runtimePatches, from one with a runtime of its own."""
    template, _ = _patch_of(job.at(*TrainJob.job_at, "template"))
    entry: Any = {"name": NODE, **_nested(template, PATCHED_PODS)}
    entry = {"manager": MANAGER, **_nested([entry], PATCHED_JOBS)}
    # Those of an overlay come later, and a later patch takes precedence.
    patches = [entry, *(job.spec.get("runtimePatches") or ())]
    trainer = job.part("spec", "trainer")
    # Where the job has no arguments, those of the runtime would follow its command.
    trainer = {"args": [], **trainer} if "command" in trainer else trainer
    spec = {**job.spec, "trainer": trainer, "runtimePatches": patches}
    return replace(job.own, raw={**job.raw, "spec": spec})


def _nested(value: Any, path: tuple[str, ...]) -> Json:
    return {path[0]: _nested(value, path[1:]) if path[1:] else value}


def _patch_of(template: Json) -> tuple[Json, list[FieldPath]]:
    """The part of a Pod template that a patch can have, and the paths of everything else."""
    beyond: list[FieldPath] = []

    def said(mapping: Any, fields: Collection[str], *at: str | int) -> Json:
        fitting = mapping if isinstance(mapping, dict) else {}
        beyond.extend((*at, key) for key in fitting if key not in fields)
        return {key: value for key, value in fitting.items() if key in fields}

    patch = said(template, _PATCHED)
    patch = {part: said(patch[part], _PATCHED[part], part) for part in patch}
    pod = patch.get("spec", {})
    for kind in (kind for kind in _CONTAINERS if isinstance(pod.get(kind), list)):
        several = enumerate(pod[kind])
        containers = [said(c, _PATCHED_CONTAINER, "spec", kind, index) for index, c in several]
        pod[kind] = [container for container in containers if container.keys() > {"name"}]
        if not pod[kind]:
            del pod[kind]
    return patch, beyond


def runtime_problems(job: Job, runtime: Json) -> Iterator[Finding]:
    """Why a job does not train over a runtime that exists, or not as its spec says."""
    called = f"the {runtime.get('kind')} {Object(runtime).name}"
    for message, step in _misfits(job, {"runtime": runtime}):
        yield invalid(("runtime",), f"{called} {message}", step or "choose another runtime")


def _misfits(job: Job, document: Json) -> Iterator[tuple[str, str]]:
    """What does not go with the job, as the end of a sentence, and the next step, if any."""
    policy = Object(document).part("runtime", "spec", "mlPolicy")
    if "torch" not in policy:
        kinds = ", ".join(policy.keys() - {"numNodes"}) or "none"
        yield f"has no mlPolicy for torch (it has {kinds}), which sets the ranks", ""
    network = at_path(document, *SET, "network") or {}
    if network.get("subdomain", job.name) != job.name or not network.get("enableDNSHostnames", 1):
        yield "has a network in which no Pod has the name that is MASTER_ADDR", ""
    replicated = at_path(document, *SET, "replicatedJobs") or ()
    node: Json = next((part for part in replicated if part.get("name") == NODE), {})
    pod = at_path(node, *PATCHED_PODS, "spec") or {}
    containers = [container for kind in _CONTAINERS for container in pod.get(kind) or ()]
    names = [str(container.get("name")) for container in containers]
    if Object(node.get("template") or {}).labels.get(STEP) != "trainer" or NODE not in names:
        labelled = f"the label {STEP}: trainer and a container `node`"
        yield f"has no replicated Job `node` with {labelled}", ""
        return
    seconds, asked = at_path(node, "template", "spec", "activeDeadlineSeconds"), job.active_deadline
    if seconds and asked and seconds < asked:
        yield f"ends a job after {seconds} s", f"set policy.active_deadline to at most {seconds}s"
    yield from _pod_misfits(pod, job.replicas[0].pod, names)


def _pod_misfits(pod: Json, asked: Json, names: list[str]) -> Iterator[tuple[str, str]]:
    """The same of the Pods of a runtime, which have containers of these names."""
    # Trainer merges resources, mounts, and the sources of volumes, of which an apiserver takes one.
    node, container = (training(spec.get("containers")) for spec in (pod, asked))
    limits, limits_asked = (Object(each).part("resources", "limits") for each in (node, container))
    for device in sorted(limits.keys() - limits_asked.keys()):
        if "/" in device:
            step = "set resources.gpus or resources.extended"
            yield f"asks for {device}, and the job does not", step
    mounts = {mount.get("mountPath"): mount for mount in node.get("volumeMounts") or ()}
    for mount in container.get("volumeMounts") or ():
        covered = mounts.get(mount["mountPath"], mount)
        fields = ", ".join(sorted(covered.keys() - mount.keys()))
        if fields and covered.get("name") != mount["name"]:
            step = "mount that of the job at another path"
            yield f"mounts a volume at {mount['mountPath']}, and its {fields} would stay", step
    volumes = {volume.get("name"): volume for volume in pod.get("volumes") or ()}
    for volume in asked.get("volumes") or ():
        if volume.keys() != volumes.get(volume.get("name"), volume).keys():
            step = "give that of the job another name; resources.shm: '0' leaves out dshm"
            yield f"has another volume {volume['name']!r}", step
    for each in (each for kind in _CONTAINERS for each in asked.get(kind) or ()):
        if each.get("name") not in names:
            yield f"has no container {each.get('name')!r}", f"change one of {', '.join(names)}"

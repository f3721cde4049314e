"""How a spec becomes an Indexed Job, also within the object of another kind.

A replica is a completion index, so all of them are alike; index 0 is the Master. The Job controller
injects only the index (as an annotation of the Pod), so the manifest has the variables that the
training operator would inject. A Pod that failed stays beside the one that takes its place.

Behavior: Kubernetes 1.31, pkg/controller/job.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, Final

from k8sjob.contract import CONTAINER_NAME, DEFAULT_PORT, JOB_UID_ENV, ExitCode, counted
from k8sjob.findings import invalid
from k8sjob.kube.api_resources import Controller
from k8sjob.kube.objects import PODSET_GROUP, Object, at_path
from k8sjob.targets.api import Companion, Target
from k8sjob.targets.field_types import type_problems
from k8sjob.targets.indexed.job import RANKS, BatchJob, Indexed
from k8sjob.targets.indexed.pods import INDEX, IndexedPods
from k8sjob.targets.shapes import ABOUT, JOB_SPEC

if TYPE_CHECKING:
    from collections.abc import Iterator

    from k8sjob.findings import FieldPath, Finding
    from k8sjob.kube.objects import Json
    from k8sjob.spec import JobSpec
    from k8sjob.targets.api import Job

_MAX_NAME: Final = 63
"""Characters of a label, as a Pod's name must be one (validateCreate of JobSet's webhook)."""
_SIGNALS: Final = (130, 134, 135, 137, 139)
"""128 + SIGINT, SIGABRT, SIGBUS, SIGKILL, SIGSEGV."""
RETRIED: Final = sorted({*_SIGNALS, ExitCode.PEER_LOST, ExitCode.HUNG, ExitCode.STOPPED})
"""Exit codes after which a replica starts again under the restart policy ExitCode: a rule of a Job
has at most 255 of them, and these are what the runtime and the kernel end a container with."""
_FIELDS: Final = {
    **dict.fromkeys(RANKS, f"metadata.annotations['{INDEX}']"),
    JOB_UID_ENV: "metadata.labels['batch.kubernetes.io/controller-uid']",
}
"""Fields of the Pod by the variables that have them; empty where Kubernetes sets no such label."""


class IndexedTarget(Target):
    """A kind whose object is an Indexed Job, or which a controller makes one of."""

    job_type: type[Indexed]
    shared_kind = True
    container_name: ClassVar[str] = CONTAINER_NAME
    """The name of the training container, as k8sjob renders it."""
    no_gang: ClassVar[str] = "no operator makes a PodGroup for it"
    """Why it has no gang scheduler."""

    def job(self, document: Json) -> Indexed:
        """The job from its Job.document, or from its object alone."""
        return self.job_type.of(self, document)

    def refusals(self, spec: JobSpec) -> Iterator[Finding]:
        """The fields that need differing replicas or an operator, and a name that is too long."""
        longest = f"{spec.name}{self.child_name}-{spec.nnodes - 1}-xxxxx"
        if self.child_name and len(longest) > _MAX_NAME:
            yield invalid(
                ("name",),
                f"{spec.name!r} has {len(spec.name)} characters, and target {self.name} calls Pods"
                f" {longest}, which must fit {_MAX_NAME}",
                f"use at most {_MAX_NAME - len(longest) + len(spec.name)}",
            )
        if spec.resources.master is not None:
            yield self._lacks(("resources", "master"), "all its Pods are identical")
        if spec.gang is not None:
            yield self._lacks(("gang",), self.no_gang)
        if spec.policy.clean_pod_policy != "Running":
            why = "Pods that run when it ends are always deleted, and those that have ended stay"
            yield self._lacks(("policy", "clean_pod_policy"), f"{why} until the job is deleted")
        if spec.policy.restart_policy == "Always":
            yield self._lacks(("policy", "restart_policy"), "its Pods have OnFailure or Never")
        if spec.kueue_queue and PODSET_GROUP in spec.annotations:
            why = "Kueue refuses a group of one Pod template"
            yield self._lacks(("annotations", PODSET_GROUP), why)

    def _lacks(self, path: FieldPath, why: str, having: str = "pytorchjob") -> Finding:
        step = f"remove it, or use target {having}"
        return invalid(path, f"target {self.name} does not have it: {why}", step)

    def remarks(self, spec: JobSpec) -> Iterator[Finding]:
        """That OnFailure loses the output of a job that fails."""
        if spec.policy.restart_policy == "OnFailure":
            yield invalid(
                ("policy", "restart_policy"),
                f"with OnFailure, a {self.kind} that fails deletes its pods, so why and logs cannot"
                " show the cause afterwards",
                "leave it out, and each restart gets a new pod, and failed pods stay",
            )

    def runtime_policy(self, spec: JobSpec) -> str:
        """ExitCode by default: a new Pod knows nothing of the restarts in the one before."""
        return spec.policy.restart_policy or "ExitCode"

    def values(self, spec: JobSpec) -> dict[str, Any]:
        """The template's values, beside those that all kinds have."""
        policy, nodes = spec.restart_policy, spec.nnodes
        # A Job that fails deletes the Pods that run, under OnFailure also the failing one with its
        # output and exit code. So by default each restart is a new Pod.
        in_pod = spec.policy.restart_policy == "OnFailure"
        restarts = 0 if policy == "Never" else spec.policy.max_restarts
        elastic = spec.replicas.elastic
        # One restart of the group is up to one of each node.
        limit = restarts * (elastic.max if elastic else nodes)
        partial = elastic and spec.kueue_queue and elastic.min < nodes
        return {
            "nodes": nodes,
            # So many Pods may fail; so many restarts of containers are too many, unless it is 0.
            "backoff_limit": limit + 1 if limit and in_pod else limit,
            "restart_policy": "OnFailure" if in_pod else "Never",
            # Pods that a suspension ends would count as failed; a Job under OnFailure has no rules.
            "stopped_code": None if in_pod else int(ExitCode.STOPPED),
            "new_pods": not in_pod and policy != "Never",
            "final_codes": _final_codes(spec),
            "port_name": "rendezvous",
            "injected": self._env(spec),
            "fields": {} if elastic else _FIELDS,
            # With so few nodes may Kueue start it: it changes parallelism and completions.
            "min_parallelism": str(elastic.min) if elastic and partial else None,
        }

    def _env(self, spec: JobSpec) -> dict[str, str]:
        """The variables that the training operator would inject, except the rank."""
        name, nodes, nproc = spec.name, spec.nnodes, spec.nproc_per_node
        address, port = f"{name}{self.child_name}-0.{name}", str(DEFAULT_PORT)
        if elastic := spec.replicas.elastic:
            return {
                "PYTHONUNBUFFERED": "1",
                "PET_NPROC_PER_NODE": str(nproc),
                "PET_RDZV_ENDPOINT": f"{address}:{port}",
                "PET_RDZV_BACKEND": "c10d",
                "PET_NNODES": f"{elastic.min}:{elastic.max}",
                "PET_MAX_RESTARTS": str(spec.policy.max_restarts),
            }
        return {
            "PYTHONUNBUFFERED": "1",
            **dict.fromkeys(("MASTER_PORT", "PET_MASTER_PORT"), port),
            **dict.fromkeys(("MASTER_ADDR", "PET_MASTER_ADDR"), address),
            "WORLD_SIZE": str(nodes * nproc),
            "PET_NPROC_PER_NODE": str(nproc),
            "PET_NNODES": str(nodes),
        }

    def basic_problems(self, manifest: Json) -> Iterator[Finding]:
        """Fields of another type, and no name."""
        problems = list(type_problems(self.typed(manifest)[1]))
        yield from problems
        if problems:
            return
        if not Object(manifest).name:
            step = "give it one, also in place of a generateName"
            yield invalid(("metadata", "name"), "the job has no name", step)
        if (version := manifest.get("apiVersion")) != self.api_version:
            message = f"{version!r} is not {self.api_version!r}, the only version that k8sjob knows"
            yield invalid(("apiVersion",), message, "convert the manifest to that")

    def problems(self, manifest: Json) -> list[Finding]:
        """Whether it is one Indexed Job with as many Pods as its environment says."""
        return list(self.basic_problems(manifest)) or self.job_problems(self.job(manifest))

    def job_problems(self, job: Indexed) -> list[Finding]:
        """The first problem of a job whose fields have the right types."""
        return list(self._job_problems(job))[:1]

    def _job_problems(self, job: Indexed) -> Iterator[Finding]:
        spec, nodes, job_at = job.job_spec, job.nodes, job.job_at
        if spec.get("completionMode") != "Indexed":
            message = "a replica's rank is its completion index"
            yield invalid((*job_at, "completionMode"), message, "use Indexed")
            return
        for key in ("completions", "parallelism"):
            if (count := spec.get(key, 1)) < 1:
                yield invalid((*job_at, key), f"{count} Pods cannot train", "use 1 or more")
        yield from _policy_problems(spec, job_at)
        jobs = job.replicated
        master = job.variable("MASTER_ADDR")
        domain = master.partition(".")[2]
        network = (job.at(*job_at[:-4], "network") if jobs and domain else {}) or {}
        named = network.get("enableDNSHostnames", True) and network.get("subdomain", domain)
        if named != domain:
            message = f"with this no Pod has the name {master}, which is MASTER_ADDR"
            yield invalid((*job_at[:-4], "network"), message, "remove it")
        for index, part in list(enumerate(jobs))[1:]:
            message = f"{part.get('name')!r} is another replicated Job, and all Pods of the job are"
            message += f" those of {jobs[0].get('name')!r}"
            yield invalid((*job_at[:-3], index), message, "change that one, or remove it")
        if jobs and (copies := jobs[0].get("replicas", 1)) != 1:
            message = f"{copies} Jobs of {nodes} Pods, and the ranks are those of one Job"
            step = "set replicas in the job spec instead"
            yield invalid((*job_at[:-2], "replicas"), message, step)
        world, each = job.variable("WORLD_SIZE"), job.nproc_per_node
        if world and each.isdecimal() and world != str(nodes * int(each)):
            message = (
                f"{nodes} Pods with {counted(int(each), 'rank')} each, but WORLD_SIZE is {world}"
            )
            step = "set replicas in the job spec instead"
            yield invalid(job.nodes_at or (*job_at, "completions"), message, step)
        if (at_once := spec.get("parallelism", 1)) != nodes:
            message = f"{at_once} of {nodes} Pods at a time, but ranks wait for each other"
            yield invalid((*job_at, "parallelism"), message, f"set it to {nodes}")

    def minimal(self, name: str, pod: Json) -> Job:
        """One completion."""
        template = {"spec": {"restartPolicy": "Never", **pod}}
        spec = {"completionMode": "Indexed", "completions": 1, "template": template}
        about = {"apiVersion": self.api_version, "kind": self.kind, "metadata": {"name": name}}
        return self.job({**about, "spec": self.around(spec)})

    def around(self, spec: Json) -> Json:
        """The smallest spec of the kind with this spec of its Job."""
        return spec


def _policy_problems(spec: Json, job_at: FieldPath) -> Iterator[Finding]:
    """A restart policy that no Job has, or none with a podFailurePolicy."""
    path = ("template", "spec", "restartPolicy")
    policy, at = at_path(spec, *path), (*job_at, *path)
    if policy not in {None, "OnFailure", "Never"}:
        message = f"{policy!r} is not for the Pods of a Job"
        yield invalid(at, message, "use OnFailure or Never")
    elif "podFailurePolicy" in spec and policy != "Never":
        step = "for restarts in the Pod set policy.restart_policy in the job spec to OnFailure"
        yield invalid(at, "a Job with a podFailurePolicy needs Never", step)


class BatchJobTarget(IndexedTarget):
    """batch/v1, kept by the Job controller of every cluster.

    Its Pods' names come from a headless Service of the job's name: NAME-0.NAME is the Master's.
    """

    name = "job"
    kind = "Job"
    api_version = "batch/v1"
    resource = "jobs"
    job_type = BatchJob
    pods = IndexedPods()
    controller = Controller(
        kind="Job",
        name="the Job controller",
        missing="every cluster has it: look at the apiserver",
        delay=600,  # from 10 s on, doubled for each Pod that has failed
        target="job",
    )
    file = "indexed-job.yaml"
    shapes = {**ABOUT, "spec": JOB_SPEC}  # noqa: RUF012 - as in Target
    companion = Companion("services", "service.yaml.j2", "its Pods find each other by that name")
    manager = "kubernetes.io/job-controller"


BATCH_JOB: Final = BatchJobTarget()


def _final_codes(spec: JobSpec) -> Json | None:
    """The exit codes that fail the job at once, as a rule has them; None: none does."""
    if spec.restart_policy == "ExitCode":
        return {"operator": "NotIn", "values": [int(code) for code in RETRIED]}
    if spec.policy.restart_policy is None and spec.uses_agent:
        return {"operator": "In", "values": [int(ExitCode.RESTARTS_SPENT)]}
    return None

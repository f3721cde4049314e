"""Indexed Jobs (batch/v1): the kind of job, and what the kinds that are made of one share.

A replica is a completion index, so all of them are alike; index 0 is the Master. The Job controller
injects only the index (as an annotation of the Pod), so the manifest has the variables that the
training operator would inject. A Pod that failed stays beside the one that takes its place.

Behavior: Kubernetes 1.31, pkg/controller/job.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, ClassVar, Final

from k8sjob.contract import CONTAINER_NAME, DEFAULT_PORT, JOB_UID_ENV, ExitCode, Role, counted
from k8sjob.findings import invalid
from k8sjob.kube.api_resources import Controller
from k8sjob.kube.objects import PODSET_GROUP, Object, at_path, true_conditions
from k8sjob.targets.api import (
    Companion,
    Job,
    JobState,
    RecordedEnd,
    RoleReplicas,
    Target,
    created_pods,
)
from k8sjob.targets.field_types import ABOUT, shape, type_problems

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator

    from k8sjob.findings import FieldPath, Finding
    from k8sjob.kube.objects import Json
    from k8sjob.spec import JobSpec

NODE: Final = "node"
"""The name of the replicated Job in a JobSet, as in Kubeflow Trainer."""
CHILD_NAME: Final = f"-{NODE}-0"
"""The suffix of the Job's name after the set's: the replicated Job and the replica's index."""
JOB_NAME: Final = "batch.kubernetes.io/job-name"
_MATCHED: Final = re.compile(
    r"Container \S+ for pod [^/\s]+/(?P<pod>\S+) failed with exit code (?P<code>[1-9]\d*) matching"
)
"""What the Job controller says of a Pod that a rule of podFailurePolicy fits."""
_INDEXES: Final = re.compile(r"[0-9]{1,9}")
_INDEX: Final = "batch.kubernetes.io/job-completion-index"
"""A label of the Pod since Kubernetes 1.28, and an annotation."""
_GROUP: Final = "jobset.sigs.k8s.io/replicatedjob-name"
_JOB_INDEX: Final = "jobset.sigs.k8s.io/job-index"
_ALL_JOBS: Final = "jobset.sigs.k8s.io/global-replicas"
"""Labels of the Pods of JobSets (constants.go): the replicated Job, the number of its Job, and how
many Jobs the set has."""
_MAX_NAME: Final = 63
"""Characters of a label, as a Pod's name must be one (validateCreate of JobSet's webhook)."""
_SIGNALS: Final = (130, 134, 135, 137, 139)
"""128 + SIGINT, SIGABRT, SIGBUS, SIGKILL, SIGSEGV."""
RETRIED: Final = sorted({*_SIGNALS, ExitCode.PEER_LOST, ExitCode.HUNG, ExitCode.STOPPED})
"""Exit codes after which a replica starts again under the restart policy ExitCode: a rule of a Job
has at most 255 of them, and these are what the runtime and the kernel end a container with."""
_RANKS: Final = ("RANK", "PET_NODE_RANK")
_FIELDS: Final = {
    **dict.fromkeys(_RANKS, f"metadata.annotations['{_INDEX}']"),
    JOB_UID_ENV: "metadata.labels['batch.kubernetes.io/controller-uid']",
}
"""Fields of the Pod by the variables that have them; empty where Kubernetes sets no such label."""
_ENDING: Final = ("SuccessCriteriaMet", "FailureTarget")
"""Conditions of a Job that has come to its end, and whose Pods are still being counted."""
_GENERATED: Final = ("controller-uid", "job-name")
"""How the labels are called that the apiserver fills in, perhaps with a prefix: those of the Pod
template, which are also the Job's where that has none of its own."""
_SPEC_FIELDS: Final = (
    "activeDeadlineSeconds backoffLimit backoffLimitPerIndex completionMode completions managedBy"
    " manualSelector maxFailedIndexes parallelism podFailurePolicy podReplacementPolicy selector"
    " successPolicy suspend template ttlSecondsAfterFinished"
)
"""The fields of batch/v1 JobSpec (k8s.io/api v0.34, batch/v1/types.go)."""


class Indexed(Target):
    """An Indexed Job, or what a controller makes one of."""

    shared_kind = True
    keeps_ended_pods = True
    creations: tuple[tuple[str, str, str], ...] = (
        ("FailedCreate", "SuccessfulCreate", "Created pod: "),
    )

    shapes = {**ABOUT, "spec": shape("Job")}  # noqa: RUF012 - as in Target
    job_at: ClassVar[tuple[str | int, ...]] = ("spec",)
    """The path of the Job's spec in the object of the kind."""
    nodes_at: ClassVar[tuple[str | int, ...]] = ()
    """The path of the numbers of Pods and of their ranks; empty: the completions of the Job."""
    complete: ClassVar[str] = "Complete"
    """The condition of a job that has succeeded."""
    container_name: ClassVar[str] = CONTAINER_NAME
    """The name of the training container, as k8sjob renders it."""
    no_gang: ClassVar[str] = "no operator makes a PodGroup for it"
    """Why it has no gang scheduler."""
    limits: ClassVar[tuple[str, ...]] = ("suspend", "ttlSecondsAfterFinished")
    """The fields of the spec on whose change the controller acts."""

    @property
    def child_name(self) -> str:
        """The suffix of its Indexed Job's name; empty if the object is one itself."""
        return self.made[-1].suffix if self.made else ""

    # --- from a spec to an object

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
        return list(self.basic_problems(manifest)) or self.job_problems(Job.of(self, manifest))

    def job_problems(self, job: Job) -> list[Finding]:
        """The first problem of a job whose fields have the right types."""
        return list(self._job_problems(job))[:1]

    def _job_problems(self, job: Job) -> Iterator[Finding]:
        spec, nodes = self._job(job), self._nodes(job)
        if spec.get("completionMode") != "Indexed":
            message = "a replica's rank is its completion index"
            yield invalid((*self.job_at, "completionMode"), message, "use Indexed")
            return
        for key in ("completions", "parallelism"):
            if (count := spec.get(key, 1)) < 1:
                yield invalid((*self.job_at, key), f"{count} Pods cannot train", "use 1 or more")
        yield from self._policy_problems(spec)
        jobs = job.at(*self.job_at[:-3]) if self.child_name else []
        master = self.variable(job, "MASTER_ADDR")
        domain = master.partition(".")[2]
        network = (job.at(*self.job_at[:-4], "network") if jobs and domain else {}) or {}
        named = network.get("enableDNSHostnames", True) and network.get("subdomain", domain)
        if named != domain:
            message = f"with this no Pod has the name {master}, which is MASTER_ADDR"
            yield invalid((*self.job_at[:-4], "network"), message, "remove it")
        for index, part in list(enumerate(jobs))[1:]:
            message = f"{part.get('name')!r} is another replicated Job, and all Pods of the job are"
            message += f" those of {jobs[0].get('name')!r}"
            yield invalid((*self.job_at[:-3], index), message, "change that one, or remove it")
        if jobs and (copies := jobs[0].get("replicas", 1)) != 1:
            message = f"{copies} Jobs of {nodes} Pods, and the ranks are those of one Job"
            step = "set replicas in the job spec instead"
            yield invalid((*self.job_at[:-2], "replicas"), message, step)
        world, each = self.variable(job, "WORLD_SIZE"), self.nproc_per_node(job)
        if world and each.isdecimal() and world != str(nodes * int(each)):
            message = (
                f"{nodes} Pods with {counted(int(each), 'rank')} each, but WORLD_SIZE is {world}"
            )
            step = "set replicas in the job spec instead"
            yield invalid(self.nodes_at or (*self.job_at, "completions"), message, step)
        if (at_once := spec.get("parallelism", 1)) != nodes:
            message = f"{at_once} of {nodes} Pods at a time, but ranks wait for each other"
            yield invalid((*self.job_at, "parallelism"), message, f"set it to {nodes}")

    def _policy_problems(self, spec: Json) -> Iterator[Finding]:
        """A restart policy that no Job has, or none with a podFailurePolicy."""
        path = ("template", "spec", "restartPolicy")
        policy, at = at_path(spec, *path), (*self.job_at, *path)
        if policy not in {None, "OnFailure", "Never"}:
            message = f"{policy!r} is not for the Pods of a Job"
            yield invalid(at, message, "use OnFailure or Never")
        elif "podFailurePolicy" in spec and policy != "Never":
            step = "for restarts in the Pod set policy.restart_policy in the job spec to OnFailure"
            yield invalid(at, "a Job with a podFailurePolicy needs Never", step)

    def injected_env(self, job: Job, role: Role | str, index: int) -> dict[str, str]:
        """The rank, from the completion index."""
        rank, nodes = index + (Role(role) is Role.WORKER), self._nodes(job)
        if not 0 <= rank < nodes or (Role(role) is Role.MASTER and index):
            raise ValueError(f"{job.name} has no {role}-{index}: it has {nodes} Pods")
        return {} if self.is_elastic(job) else dict.fromkeys(_RANKS, str(rank))

    def minimal(self, name: str, pod: Json) -> Job:
        """One completion."""
        template = {"spec": {"restartPolicy": "Never", **pod}}
        spec = {"completionMode": "Indexed", "completions": 1, "template": template}
        about = {"apiVersion": self.api_version, "kind": self.kind, "metadata": {"name": name}}
        return Job({**about, "spec": self.around(spec)}, self)

    def around(self, spec: Json) -> Json:
        """The smallest spec of the kind with this spec of its Job."""
        return spec

    # --- a job

    def _job(self, job: Job) -> Json:
        """The spec of its Indexed Job."""
        return job.at(*self._path(job)) or {}

    def _path(self, job: Job) -> tuple[str | int, ...]:
        """Where that is: the replicated Job `node`, or else the first one."""
        jobs_at = self.job_at[:-3]
        names = [part.get("name") for part in (job.at(*jobs_at) or () if self.child_name else ())]
        return (*jobs_at, names.index(NODE), *self.job_at[-2:]) if NODE in names else self.job_at

    def _nodes(self, job: Job) -> int:
        return int(self._job(job).get("completions") or 1)

    def _ranked(self, job: Job) -> str | None:
        """The suffix of the name of the Job whose Pods have ranks; None: none of several has.

        Others' sets may have several Jobs, and Trainer's have initializers beside the nodes. Their
        Pods have no ranks that k8sjob knows, so they are called as the Job controller calls them.
        """
        parts = job.at(*self.job_at[:-3]) or () if self.child_name else ()
        copies = [(str(part.get("name")), part.get("replicas", 1)) for part in parts]
        groups = [group for group, count in copies if count > 0]
        if sum(count for _, count in copies if count > 0) == 1:
            return f"-{groups[0]}-0"
        return self.child_name if NODE in groups or not groups else None

    def _has_job(self, job: Job, suffix: str) -> bool:
        """Whether one of its Jobs has a name with this suffix after the job's."""
        group, _, number = suffix.rpartition("-")
        return suffix == self._ranked(job) or any(
            0 <= int(number) - replicas.first < replicas.count // replicas.pods
            for replicas in self.replicas(job)
            if replicas.pods and group == f"-{replicas.role}" and _INDEXES.fullmatch(number)
        )

    def _asked(self, job: Job) -> int:
        """The Pods that _counted counts."""
        of_one = not self.child_name or job.child is not None
        return self._nodes(job) if of_one else sum(role.count for role in self.replicas(job))

    def _counted(self, job: Job) -> Json:
        """The status of its Indexed Job.

        Where that was not read, what the object says of its Jobs: of how many all Pods are ready,
        or any is there (calculateReplicatedJobStatuses of JobSet).
        """
        status = job.status
        if not self.child_name:
            return status
        if job.child is not None:
            return Object(job.child).status
        rows = status.get("replicatedJobsStatus") or status.get("jobsStatus") or []
        pods = {replicas.role: replicas.pods for replicas in self.replicas(job) if replicas.pods}
        every = [(row, pods.get(row.get("name"), self._nodes(job))) for row in rows]
        return {
            key: sum((row.get(key) or 0) * each for row, each in every)
            for key in ("active", "ready", "succeeded")
        }

    def restarts_all(self, event: Json) -> bool:
        """RestartJobSet and the like, as the JobSet controller's failure policies call them."""
        reason = str(event.get("reason", ""))
        return reason.startswith("Restart") and reason.endswith("FailurePolicyAction")

    def is_training(self, job: Job) -> bool:
        """Whether its Pods have indexes, and no other object has made it."""
        owners = job.owners
        indexed = self._job(job).get("completionMode") == "Indexed"
        return indexed and not any(owner.get("controller") for owner in owners)

    def replicas(self, job: Job) -> tuple[RoleReplicas, ...]:
        """spec.completions of one template, or of that of each Job; those with ranks come first."""

        def of(role: str, count: int, spec: Json, path: FieldPath, *jobs: int) -> RoleReplicas:
            template = Object(spec).part("template")
            policy = Object(template).spec.get("restartPolicy") or "Never"
            return RoleReplicas(role, count, (*path, "template"), template, policy, *jobs)

        replicas, ranked = list[RoleReplicas](), self._ranked(job)
        if ranked is not None:
            spec, path = self._job(job), self._path(job)
            roles = {Role.MASTER: 1, Role.WORKER: self._nodes(job) - 1}
            replicas += (of(role, count, spec, path) for role, count in roles.items() if count)
        for at, part in enumerate(job.at(*self.job_at[:-3]) or ()) if self.child_name else ():
            group, path = str(part.get("name")), (*self.job_at[:-3], at, "template", "spec")
            first = int(ranked == f"-{group}-0")
            if (copies := part.get("replicas", 1) - first) > 0:
                spec = Object(part).part("template", "spec")
                pods = spec.get("completions") or 1
                replicas.append(of(group, copies * pods, spec, path, pods, first))
        return tuple(replicas)

    def nproc_per_node(self, job: Job) -> str:
        """PET_NPROC_PER_NODE of the container."""
        return self.variable(job, "PET_NPROC_PER_NODE")

    def variable(self, job: Job, name: str) -> str:
        """The value of a variable of its containers; empty if none has it."""
        for container in Object(self._job(job)).part("template", "spec").get("containers") or ():
            for variable in container.get("env") or ():
                if variable.get("name") == name:
                    return str(variable.get("value") or "")
        return ""

    def is_elastic(self, job: Job) -> bool:
        """Whether PET_NNODES of the container has two bounds."""
        return ":" in self.variable(job, "PET_NNODES")

    def state(self, job: Job) -> tuple[JobState, Json]:
        """The state by the true conditions, or by the counts of Pods while there are none.

        Why it failed, the Job knows best.
        """
        status = self._counted(job)
        conditions, counted = true_conditions(job.status), true_conditions(status)
        ends = {
            "Failed": JobState.FAILED,
            self.complete: JobState.SUCCEEDED,
            "Suspended": JobState.SUSPENDED,
        }
        for kind, state in ends.items():
            if kind in conditions:
                failed = counted.get(kind) if state is JobState.FAILED else None
                return state, failed or conditions[kind]
        well = (status.get("ready") or 0) + (status.get("succeeded") or 0)
        if well == self._asked(job) or not counted.keys().isdisjoint(_ENDING):
            return JobState.RUNNING, {}
        if status.get("failed"):
            return JobState.RESTARTING, {}
        return (JobState.RUNNING if well else JobState.CREATED), {}

    def times(self, job: Job) -> tuple[str | None, str | None]:
        """status.startTime and completionTime; a failed job ends when its Pods do."""
        status = self._counted(job)
        failing = true_conditions(status).get("FailureTarget", {})
        ended = status.get("completionTime") or failing.get("lastTransitionTime")
        return status.get("startTime"), ended

    def counts(self, job: Job, state: JobState) -> dict[str, int]:
        """The present Pods; those that failed before are not counted."""
        status, asked = self._counted(job), self._asked(job)
        ready, active = status.get("ready") or 0, status.get("active") or 0
        counts = {"Running": ready, "Succeeded": status.get("succeeded") or 0}
        if state is JobState.FAILED:  # each that has failed was counted, those before it, too
            counts["Failed"] = min(status.get("failed") or 0, asked - sum(counts.values()))
        waiting = asked - sum(counts.values())
        if not state.finished and state not in (JobState.SUSPENDED, JobState.QUEUED):
            counts["Pending"] = max(waiting, active - ready, 0)
        return {phase: count for phase, count in counts.items() if count > 0}

    def active_deadline(self, job: Job) -> int | None:
        """That of the Job, activeDeadlineSeconds, which counts from the last resume."""
        deadline: int | None = self._job(job).get("activeDeadlineSeconds")
        return deadline

    def applies_at_once(self, path: tuple[str | int, ...]) -> bool:
        """Whether it is a limit or a time; the template and the completions are fixed."""
        return path[:1] == ("spec",) and path[1:2] in {(limit,) for limit in self.limits}

    # --- its Pods and Events

    def replica_of(self, pod: Json) -> str:
        """The replica by the Job controller's labels, which Pods of all these kinds have."""
        labels = Object(pod).labels
        index = labels.get(_INDEX) or Object(pod).part("metadata", "annotations").get(_INDEX, "")
        if JOB_NAME not in labels or not _INDEXES.fullmatch(index):
            return ""
        group = labels.get(_GROUP)
        suffix = f"-{group}-{labels.get(_JOB_INDEX)}" if group else ""
        ranked = suffix in {"", CHILD_NAME} or labels.get(_ALL_JOBS) == "1"
        return _replica(int(index)) if ranked else f"{suffix[1:]}-{int(index)}"

    def selector(self, name: str, replicas: Collection[str] = ()) -> str:
        """The selector by the controllers' labels."""
        ranks = sorted(
            {
                int(index) + (role == Role.WORKER.lower())
                for role, _, index in (replica.rpartition("-") for replica in replicas)
            }
        )
        more = f",{_INDEX} in ({','.join(map(str, ranks))})" if ranks else ""
        return f"{self.job_label}={name}{more}"

    def replica_named(self, job: Job, pod: str) -> str:
        """A Pod is called JOB-INDEX-SUFFIX, after the Indexed Job."""
        of_job = re.escape(job.name)
        match = re.fullmatch(rf"{of_job}(.*)-(\d{{1,9}})-[a-z0-9]{{5}}", pod)
        if match is None or not self._has_job(job, match[1]):
            return ""
        ranked = match[1] == self._ranked(job)
        return _replica(int(match[2])) if ranked else f"{match[1][1:]}-{int(match[2])}"

    def recorded_ends(self, job: Job, events: Iterable[Json]) -> Iterator[RecordedEnd]:
        """Exit codes in conditions of the Job, which stay, and in its Events."""
        conditions = true_conditions(self._counted(job)).values()
        records = [(condition, "lastTransitionTime") for condition in conditions]
        records += [(event, "lastTimestamp") for event in events]
        for record, time_key in records:
            match = _MATCHED.match(record.get("message") or "")
            if match and (replica := self.replica_named(job, match["pod"])):
                time = record.get(time_key) or ""
                yield RecordedEnd(replica, int(match["code"]), "", "", time, whole=False)

    def is_made(self, job: Job, kind: str, name: str) -> bool:
        """Also the Jobs of others' JobSets, which may be several, and of any name."""
        below = bool(self.child_name) and kind == "Job" and name.startswith(f"{job.name}-")
        below = below and self._has_job(job, name.removeprefix(job.name))
        return below or super().is_made(job, kind, name)

    def recreations(self, job: Job, replica: str, events: Iterable[Json]) -> int:
        """How many Pods of it were created after the first one."""
        created = [name for name, _ in created_pods(job, events) if name == replica]
        return max(len(created) - 1, 0)


class IndexedJob(Indexed):
    """batch/v1, kept by the Job controller of every cluster.

    Its Pods' names come from a headless Service of the job's name: NAME-0.NAME is the Master's.
    """

    name = "job"
    kind = "Job"
    api_version = "batch/v1"
    resource = "jobs"
    job_label = JOB_NAME
    controller = Controller(
        kind="Job",
        name="the Job controller",
        webhooks="",
        deployment="",
        namespace="",
        missing="every cluster has it: look at the apiserver",
        delay=600,  # from 10 s on, doubled for each Pod that has failed
        target="job",
    )
    template = "job.yaml.j2"
    file = "indexed-job.yaml"
    companion = Companion("services", "service.yaml.j2", "its Pods find each other by that name")
    kueue_framework = "batch/job"
    spec_fields = frozenset(_SPEC_FIELDS.split())

    manager = "kubernetes.io/job-controller"
    limits = (*Indexed.limits, "activeDeadlineSeconds", "backoffLimit")

    def written(self, job: Job) -> Json:
        """The spec without the selector and the labels by which the controller finds its Pods."""
        spec = dict(job.spec)
        if not spec.get("manualSelector"):
            spec = {k: v for k, v in spec.items() if k not in ("selector", "manualSelector")}
        template = dict(spec.get("template") or {})
        meta = dict(Object(template).part("metadata"))
        meta["labels"] = own_labels(template)
        return {**spec, "template": {**template, "metadata": meta}}


def own_labels(item: Json) -> Json:
    """The labels of a Job or of its Pod template without those that the apiserver fills in."""
    labels = Object(item).labels
    return {key: labels[key] for key in labels if key.rpartition("/")[2] not in _GENERATED}


def _final_codes(spec: JobSpec) -> Json | None:
    """The exit codes that fail the job at once, as a rule has them; None: none does."""
    if spec.restart_policy == "ExitCode":
        return {"operator": "NotIn", "values": [int(code) for code in RETRIED]}
    if spec.policy.restart_policy is None and spec.uses_agent:
        return {"operator": "In", "values": [int(ExitCode.RESTARTS_SPENT)]}
    return None


def _replica(index: int) -> str:
    return f"worker-{index - 1}" if index else "master-0"

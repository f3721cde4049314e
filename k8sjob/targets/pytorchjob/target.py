"""PyTorchJobs: reading one, its Pods and its Events; its template's values; those of others.

The operator removes a condition that changed and appends it again, so the last condition of the
list is not always the current one (after a resume it is Suspended with status False). The state
follows from conditions whose status is "True", whatever their order.
"""

from __future__ import annotations

import re
from collections import Counter
from typing import TYPE_CHECKING, Any, Final

from k8sjob.contract import CONTAINER_NAME, DEFAULT_PORT, Role
from k8sjob.findings import invalid
from k8sjob.kube.api_resources import Controller
from k8sjob.kube.objects import Object, at_path, training, true_conditions
from k8sjob.targets.api import (
    PORT_NAME,
    Authored,
    Job,
    JobState,
    LocalReason,
    RecordedEnd,
    RoleReplicas,
    Target,
)
from k8sjob.targets.field_types import type_problems
from k8sjob.targets.pytorchjob import operator
from k8sjob.targets.pytorchjob.operator import JOB_NAME, REPLICA_INDEX, REPLICA_TYPE

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Sequence

    from k8sjob.findings import Finding
    from k8sjob.kube.objects import Json
    from k8sjob.rules import Rules
    from k8sjob.spec import JobSpec

_PRECEDENCE: Final = (
    JobState.FAILED,
    JobState.SUCCEEDED,
    JobState.SUSPENDED,
    JobState.RESTARTING,
    JobState.RUNNING,
    JobState.CREATED,
)
_RETRYABLE_EXIT: Final = 128
"""The ExitCode policy starts a replica again for this exit code and those above."""
_REPLICA: Final = re.compile(r"(?:master|worker)-[0-9]{1,9}")
_FAILED: Final = re.compile(
    rf"Error pod (?P<pod>\S+) container {CONTAINER_NAME} exitCode: (?P<code>\d+)"
    r" terminated message: (?P<message>.*)",
    re.DOTALL,
)
_EXITED: Final = re.compile(r"Pod: [^\s.]++\.(?P<pod>\S++) exited with code (?P<code>[1-9]\d*)")
"""All that is left of a Pod that the ExitCode policy has recreated."""


class PyTorchJob(Target):
    """kubeflow.org/v1, kept by the training operator."""

    name = "pytorchjob"
    kind = operator.KIND
    api_version = operator.API_VERSION
    resource = "pytorchjobs"
    job_label = JOB_NAME
    controller = Controller(
        kind=operator.KIND,
        name="the training operator",
        webhooks="training-operator.kubeflow.org",
        deployment="control-plane=kubeflow-training-operator",
        namespace="kubeflow",
        missing="ask for it (v1.9)",
        init_image="alpine:3.10",
        image_flag="--pytorch-init-container-image",
        template_flag="--pytorch-init-container-template-file",
    )
    init_container = "init-pytorch"
    """It waits for the Master's name in front of the Workers."""
    creations = (
        ("FailedCreatePod", "SuccessfulCreatePod", "Created pod: "),
        ("FailedCreateService", "SuccessfulCreateService", "Created service: "),
    )
    template = "pytorchjob.yaml.j2"
    file = "pytorchjob.yaml"
    kueue_framework = "kubeflow.org/pytorchjob"
    service_each = True
    keeps_ended_pods = False
    spec_fields = frozenset(operator.known_fields("spec"))
    shapes = operator.JOB
    policy_at = ("spec", "runPolicy")
    sources = {  # noqa: RUF012 - as in Target
        "cleanPodPolicy": ("policy", "clean_pod_policy"),
        "backoffLimit": ("policy", "max_restarts"),
        "restartPolicy": ("policy", "restart_policy"),
        "minReplicas": ("replicas", "elastic"),
        "maxReplicas": ("replicas", "elastic"),
        "nprocPerNode": ("replicas", "nproc_per_node"),
    }
    manager = operator.MANAGER

    # --- from a spec to an object

    def refusals(self, spec: JobSpec) -> Iterator[Finding]:
        """A rendezvous that is not the agent's: it would leave at its start, or wait for ever."""
        policy = at_path(spec.overlay, "spec", "elasticPolicy")
        step = "remove it, or let torchrun start the job (run.command)"
        for field, pattern, words in (
            ("rdzvBackend", "c10d", "k8sjob's agent joins by c10d"),
            ("rdzvHost", rf"{spec.name}-worker-\d+(\..*)?", "k8sjob's agent joins at a pod"),
        ):
            value = at_path(policy, field)
            if spec.uses_agent and value is not None and not re.fullmatch(pattern, str(value)):
                path = ("overlay", "spec", "elasticPolicy", field)
                yield invalid(path, f"{value!r}: {words}", step)

    def values(self, spec: JobSpec) -> dict[str, Any]:
        """The template's values, beside those that all kinds have."""
        return {
            "nproc_per_node": str(spec.nproc_per_node),
            "backoff_limit": backoff_limit(spec),
            "gang_size": (spec.gang and spec.gang.min_available) or spec.nnodes,
            "injected": {},
            "fields": {},
        }

    def problems(self, manifest: Json) -> list[Finding]:
        """The problems that the operator's webhook reports, or else those of the CRD's types."""
        refused = operator.webhook_problems(manifest)
        return refused or list(type_problems(self.typed(manifest)[1]))

    @property
    def rules(self) -> Rules[Any]:
        """What the operator makes of the fields."""
        from k8sjob.targets.pytorchjob.lint import RULES  # noqa: PLC0415 - only for lint

        return RULES

    def injected_env(self, job: Job, role: Role | str, index: int) -> dict[str, str]:
        """The operator's variables, which win over those of the manifest."""
        return operator.operator_env(job.raw, role, index)

    def minimal(self, name: str, pod: Json) -> Job:
        """Only a Master."""
        master = {"replicas": 1, "template": {"spec": pod}}
        about = {"apiVersion": self.api_version, "kind": self.kind, "metadata": {"name": name}}
        spec = {"pytorchReplicaSpecs": {Role.MASTER.value: master}}
        return Job({**about, "spec": spec}, self)

    # --- a job

    def replicas(self, job: Job) -> tuple[RoleReplicas, ...]:
        """spec.pytorchReplicaSpecs; one replica where it gives no number."""
        specs = job.part("spec", "pytorchReplicaSpecs")
        return tuple(
            RoleReplicas(
                role,
                specs[role].get("replicas", 1),
                ("spec", "pytorchReplicaSpecs", role.value, "template"),
                Object(specs[role]).part("template"),
                specs[role].get("restartPolicy") or "OnFailure",
            )
            for role in Role
            if role in specs
        )

    def nproc_per_node(self, job: Job) -> str:
        """spec.nprocPerNode."""
        return str(job.spec.get("nprocPerNode") or "")

    def is_elastic(self, job: Job) -> bool:
        """Whether there is a spec.elasticPolicy."""
        return job.spec.get("elasticPolicy") is not None

    def state(self, job: Job) -> tuple[JobState, Json]:
        """The state by the true conditions, the last ones of a job's life first."""
        true = true_conditions(job.status)
        for state in _PRECEDENCE:
            if state in true:
                reason = true[state].get("reason")
                stopped = state is JobState.FAILED and reason == LocalReason.STOPPED
                return (JobState.STOPPED if stopped else state), true[state]
        return JobState.CREATED, {}

    def times(self, job: Job) -> tuple[str | None, str | None]:
        """status.startTime and completionTime, which a job lacks that ExitCode has failed."""
        status = job.status
        return status.get("startTime"), status.get("completionTime")

    def counts(self, job: Job, state: JobState) -> dict[str, int]:
        """status.replicaStatuses: Pods that run or have ended; the others are Pending."""
        phases: Counter[str] = Counter()
        for counts in job.part("status", "replicaStatuses").values():
            for phase, key in operator.COUNTED.items():
                phases[phase] += counts.get(key, 0)
        if state.finished and not self.keeps_pods(job):
            del phases["Running"]  # the operator has deleted them, and leaves its count as it was
        if state in (JobState.CREATED, JobState.RUNNING, JobState.RESTARTING):
            asked = sum(replicas.count for replicas in self.replicas(job))
            phases["Pending"] = max(asked - phases.total(), 0)
        return dict(+phases)

    def gang(self, job: Job) -> Json | None:
        """spec.runPolicy.schedulingPolicy."""
        gang: Json | None = _policy(job).get("schedulingPolicy")
        return gang

    def keeps_pods(self, job: Job) -> bool:
        """Whether spec.runPolicy.cleanPodPolicy is None, which is the default."""
        return _policy(job).get("cleanPodPolicy") not in {"Running", "All"}

    def applies_at_once(self, path: tuple[str | int, ...]) -> bool:
        """Whether it is in the run policy, except what the gang scheduler has read."""
        return path[:2] == ("spec", "runPolicy") and path[2:3] != ("schedulingPolicy",)

    # --- its Pods and Events

    def replica_of(self, pod: Json) -> str:
        """The replica by the operator's labels."""
        labels = Object(pod).labels
        name = f"{labels.get(REPLICA_TYPE)}-{labels.get(REPLICA_INDEX, 0)}"
        return name if _REPLICA.fullmatch(name) else ""

    def selector(self, name: str, replicas: Collection[str] = ()) -> str:
        """The selector by the operator's labels; it includes other replicas of the same indexes."""
        indexes = sorted({replica.rpartition("-")[2] for replica in replicas})
        more = f",{REPLICA_INDEX} in ({','.join(indexes)})" if indexes else ""
        return f"{JOB_NAME}={name}{more}"

    def replica_named(self, job: Job, pod: str) -> str:
        """A Pod is called JOB-master-0, JOB-worker-2."""
        match = re.fullmatch(rf"{re.escape(job.name)}-((?:master|worker)-\d+)", pod)
        return match[1] if match else ""

    def recorded_ends(self, job: Job, events: Iterable[Json]) -> Iterator[RecordedEnd]:
        """Pods that failed and still existed, then those of which only the exit code is known."""
        name, events = job.name, list(events)
        for pattern in (_FAILED, _EXITED):
            for event in events:
                if match := pattern.fullmatch(event.get("message", "")):
                    whole = pattern is _FAILED
                    yield RecordedEnd(
                        match["pod"].removeprefix(f"{name}-"),
                        int(match["code"]),
                        event.get("reason", "") if whole else "",
                        match["message"] if whole else "",
                        event.get("lastTimestamp") or "",
                        whole,
                    )

    def recreations(self, job: Job, replica: str, events: Iterable[Json]) -> int:
        """Under the ExitCode policy, which has no limit of its own."""
        policies = {
            f"{replicas.role.lower()}-": replicas.restart_policy for replicas in self.replicas(job)
        }  # the operator writes these Events under every policy
        if policies.get(replica.rstrip("0123456789")) != "ExitCode":
            return 0
        return sum(
            int(event.get("count") or 1)
            for event in events
            if (match := _EXITED.fullmatch(event.get("message", "")))
            and match["pod"] == f"{job.name}-{replica}"
            and int(match["code"]) >= _RETRYABLE_EXIT
        )


def backoff_limit(spec: JobSpec) -> int:
    """runPolicy.backoffLimit for `max_restarts` restarts of the whole group.

    The operator fails a job as soon as the restart counts of all containers of all its running
    pods, init containers included, add up to the limit. When one replica is lost its peers fail
    with it, so one restart of the group is up to one restart of each of its nodes:
    max_restarts x nodes of them must pass, and the next one may end the job. An elastic job may
    have grown to its upper bound. Without restarts the limit is 0, which also ends a job whose
    pod is lost before it ever ran.

    Returns:
        max_restarts x nodes + 1, or 0.
    """
    elastic = spec.replicas.elastic
    nodes = elastic.max if elastic else spec.nnodes
    restarts = spec.policy.max_restarts
    return restarts * nodes + 1 if restarts else 0


def _policy(job: Job) -> Json:
    return job.part("spec", "runPolicy")


class PyTorchJobReader:
    """The operator's defaults, and the job.yaml fields of a PyTorchJob; see ManifestReader."""

    target: Target = PyTorchJob()
    quantities: tuple[tuple[str, ...], ...] = (
        ("spec", "runPolicy", "schedulingPolicy", "minResources"),
    )

    def authored(self, job: Json, documents: Sequence[Json]) -> Authored:  # noqa: ARG002 - it has none
        """The job as it is."""
        return Authored(job, [], [])

    def problems(self, job: Json) -> Iterator[Finding]:
        """Why a cluster would refuse it, and whether it has replicas, which no cluster checks."""
        yield from self.target.problems(job)
        if Object(job).spec.get("pytorchReplicaSpecs") == {}:
            yield invalid(
                ("spec", "pytorchReplicaSpecs"), "no replicas", "add Master, Worker or both"
            )

    def settle(self, job: Json) -> None:
        """Fill in defaults as pkg/apis/kubeflow.org/v1/pytorch_defaults.go does."""
        spec = job.setdefault("spec", {})
        policy = spec.setdefault("runPolicy", {})
        policy.setdefault("cleanPodPolicy", "None")
        policy.setdefault("suspend", False)
        elastic = spec.get("elasticPolicy")
        if elastic is None or elastic.get("nProcPerNode") is None:
            spec.setdefault("nprocPerNode", "auto")
        replicas = spec.get("pytorchReplicaSpecs", {})
        for replica in replicas.values():
            replica.setdefault("replicas", 1)
            replica.setdefault("restartPolicy", "OnFailure")
            pod = at_path(replica, "template", "spec") or {}
            _default_port(training(pod.get("containers")))
            if deadline := policy.get("activeDeadlineSeconds"):
                # As k8sjob renders it: the operator's own deadline has no timer (see lint).
                pod.setdefault("activeDeadlineSeconds", deadline)
        if elastic is not None:  # the operator fills in an empty one, too
            _settle_elastic(elastic, at_path(replicas, Role.WORKER, "replicas"))

    def fields(self, job: Json) -> Json:
        """The fields from nprocPerNode, elasticPolicy and runPolicy."""
        spec = job["spec"]
        policy, replicas = spec["runPolicy"], spec["pytorchReplicaSpecs"]
        gang = policy.get("schedulingPolicy") or {}
        ours = {"min_available": gang.get("minAvailable"), "queue": gang.get("queue")}
        return {
            "replicas": _replicas(spec),
            "gang": ours if gang else None,
            "policy": {
                "restart_policy": next(iter(replicas.values()))["restartPolicy"],
                "max_restarts": _max_restarts(spec),
                "clean_pod_policy": policy["cleanPodPolicy"],
                "ttl_after_finished": policy.get("ttlSecondsAfterFinished"),
                "active_deadline": policy.get("activeDeadlineSeconds"),
                "suspend": policy["suspend"],
            },
        }


def _default_port(container: Json) -> None:
    ports = container.setdefault("ports", []) if container else []
    if PORT_NAME not in [at_path(port, "name") for port in ports]:
        ports.append({"name": PORT_NAME, "containerPort": DEFAULT_PORT})


def _settle_elastic(policy: Json, workers: Any) -> None:
    policy.setdefault("rdzvBackend", "c10d")
    least, most = policy.get("minReplicas"), policy.get("maxReplicas")
    for key, opposite in (("minReplicas", most), ("maxReplicas", least)):
        default = opposite if opposite is not None else workers
        if default is not None:
            policy.setdefault(key, default)


def _replicas(spec: Json) -> Json:
    replicas, elastic = spec["pytorchReplicaSpecs"], spec.get("elasticPolicy")
    nodes = sum(replica["replicas"] for replica in replicas.values())
    fields: Json = {"workers": nodes - 1}
    nproc = spec.get("nprocPerNode")
    if isinstance(nproc, str) and re.fullmatch("[0-9]{1,9}", nproc) and int(nproc) > 1:
        fields["nproc_per_node"] = int(nproc)
    if elastic and Role.MASTER not in replicas:
        fields["elastic"] = {"min": elastic.get("minReplicas"), "max": elastic.get("maxReplicas")}
    return fields


def _max_restarts(spec: Json) -> int | None:
    """The restarts of the whole group from which k8sjob would derive this backoffLimit."""
    limit = spec["runPolicy"].get("backoffLimit")
    elastic = spec.get("elasticPolicy") or {}
    if not isinstance(limit, int):
        return elastic.get("maxRestarts")
    nodes = sum(replica["replicas"] for replica in spec["pytorchReplicaSpecs"].values())
    most = elastic.get("maxReplicas") or nodes
    return max(1, (limit - 1) // most) if limit else 0

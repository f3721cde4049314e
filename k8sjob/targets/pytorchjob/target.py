"""PyTorchJob as a target: how to read one, its Pods and its Events, and what its template needs.

The operator removes a condition that changed and appends it again, so the last condition of the
list is not always the current one (after a resume it is Suspended with status False). The state
follows from conditions whose status is "True", whatever their order.
"""

from __future__ import annotations

import re
from collections import Counter
from typing import TYPE_CHECKING, Any, Final

from k8sjob.contract import CONTAINER_NAME, Role
from k8sjob.kube.objects import Object, true_conditions
from k8sjob.kube.resources import Controller
from k8sjob.targets.api import Companion, JobState, Made, RecordedEnd, Replicas
from k8sjob.targets.pytorchjob import operator
from k8sjob.targets.pytorchjob.operator import JOB_NAME, REPLICA_INDEX, REPLICA_TYPE
from k8sjob.targets.pytorchjob.schema import known_fields, typed
from k8sjob.targets.schema import type_problems

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator

    from k8sjob.errors import Problem
    from k8sjob.kube.objects import Json
    from k8sjob.spec import JobSpec
    from k8sjob.spec.values import TargetName
    from k8sjob.targets.schema import WrongType

STOPPED_REASON: Final = "PyTorchJobStopped"
"""Reason of the Failed condition of a job that its user stopped (this machine only)."""
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
_FAILED: Final = re.compile(
    rf"Error pod (?P<pod>\S+) container {CONTAINER_NAME} exitCode: (?P<code>\d+)"
    r" terminated message: (?P<message>.*)",
    re.DOTALL,
)
_EXITED: Final = re.compile(r"Pod: \S+?\.(?P<pod>\S+) exited with code (?P<code>[1-9]\d*)")
"""All that is left of a Pod that the ExitCode policy has recreated."""


class PyTorchJob:
    """kubeflow.org/v1, kept by the training operator; see k8sjob.targets.api.Target."""

    name: TargetName = "pytorchjob"
    kind = operator.KIND
    api_version = operator.API_VERSION
    resource = "pytorchjobs"
    job_label = JOB_NAME
    owner_label = ""
    controller = Controller(
        kind=operator.KIND,
        name="the training operator",
        webhooks="training-operator.kubeflow.org",
        deployment="control-plane=kubeflow-training-operator",
        namespace="kubeflow",
        missing="ask for it (v1.9)",
    )
    init_container = "init-pytorch"
    """It waits for the Master's name in front of the Workers."""
    creations: tuple[tuple[str, str, str], ...] = (
        ("FailedCreatePod", "SuccessfulCreatePod", "Created pod: "),
        ("FailedCreateService", "SuccessfulCreateService", "Created service: "),
    )
    template = "pytorchjob.yaml.j2"
    file = "pytorchjob.yaml"
    companion: Companion | None = None
    made: tuple[Made, ...] = ()
    refused_name = "0-"
    kueue_framework = "kubeflow.org/pytorchjob"
    kueue_patch: Json = {}  # noqa: RUF012 - as the Protocol has it
    service_each = True
    keeps_ended_pods = False
    shared_kind = False
    process_at: tuple[str, ...] = ()
    spec_fields = frozenset(known_fields("spec"))

    # --- from a spec to an object

    def refusals(self, spec: JobSpec) -> Iterator[Problem]:  # noqa: ARG002 - it has all fields
        """None: the spec was made after this kind."""
        yield from ()

    def values(self, spec: JobSpec) -> dict[str, Any]:
        """What the template needs beside the values that all kinds have."""
        return {
            "nproc_per_node": str(spec.nproc_per_node),
            "backoff_limit": backoff_limit(spec),
            "gang_size": (spec.gang and spec.gang.min_available) or spec.nnodes,
            "injected": {},
            "fields": {},
        }

    def typed(self, manifest: Json) -> tuple[Json, list[WrongType]]:
        """As the CRD types the fields."""
        return typed(manifest)

    def problems(self, manifest: Json) -> list[Problem]:
        """What the operator's webhook would say; where that takes it, what the CRD's types do."""
        refused = operator.webhook_problems(manifest)
        return refused or list(type_problems(self.typed(manifest)[1]))

    def injected_env(self, job: Json, role: Role | str, index: int) -> dict[str, str]:
        """The operator's variables, which win over those of the manifest."""
        return operator.operator_env(job, role, index)

    def minimal(self, name: str, pod: Json) -> Json:
        """A Master alone."""
        master = {"replicas": 1, "template": {"spec": pod}}
        return {
            "apiVersion": self.api_version,
            "kind": self.kind,
            "metadata": {"name": name},
            "spec": {"pytorchReplicaSpecs": {Role.MASTER.value: master}},
        }

    # --- a job

    def is_training(self, job: Json) -> bool:  # noqa: ARG002 - each is
        """Yes."""
        return True

    def replicas(self, job: Json) -> tuple[Replicas, ...]:
        """spec.pytorchReplicaSpecs; one replica where it gives no number."""
        specs = Object(job).part("spec", "pytorchReplicaSpecs")
        return tuple(
            Replicas(
                role,
                specs[role].get("replicas", 1),
                ("spec", "pytorchReplicaSpecs", role.value, "template"),
                Object(specs[role]).part("template"),
                specs[role].get("restartPolicy") or "OnFailure",
            )
            for role in Role
            if role in specs
        )

    def nproc_per_node(self, job: Json) -> str:
        """spec.nprocPerNode."""
        return str(Object(job).spec.get("nprocPerNode") or "")

    def is_elastic(self, job: Json) -> bool:
        """Whether there is a spec.elasticPolicy."""
        return Object(job).spec.get("elasticPolicy") is not None

    def state(self, job: Json) -> tuple[JobState, Json]:
        """By the true conditions, the last ones of a job's life first."""
        true = true_conditions(Object(job).status)
        for state in _PRECEDENCE:
            if state in true:
                stopped = state is JobState.FAILED and true[state].get("reason") == STOPPED_REASON
                return (JobState.STOPPED if stopped else state), true[state]
        return JobState.CREATED, {}

    def times(self, job: Json) -> tuple[str | None, str | None]:
        """status.startTime and completionTime, which a job lacks that ExitCode has failed."""
        status = Object(job).status
        return status.get("startTime"), status.get("completionTime")

    def counts(self, job: Json, state: JobState) -> dict[str, int]:
        """status.replicaStatuses: Pods that run or have ended; the others are Pending."""
        found: Counter[str] = Counter()
        for counts in Object(job).part("status", "replicaStatuses").values():
            for key, phase in (
                ("active", "Running"),
                ("succeeded", "Succeeded"),
                ("failed", "Failed"),
            ):
                found[phase] += counts.get(key, 0)
        if state.finished and not self.keeps_pods(job):
            del found["Running"]  # the operator has deleted them, and leaves its count as it was
        if state in (JobState.CREATED, JobState.RUNNING, JobState.RESTARTING):
            asked = sum(replicas.count for replicas in self.replicas(job))
            found["Pending"] = max(asked - found.total(), 0)
        return dict(+found)

    def is_suspended(self, job: Json) -> bool:
        """spec.runPolicy.suspend."""
        return bool(_policy(job).get("suspend"))

    def suspension(self, *, value: bool) -> Json:
        """The same."""
        return {"spec": {"runPolicy": {"suspend": value}}}

    def gang(self, job: Json) -> Json | None:
        """spec.runPolicy.schedulingPolicy."""
        found: Json | None = _policy(job).get("schedulingPolicy")
        return found

    def active_deadline(self, job: Json) -> int | None:
        """spec.runPolicy.activeDeadlineSeconds."""
        found: int | None = _policy(job).get("activeDeadlineSeconds")
        return found

    def keeps_pods(self, job: Json) -> bool:
        """Whether spec.runPolicy.cleanPodPolicy is None, which is the default."""
        return _policy(job).get("cleanPodPolicy") not in {"Running", "All"}

    def managed_by(self, job: Json) -> str:
        """spec.runPolicy.managedBy, where that is not the training operator."""
        manager = _policy(job).get("managedBy") or operator.MANAGER
        return "" if manager == operator.MANAGER else str(manager)

    def takes_at_once(self, path: tuple[str | int, ...]) -> bool:
        """The run policy, but for what the gang scheduler has read."""
        return path[:2] == ("spec", "runPolicy") and path[2:3] != ("schedulingPolicy",)

    def written(self, job: Json) -> Json:
        """The whole spec."""
        return Object(job).spec

    # --- its Pods and Events

    def replica_of(self, pod: Json) -> str:
        """By the operator's labels."""
        labels = Object(pod).labels
        role = labels.get(REPLICA_TYPE)
        return f"{role}-{labels.get(REPLICA_INDEX, 0)}" if role else ""

    def selector(self, name: str, replicas: Collection[str] = ()) -> str:
        """By the operator's labels; with other replicas of the same indexes."""
        indexes = sorted({replica.rpartition("-")[2] for replica in replicas})
        more = f",{REPLICA_INDEX} in ({','.join(indexes)})" if indexes else ""
        return f"{JOB_NAME}={name}{more}"

    def replica_named(self, job_name: str, pod: str) -> str:
        """A Pod is called JOB-master-0, JOB-worker-2."""
        found = re.fullmatch(rf"{re.escape(job_name)}-((?:master|worker)-\d+)", pod)
        return found[1] if found else ""

    def recorded_ends(self, job: Json, events: Iterable[Json]) -> Iterator[RecordedEnd]:
        """Pods that failed and lived on, then those of which only the exit code is known."""
        name, events = Object(job).name, list(events)
        for pattern in (_FAILED, _EXITED):
            for event in events:
                if found := pattern.fullmatch(event.get("message", "")):
                    whole = pattern is _FAILED
                    yield RecordedEnd(
                        found["pod"].removeprefix(f"{name}-"),
                        int(found["code"]),
                        event.get("reason", "") if whole else "",
                        found["message"] if whole else "",
                        event.get("lastTimestamp") or "",
                        whole,
                    )

    def recreations(self, job: Json, replica: str, events: Iterable[Json]) -> int:
        """Under the ExitCode policy, which has no limit of its own."""
        policies = {
            f"{one.role.lower()}-": one.restart_policy for one in self.replicas(job)
        }  # the operator writes these Events under every policy
        if policies.get(replica.rstrip("0123456789")) != "ExitCode":
            return 0
        return sum(
            int(event.get("count") or 1)
            for event in events
            if (found := _EXITED.fullmatch(event.get("message", "")))
            and found["pod"] == f"{Object(job).name}-{replica}"
            and int(found["code"]) >= _RETRYABLE_EXIT
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


def _policy(job: Json) -> Json:
    return Object(job).part("spec", "runPolicy")

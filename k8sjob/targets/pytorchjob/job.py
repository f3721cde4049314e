"""PyTorchJobs as an apiserver has them.

The operator removes a condition that changed and appends it again, so the last condition of the
list is not always the current one (after a resume it is Suspended with status False). The state
follows from conditions whose status is "True", whatever their order.
"""

from __future__ import annotations

import re
from collections import Counter
from typing import TYPE_CHECKING, Final

from k8sjob.contract import CONTAINER_NAME, Role
from k8sjob.kube.objects import Object, true_conditions
from k8sjob.targets.api import Job, JobState, LocalReason, RecordedEnd, RoleReplicas
from k8sjob.targets.pytorchjob import operator

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from k8sjob.kube.objects import Json

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
_FAILED: Final = (
    rf"Error pod (?P<pod>\S+) container {CONTAINER_NAME} exitCode: (?P<code>\d+)"
    r" terminated message: (?P<message>.*)"
)
_EXITED: Final = r"Pod: [^\s.]++\.(?P<pod>\S++) exited with code (?P<code>[1-9]\d*)"
"""All that is left of a Pod that the ExitCode policy has recreated."""


class PyTorchJob(Job):
    """A PyTorchJob of kubeflow.org/v1."""

    @property
    def replicas(self) -> tuple[RoleReplicas, ...]:
        """spec.pytorchReplicaSpecs; one replica where it gives no number."""
        specs = self.part("spec", "pytorchReplicaSpecs")
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

    @property
    def nproc_per_node(self) -> str:
        """spec.nprocPerNode."""
        return str(self.spec.get("nprocPerNode") or "")

    @property
    def is_elastic(self) -> bool:
        """Whether there is a spec.elasticPolicy."""
        return self.spec.get("elasticPolicy") is not None

    def state(self) -> tuple[JobState, Json]:
        """The state by the true conditions, the last ones of a job's life first."""
        true = true_conditions(self.status)
        for state in _PRECEDENCE:
            if state in true:
                reason = true[state].get("reason")
                stopped = state is JobState.FAILED and reason == LocalReason.STOPPED
                return (JobState.STOPPED if stopped else state), true[state]
        return JobState.CREATED, {}

    def times(self) -> tuple[str | None, str | None]:
        """status.startTime and completionTime, which a job lacks that ExitCode has failed."""
        status = self.status
        return status.get("startTime"), status.get("completionTime")

    def counts(self, state: JobState) -> dict[str, int]:
        """status.replicaStatuses: Pods that run or have ended; the others are Pending."""
        phases: Counter[str] = Counter()
        for counts in self.part("status", "replicaStatuses").values():
            for phase, key in operator.COUNTED.items():
                phases[phase] += counts.get(key, 0)
        if state.finished and not self.keeps_pods:
            del phases["Running"]  # the operator has deleted them, and leaves its count as it was
        if state in (JobState.CREATED, JobState.RUNNING, JobState.RESTARTING):
            asked = sum(replicas.count for replicas in self.replicas)
            phases["Pending"] = max(asked - phases.total(), 0)
        return dict(+phases)

    @property
    def gang(self) -> Json | None:
        """spec.runPolicy.schedulingPolicy."""
        gang: Json | None = self.part(*self.target.policy_at).get("schedulingPolicy")
        return gang

    @property
    def keeps_pods(self) -> bool:
        """Whether spec.runPolicy.cleanPodPolicy is None, which is the default."""
        return self.part(*self.target.policy_at).get("cleanPodPolicy") not in {"Running", "All"}

    def applies_at_once(self, path: tuple[str | int, ...]) -> bool:
        """Whether it is in the run policy, except what the gang scheduler has read."""
        return path[:2] == ("spec", "runPolicy") and path[2:3] != ("schedulingPolicy",)

    def injected_env(self, role: Role | str, index: int) -> dict[str, str]:
        """The operator's variables, which win over those of the manifest."""
        return operator.operator_env(self.raw, role, index)

    def replica_named(self, pod: str) -> str:
        """A Pod is called JOB-master-0, JOB-worker-2."""
        match = re.fullmatch(rf"{re.escape(self.name)}-((?:master|worker)-\d+)", pod)
        return match[1] if match else ""

    def recorded_ends(self, events: Iterable[Json]) -> Iterator[RecordedEnd]:
        """Pods that failed and still existed, then those of which only the exit code is known."""
        name, events = self.name, list(events)
        for pattern in (_FAILED, _EXITED):
            for event in events:
                if match := re.fullmatch(pattern, event.get("message", ""), re.DOTALL):
                    whole = pattern is _FAILED
                    yield RecordedEnd(
                        match["pod"].removeprefix(f"{name}-"),
                        int(match["code"]),
                        event.get("reason", "") if whole else "",
                        match["message"] if whole else "",
                        event.get("lastTimestamp") or "",
                        whole,
                    )

    def recreations(self, replica: str, events: Iterable[Json]) -> int:
        """Under the ExitCode policy, which has no limit of its own."""
        policies = {
            f"{replicas.role.lower()}-": replicas.restart_policy for replicas in self.replicas
        }  # the operator writes these Events under every policy
        if policies.get(replica.rstrip("0123456789")) != "ExitCode":
            return 0
        return sum(
            int(event.get("count") or 1)
            for event in events
            if (match := re.fullmatch(_EXITED, event.get("message", "")))
            and match["pod"] == f"{self.name}-{replica}"
            and int(match["code"]) >= _RETRYABLE_EXIT
        )

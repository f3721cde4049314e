"""Indexed Jobs as an apiserver has them, alone or made of the object of another kind."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, ClassVar, Final

from k8sjob.contract import Role
from k8sjob.kube.gangs import GANG_QUEUE, VOLCANO_SCHEDULER
from k8sjob.kube.objects import Object, true_conditions
from k8sjob.targets.api import Job, JobState, RecordedEnd, RoleReplicas
from k8sjob.targets.indexed.pods import NODE, NUMBER, replica_at

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from k8sjob.findings import FieldPath
    from k8sjob.kube.objects import Json

RANKS: Final = ("RANK", "PET_NODE_RANK")
_MATCHED: Final = (
    r"Container \S+ for pod [^/\s]+/(?P<pod>\S+) failed with exit code (?P<code>[1-9]\d*) matching"
)
"""What the Job controller says of a Pod that a rule of podFailurePolicy fits."""
_ENDING: Final = ("SuccessCriteriaMet", "FailureTarget")
"""Conditions of a Job that has come to its end, and whose Pods are still being counted."""
_GENERATED: Final = ("controller-uid", "job-name")
"""How the labels are called that the apiserver fills in, perhaps with a prefix: those of the Pod
template, which are also the Job's where that has none of its own."""


class Indexed(Job):
    """A job whose Pods are those of an Indexed Job."""

    job_at: ClassVar[tuple[str | int, ...]] = ("spec",)
    """The path of the Job's spec in the object of the kind."""
    nodes_at: ClassVar[tuple[str | int, ...]] = ()
    """The path of the numbers of Pods and of their ranks; empty: the completions of the Job."""
    complete: ClassVar[str] = "Complete"
    """The condition of a job that has succeeded."""
    limits: ClassVar[tuple[str, ...]] = ("suspend", "ttlSecondsAfterFinished")
    """The fields of the spec on whose change the controller acts."""

    @property
    def job_spec(self) -> Json:
        """The spec of its Indexed Job."""
        return self.at(*self._job_path) or {}

    @property
    def _job_path(self) -> tuple[str | int, ...]:
        """Where that is: the replicated Job `node`, or else the first one."""
        names, jobs_at = [part.get("name") for part in self.replicated], self.job_at[:-3]
        return (*jobs_at, names.index(NODE), *self.job_at[-2:]) if NODE in names else self.job_at

    @property
    def replicated(self) -> list[Json]:
        """The replicated Jobs of a set; none: the object is a Job itself."""
        return (self.at(*self.job_at[:-3]) or []) if self.target.child_name else []

    @property
    def nodes(self) -> int:
        """The Pods of its Indexed Job."""
        return int(self.job_spec.get("completions") or 1)

    @property
    def _ranked(self) -> str | None:
        """The suffix of the name of the Job whose Pods have ranks; None: none of several has.

        Others' sets may have several Jobs, and Trainer's have initializers beside the nodes. Their
        Pods have no ranks that k8sjob knows, so they are called as the Job controller calls them.
        """
        copies = [(str(part.get("name")), part.get("replicas", 1)) for part in self.replicated]
        groups = [group for group, count in copies if count > 0]
        if sum(count for _, count in copies if count > 0) == 1:
            return f"-{groups[0]}-0"
        return self.target.child_name if NODE in groups or not groups else None

    def _has_job(self, suffix: str) -> bool:
        """Whether one of its Jobs has a name with this suffix after the job's."""
        group, _, number = suffix.rpartition("-")
        return suffix == self._ranked or any(
            0 <= int(number) - replicas.first < replicas.count // replicas.pods
            for replicas in self.replicas
            if replicas.pods and group == f"-{replicas.role}" and re.fullmatch(NUMBER, number)
        )

    @property
    def _asked(self) -> int:
        """The Pods that _counted counts."""
        of_one = not self.target.child_name or self.child is not None
        return self.nodes if of_one else sum(role.count for role in self.replicas)

    @property
    def _counted(self) -> Json:
        """The status of its Indexed Job.

        Where that was not read, what the object says of its Jobs: of how many all Pods are ready,
        or any is there (calculateReplicatedJobStatuses of JobSet).
        """
        status = self.status
        if not self.target.child_name:
            return status
        if self.child is not None:
            return Object(self.child).status
        rows = status.get("replicatedJobsStatus") or status.get("jobsStatus") or []
        pods = {replicas.role: replicas.pods for replicas in self.replicas if replicas.pods}
        sized_rows = [(row, pods.get(row.get("name"), self.nodes)) for row in rows]
        return {
            key: sum((row.get(key) or 0) * pods_per_job for row, pods_per_job in sized_rows)
            for key in ("active", "ready", "succeeded")
        }

    @property
    def is_training(self) -> bool:
        """Whether its Pods have indexes, and no other object has made it."""
        owners = self.owners
        indexed = self.job_spec.get("completionMode") == "Indexed"
        return indexed and not any(owner.get("controller") for owner in owners)

    @property
    def replicas(self) -> tuple[RoleReplicas, ...]:
        """spec.completions of one template, or of that of each Job; those with ranks come first."""

        def of(role: str, count: int, spec: Json, path: FieldPath, *jobs: int) -> RoleReplicas:
            template = Object(spec).part("template")
            policy = Object(template).spec.get("restartPolicy") or "Never"
            return RoleReplicas(role, count, (*path, "template"), template, policy, *jobs)

        replicas, ranked = list[RoleReplicas](), self._ranked
        if ranked is not None:
            spec, path = self.job_spec, self._job_path
            roles = {Role.MASTER: 1, Role.WORKER: self.nodes - 1}
            replicas += (of(role, count, spec, path) for role, count in roles.items() if count)
        for at, part in enumerate(self.replicated):
            group, path = str(part.get("name")), (*self.job_at[:-3], at, "template", "spec")
            first = int(ranked == f"-{group}-0")
            if (copies := part.get("replicas", 1) - first) > 0:
                spec = Object(part).part("template", "spec")
                pods = spec.get("completions") or 1
                replicas.append(of(group, copies * pods, spec, path, pods, first))
        return tuple(replicas)

    @property
    def nproc_per_node(self) -> str:
        """PET_NPROC_PER_NODE of the container."""
        return self.variable("PET_NPROC_PER_NODE")

    def variable(self, name: str) -> str:
        """The value of a variable of its containers; empty if none has it."""
        for container in Object(self.job_spec).part("template", "spec").get("containers") or ():
            for variable in container.get("env") or ():
                if variable.get("name") == name:
                    return str(variable.get("value") or "")
        return ""

    @property
    def is_elastic(self) -> bool:
        """Whether PET_NNODES of the container has two bounds."""
        return ":" in self.variable("PET_NNODES")

    def state(self) -> tuple[JobState, Json]:
        """The state by the true conditions, or by the counts of Pods while there are none.

        Why it failed, the Job knows best.
        """
        status = self._counted
        conditions, counted = true_conditions(self.status), true_conditions(status)
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
        # At its end the Job still counts its Pods: fewer are ready, and none is restarted.
        if well == self._asked or not counted.keys().isdisjoint(_ENDING):
            return JobState.RUNNING, {}
        # A Pod that failed stays, and another takes its place.
        if status.get("failed"):
            return JobState.RESTARTING, {}
        return (JobState.RUNNING if well else JobState.CREATED), {}

    def times(self) -> tuple[str | None, str | None]:
        """status.startTime and completionTime; a failed job ends when its Pods do."""
        status = self._counted
        failing = true_conditions(status).get("FailureTarget", {})
        ended = status.get("completionTime") or failing.get("lastTransitionTime")
        return status.get("startTime"), ended

    def counts(self, state: JobState) -> dict[str, int]:
        """The present Pods; those that failed before are not counted."""
        status, asked = self._counted, self._asked
        ready, active = status.get("ready") or 0, status.get("active") or 0
        counts = {"Running": ready, "Succeeded": status.get("succeeded") or 0}
        if state is JobState.FAILED:  # each that has failed was counted, those before it, too
            counts["Failed"] = min(status.get("failed") or 0, asked - sum(counts.values()))
        waiting = asked - sum(counts.values())
        if not state.finished and state not in (JobState.SUSPENDED, JobState.QUEUED):
            counts["Pending"] = max(waiting, active - ready, 0)
        return {phase: count for phase, count in counts.items() if count > 0}

    @property
    def gang(self) -> Json | None:
        """The Queue in an annotation of Pods that Volcano schedules; it makes their PodGroup."""
        template = Object(Object(self.job_spec).part("template"))
        if template.spec.get("schedulerName") != VOLCANO_SCHEDULER:
            return None
        return {"queue": template.annotations.get(GANG_QUEUE)}

    @property
    def active_deadline(self) -> int | None:
        """That of the Job, activeDeadlineSeconds, which counts from the last resume."""
        deadline: int | None = self.job_spec.get("activeDeadlineSeconds")
        return deadline

    def applies_at_once(self, path: tuple[str | int, ...]) -> bool:
        """Whether it is a limit or a time; the template and the completions are fixed."""
        return path[:1] == ("spec",) and path[1:2] in {(limit,) for limit in self.limits}

    def injected_env(self, role: Role | str, index: int) -> dict[str, str]:
        """The rank, from the completion index."""
        rank, nodes = index + (Role(role) is Role.WORKER), self.nodes
        if not 0 <= rank < nodes or (Role(role) is Role.MASTER and index):
            raise ValueError(f"{self.name} has no {role}-{index}: it has {nodes} Pods")
        return {} if self.is_elastic else dict.fromkeys(RANKS, str(rank))

    def replica_named(self, pod: str) -> str:
        """A Pod is called JOB-INDEX-SUFFIX, after the Indexed Job."""
        of_job = re.escape(self.name)
        match = re.fullmatch(rf"{of_job}(.*)-(\d{{1,9}})-[a-z0-9]{{5}}", pod)
        if match is None or not self._has_job(match[1]):
            return ""
        ranked = match[1] == self._ranked
        return replica_at(int(match[2])) if ranked else f"{match[1][1:]}-{int(match[2])}"

    def recorded_ends(self, events: Iterable[Json]) -> Iterator[RecordedEnd]:
        """Exit codes in conditions of the Job, which stay, and in its Events."""
        conditions = true_conditions(self._counted).values()
        records = [(condition, "lastTransitionTime") for condition in conditions]
        records += [(event, "lastTimestamp") for event in events]
        for record, time_key in records:
            match = re.match(_MATCHED, record.get("message") or "")
            if match and (replica := self.replica_named(match["pod"])):
                time = record.get(time_key) or ""
                yield RecordedEnd(replica, int(match["code"]), "", "", time, whole=False)

    def has_below(self, kind: str, name: str) -> bool:
        """Also the Jobs of others' JobSets, which may be several, and of any name."""
        below = bool(self.target.child_name) and kind == "Job" and name.startswith(f"{self.name}-")
        below = below and self._has_job(name.removeprefix(self.name))
        return below or super().has_below(kind, name)

    def recreations(self, replica: str, events: Iterable[Json]) -> int:
        """How many Pods of it were created after the first one."""
        created = [name for name, _ in self.created_pods(events) if name == replica]
        return max(len(created) - 1, 0)


class BatchJob(Indexed):
    """An Indexed Job of batch/v1 itself."""

    limits = (*Indexed.limits, "activeDeadlineSeconds", "backoffLimit")

    @property
    def written_spec(self) -> Json:
        """The spec without the selector and the labels by which the controller finds its Pods."""
        spec = dict(self.spec)
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

"""A kind of job in three parts: a Target renders one, a Job reads it, Pods know its Pods. Pure.

A job is read only from its objects. Whatever the kind, replica 0 of a job is "master-0" and
the others are "worker-0" and on, in the order of their ranks. Only Pods of others' JobSets that
have no such order are called after their Jobs: "leader-0-0", "actors-3-0".
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol, Self

from k8sjob.kube.api_resources import path
from k8sjob.kube.objects import Object, Pod, at_path
from k8sjob.targets.field_types import fit

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
    from pathlib import Path

    from k8sjob.contract import Role
    from k8sjob.findings import Finding
    from k8sjob.kube.api_resources import Controller
    from k8sjob.kube.objects import Json
    from k8sjob.rules import Rules
    from k8sjob.spec import JobSpec
    from k8sjob.spec.values import TargetName
    from k8sjob.targets.field_types import WrongType

PORT_NAME: Final = "pytorchjob-port"
"""The container port whose number the operator injects as MASTER_PORT."""
CHILD: Final = "child"
"""The key of Job.child in Job.document, which no manifest has."""


class JobState(StrEnum):
    """The state of a job; see docs/reference/states.md."""

    CREATED = "Created"
    """Accepted; the Master does not run yet."""
    RUNNING = "Running"
    RESTARTING = "Restarting"
    """A failed replica is being recreated."""
    SUSPENDED = "Suspended"
    """Its replicas are stopped until `resume`."""
    QUEUED = "Queued"
    """Kueue keeps it suspended until its queue has room, or Volcano has not admitted its gang."""
    DELETING = "Deleting"
    """Its deletion was requested, and its pods or a finalizer still keep it."""
    SUCCEEDED = "Succeeded"
    FAILED = "Failed"
    STOPPED = "Stopped"
    """Ended on request (Ctrl-C), or because the process that had started it went away."""
    DELETED = "Deleted"
    """It no longer exists."""

    @property
    def finished(self) -> bool:
        """Whether nothing will change any more."""
        return self in _FINISHED

    @property
    def exit_code(self) -> int:
        """The exit code of a command that waited for the job: 0, 100, 101 or 103."""
        return _EXIT_CODES.get(self, 101)


_FINISHED: Final = frozenset(
    {JobState.SUCCEEDED, JobState.FAILED, JobState.STOPPED, JobState.DELETED}
)
_EXIT_CODES: Final = {
    JobState.SUCCEEDED: 0,
    JobState.FAILED: 100,
    JobState.STOPPED: 103,
    JobState.SUSPENDED: 103,
    JobState.DELETING: 103,
    JobState.DELETED: 103,
}


class LocalReason(StrEnum):
    """The reasons of a Failed condition that only the back end of this machine writes."""

    STOPPED = "PyTorchJobStopped"
    """Stopped on request."""
    SUPERVISOR_GONE = "PyTorchJobSupervisorGone"
    """The supervisor was killed, and the replicas ended with it."""
    SUPERVISOR_FAILED = "PyTorchJobSupervisorFailed"
    """The supervisor had an error, and the replicas ended with it."""
    STATE_DAMAGED = "PyTorchJobStateDamaged"
    """The job's state cannot be read."""


@dataclass(frozen=True, slots=True)
class RoleReplicas:
    """The replicas of one role, as a job asks for them.

    Attributes:
        role: a Role, or the name of Jobs of others' whose Pods have no ranks, as "actors".
        count: how many; a job may ask for billions.
        path: where their Pod template is in the job.
        template: that template.
        restart_policy: what happens when one of them fails: Never, OnFailure, Always, ExitCode.
        pods: how many of them each of these Jobs has; 0 for a Role.
        first: the number of the first of these Jobs.
    """

    role: str
    count: int
    path: tuple[str | int, ...]
    template: Json
    restart_policy: str
    pods: int = 0
    first: int = 0

    @property
    def pod(self) -> Json:
        """The spec of their Pods."""
        return Object(self.template).spec

    @property
    def main(self) -> Json:
        """Their training container; see k8sjob.kube.objects.Pod."""
        return Pod(self.template).main

    def name(self, index: int) -> str:
        """The name of one of them: "worker-2", or "actors-3-0"."""
        if not self.pods:
            return f"{self.role.lower()}-{index}"
        job, pod = divmod(index, self.pods)
        return f"{self.role.lower()}-{self.first + job}-{pod}"

    def __contains__(self, name: str) -> bool:
        """Whether a replica of this name is one of them."""
        head, _, last = name.rpartition("-")
        number = head.rpartition("-")[2] if self.pods else "0"
        if not (number.isdecimal() and last.isdecimal()):
            return False
        index = (int(number) - self.first) * self.pods + int(last) if self.pods else int(last)
        return 0 <= index < self.count and self.name(index) == name


class Companion(NamedTuple):
    """An object beside a job that its Pods need; it has the job's name.

    Attributes:
        resource: the plural, in paths.
        template: the file in templates/ that lays it out.
        api_version: of the object; empty: Kubernetes' own.
        use: what the job needs it for, in a sentence.
        key: its key in Job.document, since it says something of the job; empty: it has none.
        missed: what webhooks and the controller say of a job whose companion is not there.
        shared: the resource of those of the whole cluster, which a job may name in its place.
    """

    resource: str
    template: str
    use: str
    api_version: str = ""
    key: str = ""
    missed: tuple[str, ...] = ()
    shared: str = ""

    def path(self, namespace: str = "", name: str = "") -> str:
        """The path of the companion of a job, or of all; see k8sjob.kube.api_resources.path."""
        return path(self.resource, namespace, name, api_version=self.api_version)

    def is_missed(self, text: str) -> bool:
        """Whether a message says that the companion is missing."""
        return any(phrase in text for phrase in self.missed)


class Level(NamedTuple):
    """An object that a controller makes of a job; `suffix` follows the job's name in its own."""

    kind: str
    resource: str
    api_version: str
    suffix: str = ""

    def path(self, namespace: str = "", job: str = "") -> str:
        """The path of the one that is made of a job, or of all."""
        name = job and f"{job}{self.suffix}"
        return path(self.resource, namespace, name, api_version=self.api_version)


@dataclass(frozen=True, slots=True)
class Job(Object, ABC):
    """A job, and the objects beside it that say more of it; each kind has a class of its own.

    Attributes:
        raw: its own object, as an apiserver has it.
        target: its kind.
        companion: the object of Target.companion, or another that takes its place (see
            shares_companion); None: there is none, or it was not read.
        child: the last object of Target.levels; None: there is none, or it was not read.
    """

    target: Target
    companion: Json | None = None
    child: Json | None = None

    @classmethod
    def of(cls, target: Target, document: Json) -> Self:
        """The job of a kind from its `document`."""
        raw, key = dict(document), target.companion.key if target.companion else ""
        child = raw.pop(CHILD, None)
        return cls(raw, target, raw.pop(key, None) if key else None, child)

    @property
    def document(self) -> Json:
        """The job as one mapping, for overlays, diffs and records, and for the paths in messages.

        The companion is there under its key, if it has one, and the child under CHILD.
        """
        key = self.target.companion.key if self.target.companion else ""
        beside = {key: self.companion, CHILD: self.child}
        return {**self.raw, **{k: v for k, v in beside.items() if k and v is not None}}

    def with_document(self, document: Json) -> Job:
        """The job as its document has become; a companion that is not in it stays."""
        job = self.of(self.target, document)
        return job if job.companion is not None else replace(job, companion=self.companion)

    @property
    def objects(self) -> list[Json]:
        """What is created for the job in a cluster, in this order: the companion, the job."""
        companion = self.own.companion
        return [self.raw] if companion is None else [companion, self.raw]

    @property
    def shares_companion(self) -> bool:
        """Whether its companion is an object that was there before, and may be others' too."""
        return False

    @property
    def own(self) -> Self:
        """The job without a companion that it shares."""
        return replace(self, companion=None) if self.shares_companion else self

    def companion_path(self, namespace: str) -> str:
        """The path of its companion, of a job in this namespace; empty: the kind has none."""
        companion = self.target.companion
        return companion.path(namespace, self.name) if companion else ""

    def at(self, *path: str | int) -> Any:
        """The value at a path of its document; None if there is none."""
        return at_path(self.document, *path)

    @property
    def argument(self) -> str:
        """What a command line calls it within its namespace."""
        return self.name

    # --- what it asks for

    @property
    def is_training(self) -> bool:
        """Whether it is a training job, whoever has made it: others' objects need not be one."""
        return True

    @property
    @abstractmethod
    def replicas(self) -> tuple[RoleReplicas, ...]:
        """The replicas that it asks for, the Master first."""

    @property
    @abstractmethod
    def nproc_per_node(self) -> str:
        """The processes of each replica as it gives them: "2", "auto"; empty for none."""

    @property
    def has_ranks(self) -> bool:
        """Whether its processes have ranks."""
        return True

    @property
    @abstractmethod
    def is_elastic(self) -> bool:
        """Whether the number of replicas may change, so that any of them may have rank 0."""

    @abstractmethod
    def injected_env(self, role: Role | str, index: int) -> dict[str, str]:
        """The variables that a replica gets beside those of the manifest.

        Raises:
            ValueError: the job has no such replica.
        """

    @property
    def suspended(self) -> bool:
        """Whether it is to be suspended."""
        return bool(self.part(*self.target.policy_at).get("suspend"))

    @property
    def gang(self) -> Json | None:
        """Its request to a gang scheduler; None if it has none."""
        return None

    @property
    def active_deadline(self) -> int | None:
        """After how many seconds it is to be ended."""
        deadline: int | None = self.part(*self.target.policy_at).get("activeDeadlineSeconds")
        return deadline

    @property
    def keeps_pods(self) -> bool:
        """Whether Pods that still run when it ends stay."""
        return False

    @property
    def managed_by(self) -> str:
        """The controller that is to work on it, where that is another; else empty."""
        manager = self.part(*self.target.policy_at).get("managedBy") or self.target.manager
        return "" if manager == self.target.manager else str(manager)

    @property
    def written_spec(self) -> Json:
        """Its spec without what the apiserver adds to each job."""
        return self.spec

    @abstractmethod
    def applies_at_once(self, path: tuple[str | int, ...]) -> bool:
        """Whether the controller acts on a change of this field while the job runs."""

    # --- how it goes

    @abstractmethod
    def state(self) -> tuple[JobState, Json]:
        """Its state, and the condition that decides it; empty if there is none."""

    @abstractmethod
    def times(self) -> tuple[str | None, str | None]:
        """When its replicas were first created, or again after a resume, and when it ended."""

    @abstractmethod
    def counts(self, state: JobState) -> Mapping[str, int]:
        """How many Pods are in which phase, by the controller's own counts."""

    # --- the names and Events of its Pods

    def replica_of(self, pod: Json) -> str:
        """The replica that one of its Pods is, "worker-2"; empty for a Pod of another kind."""
        return self.target.pods.replica_of(pod)

    @abstractmethod
    def replica_named(self, pod: str) -> str:
        """The replica whose Pod has this name; empty if it is none of its Pods."""

    def has_below(self, kind: str, name: str) -> bool:
        """Whether controllers make an object of this kind and name of it; see Target.levels."""
        levels = self.target.levels
        return any((kind, name) == (level.kind, f"{self.name}{level.suffix}") for level in levels)

    def recorded_ends(self, events: Iterable[Json]) -> Iterator[RecordedEnd]:  # noqa: ARG002 - a Pod that failed stays
        """The failures of replicas that Events keep, in the order of the Events."""
        yield from ()

    @abstractmethod
    def recreations(self, replica: str, events: Iterable[Json]) -> int:
        """How often a replica's Pod was created again because it had failed."""

    def created_pods(self, events: Iterable[Json]) -> Iterator[tuple[str, Json]]:
        """The replicas whose Pods were created, as its Events tell, each with its Event."""
        _, reason, prefix = self.target.pods.creations[0]
        for event in events:
            if event.get("reason") == reason:
                pod = event.get("message", "").removeprefix(prefix)
                if replica := self.replica_named(pod):
                    yield replica, event


class RecordedEnd(NamedTuple):
    """The failure of a replica as an Event keeps it, when its Pod may be gone.

    Attributes:
        replica: "worker-2".
        exit_code: of its training container.
        reason: the kubelet's reason; empty if the Event has only the exit code.
        message: the termination message, which may be cut.
        time: RFC 3339, or empty.
        whole: whether the Event has more than the exit code.
    """

    replica: str
    exit_code: int
    reason: str
    message: str
    time: str
    whole: bool


class Authored(NamedTuple):
    """A job that others wrote, in the layout that k8sjob renders.

    Attributes:
        job: one object, also where k8sjob renders several; nothing of it is shared.
        notes: what was changed for that, or left out.
        parts: those of the other objects that k8sjob renders itself, or that are now in `job`.
    """

    job: Json
    notes: list[str]
    parts: list[Json]


class ManifestReader(Protocol):
    """The reader of manifests of one kind that others wrote, for `adopt`."""

    quantities: tuple[tuple[str, ...], ...] = ()
    """The paths of mappings in a job whose values are quantities; those of Pods aside."""

    target: Target
    """The kind that such a job becomes."""

    def problems(self, job: Json) -> Iterator[Finding]:
        """Why a cluster would refuse the object."""

    def authored(self, job: Json, documents: Sequence[Json]) -> Authored:
        """The job from an object and the documents beside it; what k8sjob renders stays as it is.

        Raises:
            SpecError: k8sjob renders no such job.
        """

    def settle(self, job: Json) -> None:
        """Fill in the defaults of the apiserver and the controller; remove what has no effect."""

    def fields(self, job: Json) -> Json:
        """The `replicas` and `policy` of a settled job's job.yaml; its Pods are read elsewhere."""


class Pods(Protocol):
    """The Pods of a kind of job, whichever job they are of, and its controller's Events."""

    job_label: str
    """The label whose value is the job's name."""
    owner_label: str = ""
    """The label whose value is the uid of the job, or of the object of its name that is made of
    it; empty: the job is their controller."""
    init_container: str = ""
    """The init container that the controller adds to some of them; empty: none."""
    creations: tuple[tuple[str, str, str], ...]
    """The Events about the creation of a Pod, then of other objects: the reason of a refusal, the
    reason of a success, and how the message of a success begins."""
    service_each: bool = False
    """Whether each has a Service; else one is for all of them."""
    ended_stay: bool
    """Whether one that has ended stays when another takes its place."""

    def replica_of(self, pod: Json) -> str:
        """The replica that a Pod is, "worker-2"; empty for a Pod of another kind of job."""

    def selector(self, name: str, replicas: Collection[str] = ()) -> str:
        """The label selector of a job's Pods, or of some replicas' and perhaps more."""

    def restarts_all(self, event: Json) -> bool:  # noqa: ARG002 - a controller restarts single Pods
        """Whether an Event says that the controller deletes all Pods, to create them again."""
        return False


class Target(Protocol):
    """A kind of job, and how a spec becomes one; kinds inherit what they do not have."""

    name: TargetName
    """The name in job.yaml, "pytorchjob", and of the template that lays a job out."""
    kind: str
    """The kind of the object: "PyTorchJob"."""
    api_version: str
    resource: str
    """The plural, in paths."""
    job_type: type[Job]
    """How a job of the kind is read."""
    pods: Pods
    controller: Controller
    """The controller of such jobs."""
    manager: str
    """The value of managedBy that stands for the kind's own controller."""
    companion: Companion | None = None
    """The object beside the job; None: it needs none."""
    levels: tuple[Level, ...] = ()
    """The objects that controllers make of a job, down to the Job whose Pods are the job's; empty:
    the Pods are its own. An object of the job's name that is left over from an earlier job is
    taken for this job's."""
    kueue_patch: Json = {}  # noqa: RUF012 - never changed
    """What a job's spec gets that is only asked about: the apiserver refuses its duplicate, which
    Kueue adds, before a webhook misses the companion; empty: not needed."""
    shared_kind: bool = False
    """Whether objects of the kind need not be training jobs, so that `submit` leaves those of
    others alone, whatever it is asked."""
    policy_at: tuple[str, ...] = ("spec",)
    """The path of `suspend` and `managedBy`."""
    file: str
    """The file name of a rendered manifest; job.yaml is the spec."""
    templates: Path | None = None
    """The folder of its templates, where that is another than templates/."""
    process_at: tuple[str, ...] = ()
    """The path of the training container's image, command, arguments and resources, if not in its
    Pod template."""
    sources: Mapping[str, tuple[str, ...]] = {}
    """The fields of job.yaml that fields of the object come from; those of its Pods aside."""

    shapes: Json
    """The types of its fields, all of `spec` among them; see k8sjob.targets.field_types."""
    objects: Mapping[str, Json] = {}
    """The types of the fields of its companion, by that one's kind."""

    @property
    def child_name(self) -> str:
        """The suffix of the last name in `levels`; empty: there is none."""
        return self.levels[-1].suffix if self.levels else ""

    @property
    def kueue_framework(self) -> str:
        """Its name in integrations.frameworks of Kueue's settings: "batch/job"."""
        return f"{self.api_version.partition('/')[0]}/{self.kind.lower()}"

    def job(self, document: Json) -> Job:
        """The job of this kind from its Job.document, or from its object alone."""
        return self.job_type.of(self, document)

    def suspension(self, *, value: bool) -> Json:
        """The merge patch that suspends a job or resumes it."""
        patch: Json = {"suspend": value}
        for key in reversed(self.policy_at):
            patch = {key: patch}
        return patch

    def refusals(self, spec: JobSpec) -> Iterator[Finding]:  # noqa: ARG002 - it has all fields
        """The fields of a spec that this kind of job cannot have."""
        yield from ()

    def remarks(self, spec: JobSpec) -> Iterator[Finding]:  # noqa: ARG002 - nothing to remark
        """The fields of a spec that do not work as expected with this kind of job."""
        yield from ()

    def runtime_policy(self, spec: JobSpec) -> str:
        """The restart policy for the runtime: ExitCode where a restart may be a new Pod."""
        return spec.restart_policy

    def values(self, spec: JobSpec) -> dict[str, Any]:
        """The template's values, beside those that all kinds have.

        Among them the variables of the containers that the controller does not inject: `injected`,
        and `fields`, whose values are fields of the Pod.
        """

    def finished(self, job: Job) -> Job:
        """The job as it is created, once everything is merged into it."""
        return job

    def companion_problems(self, job: Job, companion: Json) -> Iterator[Finding]:  # noqa: ARG002 - as it was rendered
        """Why a job cannot share this companion."""
        yield from ()

    def typed(self, manifest: Json) -> tuple[Json, list[WrongType]]:
        """The manifest without its nulls and its fields of a wrong type, and those fields."""
        return fit(manifest, self.shapes)

    def problems(self, manifest: Json) -> list[Finding]:
        """Why a cluster would refuse the manifest, as far as its schema does not say."""

    @property
    def rules(self) -> Rules[Any] | None:
        """The lint of this kind, over targets.manifest_facts.Job; None: only that of all kinds."""
        return None

    def minimal(self, name: str, pod: Json) -> Job:
        """The smallest job of one replica, with this spec of its Pod."""

    def refused(self, name: str, pod: Json) -> Job:
        """The same with a fault that only the controller's webhook sees: a bad name."""
        return self.minimal(f"0-{name}", pod)

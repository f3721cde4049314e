"""Questions about a job of any kind, and about its Pods and Events. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from k8sjob.contract import Role
from k8sjob.kube.labels import PRIORITY, QUEUE
from k8sjob.kube.objects import Object, event_time, moment
from k8sjob.kube.resources import Reference, path, references_of
from k8sjob.targets.job.target import IndexedJob
from k8sjob.targets.jobset.target import JobSet
from k8sjob.targets.pytorchjob.target import PyTorchJob
from k8sjob.targets.trainjob.target import TrainJob

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from k8sjob.kube.objects import Json
    from k8sjob.targets.api import Target

__all__ = [
    "CONTROLLERS",
    "DEFAULT",
    "TARGETS",
    "by_name",
    "child_events",
    "child_path",
    "companion_path",
    "has_ended",
    "is_of_pods",
    "is_suspended",
    "job_path",
    "newest_pods",
    "of_kind",
    "own_pods",
    "owned",
    "pod_specs",
    "references",
    "replica_names",
    "replica_of",
    "replica_order",
    "seconds_to_end",
    "sent",
    "target_of",
    "with_child",
]

DEFAULT: Final[Target] = PyTorchJob()
TARGETS: Final[tuple[Target, ...]] = (DEFAULT, IndexedJob(), JobSet(), TrainJob())
"""All kinds of job, in the order in which a name is looked for."""
CONTROLLERS: Final = {target.resource: target.controller for target in TARGETS}
"""Of each kind of job, by its resource."""
_GRACE_SECONDS: Final = 30
"""terminationGracePeriodSeconds of a pod that names none (Kubernetes' default)."""
_SPARE_SECONDS: Final = 60
"""How long pods may outlast their grace period: their kubelet may be away for a moment."""


def target_of(job: Json) -> Target:
    """The kind of a job; the default where it names none or another."""
    return of_kind(job.get("kind") or "")


def by_name(name: str) -> Target:
    """The target that job.yaml calls so."""
    return next(target for target in TARGETS if target.name == name)


def of_kind(kind: str) -> Target:
    """The target whose objects are of this kind; the default for another."""
    return next((target for target in TARGETS if target.kind == kind), DEFAULT)


def job_path(target: Target, namespace: str = "", name: str = "") -> str:
    """The path of a job, or of all jobs of a kind; see k8sjob.kube.resources.path."""
    return path(target.resource, namespace, name, api_version=target.api_version)


def companion_path(target: Target, resource: str, namespace: str = "", name: str = "") -> str:
    """The path of an object beside a job, or of all such objects; see Target.companions."""
    own = target.api_version if target.companion_key else ""
    return path(resource, namespace, name, api_version=own)


def sent(job: Json) -> Json:
    """The job as an apiserver has it, without its `child` and its companion; see Target."""
    beside = {"child", target_of(job).companion_key}
    return {name: value for name, value in job.items() if name not in beside}


def child_path(namespace: str = "", name: str = "") -> str:
    """The path of a job's `child`, or of all that there are; see Target.child."""
    return path("jobs", namespace, name, api_version="batch/v1")


def child_events(target: Target, name: str) -> str:
    """The field selector of the events about a job's `child`; empty where the kind has none."""
    child = target.child(name)
    return child and f"involvedObject.kind=Job,involvedObject.name={child}"


def with_child(job: Json, child: Json | None) -> Json:
    """The job with its `child`, where that is of this job and of none before it."""
    if child is None or not owned(target_of(job), child, Object(job).uid):
        return job
    if Object(child).created < Object(job).created:  # where its owner is not known
        return job
    return {**job, "child": child}


# --- the job --------------------------------------------------------------------------------------


def has_ended(job: Json) -> bool:
    """Whether a job has succeeded or failed."""
    return target_of(job).state(job)[0].finished


def is_suspended(job: Json) -> bool:
    """Whether a job is to be suspended."""
    return target_of(job).is_suspended(job)


def pod_specs(job: Json) -> Iterator[tuple[Role, int, Json]]:
    """Each role of a job, how many replicas it has, and their Pods' spec."""
    for one in target_of(job).replicas(job):
        yield one.role, one.count, one.pod


def replica_names(job: Json) -> tuple[str, ...]:
    """The names of all replicas that a job asks for: "master-0", "worker-0", ..."""
    return tuple(
        f"{one.role.lower()}-{index}"
        for one in target_of(job).replicas(job)
        for index in range(one.count)
    )


def references(job: Json) -> list[Reference]:
    """Everything that must exist for the job's Pods to start, each once; nothing optional."""
    found: dict[Reference, None] = {}
    labels = Object(job).labels
    for kind, label in (("queue", QUEUE), ("workload priority class", PRIORITY)):
        if name := QUEUE in labels and labels.get(label):
            found[Reference(kind, name)] = None
    for _, _, pod in pod_specs(job):
        found |= dict.fromkeys(references_of(pod))
    return [one for one in found if one.name not in {"", ".", ".."}]


def seconds_to_end(job: Json) -> float:
    """How long the job's pods may take to end and be gone."""
    asked = (pod.get("terminationGracePeriodSeconds") for _, _, pod in pod_specs(job))
    grace = max((_GRACE_SECONDS if seconds is None else seconds for seconds in asked), default=0)
    return float(grace) + _SPARE_SECONDS


# --- its Pods and Events --------------------------------------------------------------------------


def replica_of(pod: Json) -> str:
    """The replica that a pod is, "worker-2"; empty for one that is no job's."""
    return next((name for target in TARGETS if (name := target.replica_of(pod))), "")


def replica_order(replica: str) -> tuple[bool, int]:
    """Sorts replicas: the Master first, then by index."""
    role, _, index = replica.rpartition("-")
    return role != Role.MASTER.lower(), int(index) if index.isdecimal() else -1


def owned(target: Target, pod: Json, uid: str) -> bool:
    """Whether a pod that carries a job's name is of the job of this uid, and of no other."""
    if target.owner_label is None:
        return True
    if target.owner_label:
        return Object(pod).labels.get(target.owner_label) == uid
    owners = [o for o in pod["metadata"].get("ownerReferences") or [] if o.get("controller")]
    return all(owner.get("uid") == uid for owner in owners)


def own_pods(job: Json, pods: Iterable[Json]) -> tuple[Json, ...]:
    """The job's pods, Master first and by index; not those of an earlier job of its name."""
    target, uid = target_of(job), job["metadata"]["uid"]
    newest = newest_pods(pod for pod in pods if owned(target, pod, uid))
    return tuple(newest[replica] for replica in sorted(newest, key=replica_order))


def newest_pods(pods: Iterable[Json]) -> dict[str, Json]:
    """The newest pod of each replica: some kinds keep those that failed before."""
    return {replica_of(pod): pod for pod in sorted(pods, key=lambda pod: Object(pod).created)}


def is_of_pods(job: Json, event: Json) -> bool:
    """Whether an event is about one of the job's pods, also one that no longer exists, or `child`.

    The name of a child is no pod's.
    """
    about = str(Object(event).part("involvedObject").get("name", ""))
    target, name = target_of(job), Object(job).name
    if not target.replica_named(name, about) and about != target.child(name):
        return False
    made = moment(Object(job).created)
    return made is None or event_time(event) >= made

"""Questions about a job of any kind, and about its Pods and Events. Pure."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from k8sjob.contract import CONFIG_ENV, CONTAINER_NAMES, Role, decode_object
from k8sjob.findings import field_path
from k8sjob.kube.api_resources import (
    BUILT_IN,
    ObjectReference,
    Resource,
    foreign_kind,
    path,
    references_of,
)
from k8sjob.kube.objects import (
    PRIORITY,
    QUEUE,
    Object,
    at_path,
    event_time,
    mappings,
    moment,
)
from k8sjob.targets.indexed.target import BATCH_JOB
from k8sjob.targets.jobset.target import JOBSET
from k8sjob.targets.pytorchjob.target import PYTORCHJOB
from k8sjob.targets.trainjob.target import TRAINJOB

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from k8sjob.findings import FieldPath
    from k8sjob.kube.objects import Json
    from k8sjob.targets.api import Companion, Job, Level, RoleReplicas, Target

PREFERRED: Final[list[Target]] = [PYTORCHJOB, TRAINJOB, JOBSET, BATCH_JOB]
"""The kinds of job in the order in which `--target auto` tries them; docs/reference/targets.md has
the reasons. A new kind is a name here, and a line in READERS."""
DEFAULT: Final = PREFERRED[0]
TARGETS: Final = [DEFAULT, *reversed(PREFERRED[1:])]
"""All kinds of job, in the order in which a name is looked for."""
KINDS: Final = (*BUILT_IN, *(Resource(t.kind, t.resource, t.api_version) for t in TARGETS))
"""The kinds whose words need no group: those of every cluster, and those of jobs."""
MOST_REPLICAS: Final = 100_000
"""The replicas of the largest job that is read with all that belongs to it."""
_GRACE_SECONDS: Final = 30
"""terminationGracePeriodSeconds of a pod that names none (Kubernetes' default)."""
_MARGIN_SECONDS: Final = 60
"""How long pods may outlast their grace period: their kubelet may be away for a moment."""


def job_of(document: Json) -> Job:
    """The job from its object, or from its Job.document."""
    return of_kind(document.get("kind")).job(document)


def by_name(name: str) -> Target:
    """The target that job.yaml calls so."""
    return next(target for target in TARGETS if target.name == name)


def of_kind(kind: str | None) -> Target:
    """The target whose objects are of this kind; the default for another, or none."""
    return next((target for target in TARGETS if target.kind == kind), DEFAULT)


def names_kind(word: str) -> bool:
    """Whether a word names one of KINDS."""
    return any(resource.is_called(word.lower()) for resource in KINDS)


def is_job(item: Json) -> bool:
    """Whether an object is a job, in whatever version of its API."""
    target = of_kind(item.get("kind"))
    group = target.api_version.partition("/")[0]
    return item.get("kind") == target.kind and str(item.get("apiVersion")).startswith(f"{group}/")


def near_job(several: Iterable[Json]) -> str:
    """What the first of several objects is that is nearly a job, and the next step; else empty."""
    nearly = (wrapped_job(item) or foreign_kind(item) for item in several)
    return next(filter(None, nearly), "")


def wrapped_job(item: Any, path: FieldPath = ()) -> str:
    """What to do with an object that only has a job in it, such as an AppWrapper; else empty."""
    if isinstance(item, dict) and path and is_job(item):
        inside = f"{item['kind']} {Object(item).name}"
        return f"it wraps {inside} at {field_path(path)}; write that into another file"
    inner = item.items() if isinstance(item, dict) else enumerate(item)
    several = [(step, value) for step, value in inner if isinstance(value, dict | list)]
    return next(filter(None, (wrapped_job(value, (*path, step)) for step, value in several)), "")


def job_path(target: Target, namespace: str = "", name: str = "") -> str:
    """The path of a job, or of all jobs of a kind; see k8sjob.kube.api_resources.path."""
    return path(target.resource, namespace, name, api_version=target.api_version)


def keyed(target: Target) -> Companion | None:
    """The companion that a job's document has; see Companion.key."""
    return target.companion if target.companion and target.companion.key else None


def namesake(target: Target) -> Level | None:
    """The object of the job's own name that a controller makes for it; see Target.levels."""
    return next((level for level in target.levels if not level.suffix), None)


def made_of(job: Job, objects: Iterable[Json]) -> list[Json]:
    """The objects made for this job, not for an earlier one of its name; see Target.levels."""
    below: list[Json] = []
    owner = job.uid
    for level in job.target.levels:
        named = [child for child in objects if Object(child).name == f"{job.name}{level.suffix}"]
        of_it = [
            child
            for child in named
            if (_controller(child) == owner if owner else Object(child).created >= job.created)
        ]
        below += of_it[:1]
        owner = Object(of_it[0]).uid if of_it else ""
        # The name is still an earlier job's object, so what is below it is not this job's either.
        if named and not owner:
            return below
    return below


def with_child(job: Job, objects: Iterable[Json]) -> Job:
    """The job with its `child`, where that is among these objects; see made_of."""
    name = f"{job.name}{job.target.child_name}" if job.target.levels else ""
    children = (item for item in made_of(job, objects) if Object(item).name == name)
    return replace(job, child=next(children, None))


def _controller(item: Json) -> str:
    """The uid of the object that controls this one; empty if there is none."""
    owners = (owner for owner in Object(item).owners if owner.get("controller"))
    return next((str(owner.get("uid")) for owner in owners), "")


# --- the job --------------------------------------------------------------------------------------


def has_ended(job: Job) -> bool:
    """Whether a job has succeeded or failed."""
    return job.state()[0].finished


def pod_specs(job: Job) -> Iterator[tuple[str, int, Json]]:
    """Each role of a job, how many replicas it has, and their Pods' spec."""
    for replicas in job.replicas:
        yield replicas.role, replicas.count, replicas.pod


class ReplicaNames(Sequence[str]):
    """The names of all replicas that a job asks for, each made when it is asked for.

    Whoever may create a job may ask for billions, which no list of jobs may stumble over.
    """

    def __init__(self, roles: Sequence[RoleReplicas]) -> None:
        self._roles = roles

    def __len__(self) -> int:
        return min(sum(max(role.count, 0) for role in self._roles), sys.maxsize)

    def __getitem__(self, at: Any) -> Any:
        """The name at an index, or a tuple of those of a slice."""
        if isinstance(at, slice):
            return tuple(self[index] for index in range(*at.indices(len(self))))
        index = at + len(self) if at < 0 else at
        for role in self._roles:
            if 0 <= index < role.count:
                return role.name(index)
            index -= max(role.count, 0)
        raise IndexError(f"the job has no replica {at}")


def replica_names(job: Job) -> ReplicaNames:
    """The names of all replicas that a job asks for: "master-0", "worker-0", ..."""
    return ReplicaNames(job.replicas)


def excess(job: Job) -> str:
    """That a job has more than MOST_REPLICAS, as the end of a sentence; else empty."""
    count = len(replica_names(job))
    return f"has {count:,} replicas, more than {MOST_REPLICAS:,}" if count > MOST_REPLICAS else ""


def config_of(manifest: Json) -> str | None:
    """The value of K8SJOB_CONFIG in the first training process that has one."""
    at = of_kind(manifest.get("kind")).process_at
    processes = [at_path(manifest, *at) or {}] if at else []
    for role in job_of(manifest).replicas:
        containers = mappings(Object(at_path(manifest, *role.path)).spec.get("containers"))
        processes += [trainer for trainer in containers if trainer.get("name") in CONTAINER_NAMES]
    variables = (variable for process in processes for variable in mappings(process.get("env")))
    values = (variable.get("value") for variable in variables if variable.get("name") == CONFIG_ENV)
    return next(map(str, values), None)


def settings_of(manifest: Json) -> Json:
    """What K8SJOB_CONFIG holds; empty if k8sjob has not rendered the manifest."""
    return decode_object(config_of(manifest) or "") or {}


def references(job: Job) -> list[ObjectReference]:
    """Everything that must exist for the job's Pods to start, each once; nothing optional."""
    needed: dict[ObjectReference, None] = {}
    labels = job.labels
    for kind, label in (("queue", QUEUE), ("workload priority class", PRIORITY)):
        if name := QUEUE in labels and labels.get(label):
            needed[ObjectReference(kind, name)] = None
    for _, _, pod in pod_specs(job):
        needed |= dict.fromkeys(references_of(pod))
    return [reference for reference in needed if reference.name not in {"", ".", ".."}]


def seconds_to_end(job: Job) -> float:
    """The seconds that the job's pods may take to end and be gone."""
    asked = (pod.get("terminationGracePeriodSeconds") for _, _, pod in pod_specs(job))
    grace = max((_GRACE_SECONDS if seconds is None else seconds for seconds in asked), default=0)
    return float(grace) + _MARGIN_SECONDS


# --- its Pods and Events --------------------------------------------------------------------------


def replica_order(replica: str) -> tuple[int, list[str | int]]:
    """Sorts replicas: the Master first, then Workers, then those of other Jobs; each by index."""
    role, first = replica.rpartition("-")[0], [name.lower() for name in Role]
    parts = enumerate(re.split(r"(\d+)", replica))
    natural = [int(part) if at % 2 else part for at, part in parts]
    return first.index(role) if role in first else len(first), natural


def owned(target: Target, pod: Json, uid: str) -> bool:
    """Whether a pod that carries a job's name is of that job, and of no other.

    The uid is that of the job, or of its namesake; see Pods.owner_label.
    """
    if target.pods.owner_label:
        return Object(pod).labels.get(target.pods.owner_label) == uid
    return _controller(pod) in {"", uid}


def perhaps_owned(target: Target, pod: Json, uid: str) -> bool:
    """Whether a pod that carries a job's name may be of the job with this uid.

    The pods of a kind with a namesake have that one's uid, which only own_pods knows.
    """
    return namesake(target) is not None or owned(target, pod, uid)


def own_pods(job: Job, pods: Iterable[Json], objects: Iterable[Json] = ()) -> tuple[Json, ...]:
    """The job's own pods, Master first and by index; not those of an earlier job of its name.

    Where the namesake is not among the objects (see made_of), the age of the pods decides.
    """
    target, uid = job.target, job.uid
    if namesake(target):
        namesakes = [child for child in objects if Object(child).name == job.name]
        below = made_of(job, namesakes)
        if namesakes and not below:  # an earlier job's: this one has no pods yet
            return ()
        uid = Object(below[0]).uid if below else ""
        if not uid:
            pods = [pod for pod in pods if Object(pod).created >= job.created]
    newest = newest_pods(target, (pod for pod in pods if not uid or owned(target, pod, uid)))
    return tuple(newest[replica] for replica in sorted(newest, key=replica_order))


def newest_pods(target: Target, pods: Iterable[Json]) -> dict[str, Json]:
    """The newest pod of each replica: some kinds keep those that failed before.

    Anybody may create a pod with a job's labels: one that a controller has made comes first, and
    one that no replica can be is none.
    """

    def order(pod: Json) -> tuple[bool, str]:
        return bool(_controller(pod)), Object(pod).created

    by_age = sorted(pods, key=order)
    return {name: pod for pod in by_age if (name := target.pods.replica_of(pod))}


def events_below(target: Target, name: str) -> tuple[str, ...]:
    """The field selectors of the events about what is made of a job; see Target.levels.

    Those of all Jobs, since only the job says how its own are called; see is_below.
    """
    named = f",involvedObject.name={name}"
    return tuple(
        f"involvedObject.kind={level.kind}{'' if level.suffix else named}"
        for level in target.levels
    )


def is_below(job: Job, event: Json) -> bool:
    """Whether an event is about a pod of the job, also one that no longer exists, or Target.levels.

    Not those from before the job was created.
    """
    about = Object(event).part("involvedObject")
    at = str(about.get("name", ""))
    if not (job.has_below(str(about.get("kind")), at) or job.replica_named(at)):
        return False
    begun = moment(job.created)
    return begun is None or event_time(event) >= begun

"""Any object that runs Pods, as an apiserver has it, with the Pods that are its own.

Nothing is known of its kind. Its state is that of its conditions or its phase where it has the
usual ones, else that of its Pods.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Self

from k8sjob.kube.objects import Object, Pod, mappings, true_conditions
from k8sjob.targets.api import Job, JobState, RoleReplicas
from k8sjob.targets.workload.pods import processes_of, rank_of, stem

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from k8sjob.contract import Role
    from k8sjob.kube.objects import Json
    from k8sjob.targets.api import Target

_CONDITIONS: Final = {
    "Failed": JobState.FAILED,
    "FailureTarget": JobState.FAILED,  # a Job's, whose Pods are still ending
    "Complete": JobState.SUCCEEDED,
    "Succeeded": JobState.SUCCEEDED,
    "Suspended": JobState.SUSPENDED,
}
_PHASES: Final = {
    "failed": JobState.FAILED,
    "error": JobState.FAILED,
    "succeeded": JobState.SUCCEEDED,
    "complete": JobState.SUCCEEDED,
    "completed": JobState.SUCCEEDED,
    "aborted": JobState.STOPPED,
    "terminated": JobState.STOPPED,
    "suspended": JobState.SUSPENDED,
}
"""Words of a status that say how it ended, whatever the kind."""
_ENDS: Final = ("completionTime", "finishedAt", "endTime")
_COUNTS: Final = ("replicas", "parallelism")
"""Fields beside a Pod template that say how many Pods are to be there."""


class PodTemplate(NamedTuple):
    """A Pod template in an object: its path, and how many Pods it is for; None: that is unsaid."""

    path: tuple[str | int, ...]
    template: Json
    pods: int | None

    def replicas(self, names: Sequence[str] = ()) -> PodReplicas:
        """Pods of it, by their names."""
        policy = str(Object(self.template).spec.get("restartPolicy") or "Always")
        return PodReplicas("", len(names), self.path, self.template, policy, names=tuple(names))


@dataclass(frozen=True, slots=True)
class PodReplicas(RoleReplicas):
    """Pods that are alike, each by its own name."""

    names: tuple[str, ...] = ()

    def name(self, index: int) -> str:
        """The name of one of them."""
        return self.names[index]

    def __contains__(self, name: str) -> bool:
        """Whether a replica of this name is one of them."""
        return name in self.names


@dataclass(frozen=True, slots=True)
class Workload(Job):
    """An object that runs Pods.

    Attributes:
        pods: its Pods, by rank or name; of several of one rank the newest.
        below: the objects between it and its Pods.
        word: what a command line calls its kind: "deployment", "rayjobs.ray.io".
        names: those of its Pods, also of the older ones of a rank; each is called by its own.
        ranked: whether the Pods have ranks.
    """

    pods: Sequence[Json] = ()
    below: Sequence[Json] = ()
    word: str = ""
    names: frozenset[str] = frozenset()
    ranked: bool = False

    @classmethod
    def read(
        cls, target: Target, raw: Json, word: str, pods: Iterable[Json], below: Sequence[Json] = ()
    ) -> Self:
        """The object with its Pods; see the attributes."""
        owner = "" if raw.get("kind") in {"Pod", "PodList"} else Object(raw).name
        by_age = sorted(map(Pod, pods), key=lambda pod: pod.created)
        ranks = {pod.name: rank for pod in by_age if (rank := rank_of(pod.raw)) is not None}
        ranked = bool(ranks) and len(ranks) == len(by_age) and bool(owner)
        newest = {ranks[pod.name] if ranked else pod.name: pod for pod in by_age}
        order = sorted(newest.values(), key=lambda pod: (ranks.get(pod.name, 0), pod.name))
        ordered = tuple(pod.raw for pod in order)
        names = frozenset(pod.name for pod in by_age)
        return cls(raw, target, None, None, ordered, below, word, names, ranked)

    @property
    def argument(self) -> str:
        """Its kind and its name."""
        return f"{self.word}/{self.name}"

    # --- what it asks for

    @property
    def templates(self) -> list[PodTemplate]:
        """The Pod templates in its spec."""
        return list(_templates(self.spec, ("spec",)))

    @property
    def is_training(self) -> bool:
        """No: nothing is known of what it does."""
        return False

    @property
    def replicas(self) -> tuple[RoleReplicas, ...]:
        """Its Pods in groups that are alike; one more name, its own, while some are missing."""
        templates = self.templates
        groups: dict[str, tuple[PodTemplate, list[str]]] = {}
        for pod in map(Pod, self.pods):
            # Webhooks may have added containers to the template's.
            fits = (t.path for t in templates if _names(t.template) <= _names(pod.raw))
            containers = _containers(pod.raw)
            alike = json.dumps([[c.get("name"), c.get("resources")] for c in containers])
            of_pod = {"metadata": pod.metadata, "spec": pod.spec}
            template = PodTemplate(next(fits, ()), of_pod, None)
            groups.setdefault(alike, (template, []))[1].append(pod.name)
        every = [template.replicas(names) for template, names in groups.values()]
        # Which of them are missing only an index tells.
        asked = sum(template.pods or 0 for template in templates)
        missing = asked - sum(Pod(pod).phase != "Failed" for pod in self.pods)
        if missing > 0 and not self.state()[0].finished:
            present = set(map(rank_of, self.pods))
            ranks = range(asked) if self.ranked else ()
            absent = [f"{self.name}-{rank}" for rank in ranks if rank not in present]
            more = templates[0].replicas(absent or [self.name])
            every = [*every, more] if 0 in present else [more, *every]
        # Where there are no Pods, the templates tell what they would be.
        return tuple(every or (template.replicas() for template in templates))

    @property
    def nproc_per_node(self) -> str:
        """As torchrun is told it."""
        return next(filter(None, map(processes_of, self.pods)), "") if self.ranked else ""

    @property
    def has_ranks(self) -> bool:
        """Whether each of its Pods has one."""
        return self.ranked

    @property
    def is_elastic(self) -> bool:
        """Whether it is not known which Pod has which ranks."""
        return not self.ranked

    @property
    def active_deadline(self) -> int | None:
        """That beside its first Pod template: of a Pod itself, or of a Job within a wrapper."""
        beside = next((template.path[:-1] for template in self.templates), ("spec",))
        deadline: int | None = (self.at(*beside) or {}).get("activeDeadlineSeconds")
        return deadline

    def injected_env(self, role: Role | str, index: int) -> dict[str, str]:
        """None: what its controller injects is in the Pods."""
        raise ValueError(f"{self.name} has no {role}-{index}")

    def applies_at_once(self, path: tuple[str | int, ...]) -> bool:  # noqa: ARG002 - not known
        """No."""
        return False

    # --- how it goes

    def state(self) -> tuple[JobState, Json]:
        """By its conditions, its phase, or its Pods."""
        conditions = true_conditions(self.status)
        # A wrapper whose Pods are gone may say of itself only that it was started.
        below = () if self.pods else (true_conditions(Object(item).status) for item in self.below)
        levels = [conditions, *below]
        for kind, state in _CONDITIONS.items():
            if condition := next((level[kind] for level in levels if kind in level), None):
                return state, condition
        for phase in _phases(self.status):
            if (ended := _PHASES.get(phase.lower())) is not None:
                texts = {key: str(self.status.get(key) or "") for key in ("reason", "message")}
                return ended, {**texts, "reason": texts["reason"] or phase}
        # Some controllers call a rollout completed whose Pods serve.
        if "Completed" in conditions and not any(Pod(pod).live for pod in self.pods):
            return JobState.SUCCEEDED, conditions["Completed"]
        return self._state_of_pods(), {}

    def _state_of_pods(self) -> JobState:
        pods = [*map(Pod, self.pods)]
        live = [pod for pod in pods if pod.live]
        if pods and not live:
            failed = any(pod.phase == "Failed" for pod in pods)
            return JobState.FAILED if failed else JobState.SUCCEEDED
        if any(pod.restarts and "running" not in pod.container.part("state") for pod in live):
            return JobState.RESTARTING
        if any(pod.phase == "Running" for pod in live):
            return JobState.RUNNING
        return JobState.SUSPENDED if self.suspended else JobState.CREATED

    def times(self) -> tuple[str | None, str | None]:
        """Its own times, or those of its Pods."""
        status, pods = self.status, [*map(Pod, self.pods)]
        starts = [status.get("startTime"), *(pod.status.get("startTime") for pod in pods)]
        ends = [str(status[key]) for key in _ENDS if status.get(key)]
        ends = ends or sorted(str(pod.terminated.get("finishedAt") or "") for pod in pods)[-1:]
        return min((str(start) for start in starts if start), default=None), next(iter(ends), None)

    def counts(self, state: JobState) -> dict[str, int]:  # noqa: ARG002 - the Pods tell
        """None: nothing is counted but the Pods."""
        return {}

    # --- the names and Events of its Pods

    def replica_of(self, pod: Json) -> str:
        """The replica that one of its Pods is."""
        name = Object(pod).name
        return name if name in self.names else ""

    def replica_named(self, pod: str) -> str:
        """Also of a Pod that is gone and whose name shows that it was its own."""
        owners = {self.name, *(Object(item).name for item in self.below)}
        is_own = pod in self.names or stem(pod) in owners or stem(pod) in _stems(self.names)
        return pod if is_own else ""

    def has_below(self, kind: str, name: str) -> bool:
        """Whether an object is between it and its Pods."""
        return any((kind, name) == (o.get("kind"), Object(o).name) for o in self.below)

    def recreations(self, replica: str, events: Iterable[Json]) -> int:  # noqa: ARG002 - not known
        """None: a Pod that follows another has its own name."""
        return 0


@lru_cache(8)  # it is asked for each Event of a namespace
def _stems(names: frozenset[str]) -> frozenset[str]:
    return frozenset(map(stem, names))


def _containers(template: Json) -> list[Json]:
    return list(mappings(Object(template).spec.get("containers")))


def _names(template: Json) -> set[str]:
    return {str(container.get("name")) for container in _containers(template)}


def _phases(status: Json) -> Iterator[str]:
    """The phases in a status: phase, state.phase, jobStatus, applicationState.state."""
    for key, part in status.items():
        if key.lower().endswith(("phase", "state", "status")):
            inner = [part.get("phase"), part.get("state")] if isinstance(part, dict) else [part]
            yield from (text for text in inner if isinstance(text, str) and text)


def _templates(
    value: Any, path: tuple[str | int, ...], *, nested: bool = False
) -> Iterator[PodTemplate]:
    """The Pod templates in a value; of one within another template no number counts."""
    steps = value.items() if isinstance(value, dict) else enumerate(value)
    for step, inner in steps:
        if not isinstance(inner, dict | list):
            continue
        if isinstance(inner, dict) and isinstance(Object(inner).spec.get("containers"), list):
            counts = [value.get(key) for key in _COUNTS] if isinstance(value, dict) else []
            count = next((n for n in counts if isinstance(n, int) and not nested), None)
            most = value.get("completions") if isinstance(value, dict) else None
            if count is not None and isinstance(most, int):
                count = min(count, most)
            yield PodTemplate((*path, step), inner, count)
        else:
            deeper = nested or str(step).lower().endswith("template")
            yield from _templates(inner, (*path, step), nested=deeper)

"""All that a diagnosis looks at, laid out so that each cause finds its evidence at once."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Final

from k8sjob.backends.api import LOCAL
from k8sjob.backends.events import moment
from k8sjob.contract import CONTAINER_NAME
from k8sjob.labels import replica_of
from k8sjob.lifecycle.status import job_status, processes, replica_names

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from datetime import datetime

    from k8sjob.backends.api import Json, Snapshot
    from k8sjob.lifecycle.diagnose.finding import Seen
    from k8sjob.lifecycle.status import JobStatus

__all__ = ["OPERATOR_INIT", "Case", "Container", "Pod"]

OPERATOR_INIT: Final = "init-pytorch"
"""The init container that the operator adds to workers: it waits for the Master's name."""


@dataclass(frozen=True)
class Container:
    """One container of a Pod: its spec and its status.

    Attributes:
        spec: as the Pod asks for it.
        status: as the kubelet tells it; empty before it does.
        init: whether it is an init container.
    """

    spec: Json
    status: Json
    init: bool

    @property
    def name(self) -> str:
        """Its name in the Pod."""
        return str(self.spec.get("name", ""))

    @property
    def state(self) -> Json:
        """Its state: one of waiting, running, terminated."""
        return self.status.get("state") or {}

    @property
    def waiting(self) -> Json:
        """Why it waits; empty if it does not."""
        return self.state.get("waiting") or {}

    @property
    def ended(self) -> Json:
        """How it ended; empty if it has not, or was started again."""
        return self.state.get("terminated") or {}


@dataclass(frozen=True)
class Pod:
    """One Pod of the job.

    Attributes:
        object: as the apiserver has it.
        replica: "worker-2".
        events: the Events about it, oldest first.
    """

    object: Json
    replica: str
    events: tuple[Json, ...] = ()

    @property
    def spec(self) -> Json:
        """What was asked for."""
        return self.object.get("spec") or {}

    @property
    def status(self) -> Json:
        """What the kubelet and the scheduler say."""
        return self.object.get("status") or {}

    @property
    def phase(self) -> str:
        """Pending, Running, Succeeded, Failed or Unknown."""
        return str(self.status.get("phase", "Pending"))

    @property
    def node(self) -> str:
        """Where it runs; empty before it was scheduled."""
        return str(self.spec.get("nodeName") or "")

    @property
    def dying(self) -> bool:
        """Whether its deletion was asked for."""
        return bool(self.object.get("metadata", {}).get("deletionTimestamp"))

    @property
    def created(self) -> datetime | None:
        """When it was made."""
        return moment(self.object.get("metadata", {}).get("creationTimestamp"))

    @property
    def runs(self) -> bool:
        """Whether its training container runs, and is not being ended."""
        return bool(self.trainer and "running" in self.trainer.state) and not self.dying

    @property
    def finished(self) -> float | None:
        """When its training container ended, in seconds since the epoch; None where not known."""
        ended = moment(self.trainer.ended.get("finishedAt")) if self.trainer else None
        return ended.timestamp() if ended else None

    @cached_property
    def containers(self) -> tuple[Container, ...]:
        """Its containers, the init ones first."""
        return (
            *self._containers("initContainers", "initContainerStatuses", init=True),
            *self._containers("containers", "containerStatuses", init=False),
        )

    @property
    def trainer(self) -> Container | None:
        """The container that trains."""
        found = (c for c in self.containers if c.name == CONTAINER_NAME and not c.init)
        return next(found, None)

    def condition(self, kind: str) -> Json:
        """Its condition of that type; empty if there is none."""
        conditions = self.status.get("conditions") or ()
        return next((c for c in conditions if c.get("type") == kind), {})

    def last_event(self, *reasons: str) -> Json:
        """The newest Event about it with one of these reasons; empty if there is none."""
        return next((e for e in reversed(self.events) if e.get("reason") in reasons), {})

    def limits(self) -> dict[str, str]:
        """The limits of its training container."""
        wanted = (self.trainer.spec if self.trainer else {}).get("resources") or {}
        return wanted.get("limits") or {}

    def _containers(self, key: str, status_key: str, *, init: bool) -> Iterator[Container]:
        statuses = {s.get("name"): s for s in self.status.get(status_key) or ()}
        specs = self.spec.get(key) or [{"name": name} for name in statuses]
        for spec in specs:
            yield Container(spec, statuses.get(spec.get("name"), {}), init)


@dataclass(frozen=True)
class Case:
    """A job, its objects and its output, at one moment.

    Attributes:
        snapshot: the job and its objects.
        logs: the last lines of each replica's output, by its name; replicas may be missing.
        related: objects beside the job's own; see Backend.related.
        now: the present moment.
    """

    snapshot: Snapshot
    logs: Mapping[str, Sequence[str]]
    related: Sequence[Json]
    now: datetime

    @cached_property
    def status(self) -> JobStatus:
        """What the operator and the kubelets say."""
        return job_status(self.snapshot)

    @property
    def name(self) -> str:
        """The job's name."""
        return self.status.ref.name

    @property
    def called(self) -> str:
        """The job as a command line names it, wherever it is typed."""
        return self.name if self.namespace == LOCAL else str(self.status.ref)

    @property
    def local(self) -> bool:
        """Whether it runs on this machine, and in no cluster."""
        return self.namespace == LOCAL

    @cached_property
    def ranks(self) -> dict[str, int]:
        """How many processes each replica has; `auto` and its like count as one."""
        job = self.snapshot.job
        return dict(zip(replica_names(job), processes(job), strict=True))

    @property
    def world_size(self) -> int:
        """The number of processes of all replicas."""
        return sum(self.ranks.values())

    @property
    def fixed_ranks(self) -> bool:
        """Whether the spec alone says which ranks each replica has."""
        spec = self.snapshot.job.get("spec") or {}
        return str(spec.get("nprocPerNode") or "1").isdigit() and not spec.get("elasticPolicy")

    def with_ranks(self, replica: str) -> str:
        """A replica with the ranks of its processes: "worker-0 (rank 1)"."""
        if replica not in self.ranks or not self.fixed_ranks:
            return replica
        names = list(self.ranks)
        first = sum(self.ranks[name] for name in names[: names.index(replica)])
        last = first + self.ranks[replica] - 1
        return f"{replica} (rank {first})" if first == last else f"{replica} (ranks {first}-{last})"

    @property
    def namespace(self) -> str:
        """The job's namespace."""
        return self.status.ref.namespace

    @property
    def policy(self) -> Json:
        """The job's runPolicy."""
        return (self.snapshot.job.get("spec") or {}).get("runPolicy") or {}

    @cached_property
    def pods(self) -> tuple[Pod, ...]:
        """The job's Pods, Master first."""
        about: defaultdict[tuple[str, str], list[Json]] = defaultdict(list)
        for event in self.snapshot.events:
            subject = event.get("involvedObject") or {}
            about[subject.get("name", ""), subject.get("uid", "")].append(event)
        pods = []
        for pod in self.snapshot.pods:
            meta = pod["metadata"]
            name = meta.get("name", "")
            replica = replica_of(pod) or name.removeprefix(f"{self.name}-")
            events = about[name, meta.get("uid", "")]  # not those about one of the same name before
            pods.append(Pod(pod, replica, tuple(events)))
        return tuple(pods)

    def replica_of(self, rank: int) -> str:
        """The replica of a rank; empty where it is not known."""
        if not self.fixed_ranks:
            return ""
        for replica, count in self.ranks.items():
            if rank < count:
                return replica
            rank -= count
        return ""

    def runs_again(self, replica: str) -> bool:
        """Whether a replica runs now, whatever has happened to it before."""
        return not self.status.state.finished and any(
            pod.runs for pod in self.pods if pod.replica == replica
        )

    @cached_property
    def done(self) -> tuple[Pod, ...]:
        """The Pods whose training ended with exit code 0."""
        return tuple(p for p in self.pods if p.trainer and p.trainer.ended.get("exitCode") == 0)

    @cached_property
    def missing(self) -> tuple[str, ...]:
        """Replicas that the job asks for and that have no Pod."""
        present = {pod.replica for pod in self.pods}
        return tuple(name for name in replica_names(self.snapshot.job) if name not in present)

    @cached_property
    def job_events(self) -> tuple[Json, ...]:
        """The Events about the job itself, oldest first."""
        return tuple(
            event
            for event in self.snapshot.events
            if (event.get("involvedObject") or {}).get("kind") == "PyTorchJob"
        )

    @cached_property
    def memory(self) -> dict[str, Seen]:
        """What was found out at one Pod and holds for others like it."""
        return {}

    def of_kind(self, kind: str) -> list[Json]:
        """The related objects of a kind."""
        return [one for one in self.related if one.get("kind") == kind]

    def tail(self, replica: str) -> list[str]:
        """The last lines of a replica that are not empty."""
        lines = (line.rstrip() for line in self.logs.get(replica, ()))
        return [line for line in lines if line]

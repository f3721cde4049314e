"""Replicas: how many, how they restart and end, how they are scheduled together."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

from k8sjob.spec.base import Broken, Count, Flag, Part, Whole, doc
from k8sjob.spec.names import LabelKey, ObjectName
from k8sjob.spec.quantity import Duration

if TYPE_CHECKING:
    from collections.abc import Iterator


class Elastic(Part):
    """Bounds between which the number of nodes may change while the job runs."""

    min: Annotated[Count, doc("Fewest nodes that train.", 2, unit="nodes")]
    max: Annotated[Count, doc("Most nodes that train.", 4, unit="nodes")]

    def rules(self) -> Iterator[Broken]:
        """The bounds are in order."""
        if self.min > self.max:
            yield Broken(
                ("min",), f"{self.min} is more than max {self.max}; set min to at most {self.max}"
            )


class Replicas(Part):
    """The shape of the job: one Master and `workers` Workers, each one pod and one node."""

    workers: Whole = doc(
        "Workers beside the Master; 0 is a job of the Master alone. An elastic job has no"
        " Master: its workers + 1 nodes are all Workers.",
        3,
        unit="pods",
        ge=0,
        le=9999,
        default=0,
    )
    nproc_per_node: Count | None = doc(
        "Training processes in each pod; null: one for each GPU, or one without GPUs. With GPUs"
        " it must be their number.",
        2,
        unit="processes",
        default=None,
    )
    elastic: Elastic | None = doc(
        "Lets nodes join and leave within these bounds: those that are there train, and resume"
        " from a checkpoint when that changes; null: the number is fixed.",
        {"min": 2, "max": 4},
        default=None,
    )

    @property
    def nnodes(self) -> int:
        """Pods of the job: the Master and its Workers, or the Workers of an elastic job."""
        return self.workers + 1

    def rules(self) -> Iterator[Broken]:
        """An elastic job starts with a number of nodes between its bounds."""
        bounds = self.elastic
        if bounds and not bounds.min <= self.nnodes <= bounds.max:
            yield Broken(
                ("elastic",),
                f"workers {self.workers} + 1 = {self.nnodes} nodes are not between min {bounds.min}"
                f" and max {bounds.max}; set workers to {bounds.min - 1}..{bounds.max - 1}",
            )


class Gang(Part):
    """All pods are scheduled together or none, by a gang scheduler that the operator knows."""

    shorthand = "scheduler"

    scheduler: ObjectName | None = doc(
        "Name of the scheduler; null: the cluster's default.", "volcano", default=None
    )
    min_available: Count | None = doc(
        "Pods that must fit at once; null: all of them.", 4, unit="pods", default=None
    )
    queue: ObjectName | None = doc(
        "The scheduler's queue; it cannot be changed later.", "research", default=None
    )


class Topology(Part):
    """The level of Kueue's topology of which one domain takes all pods: a label of the nodes."""

    shorthand = "preferred"

    required: LabelKey | None = doc(
        "Wait until one domain has room.", "cloud.provider.com/topology-rack", default=None
    )
    preferred: LabelKey | None = doc(
        "Else take a larger domain, or several.", "cloud.provider.com/topology-rack", default=None
    )

    def rules(self) -> Iterator[Broken]:
        """One of the two."""
        if (self.required is None) == (self.preferred is None):
            given = "neither is" if self.required is None else "both are"
            yield Broken((), f"{given} given; write one of required and preferred")


class Policy(Part):
    """Restarts, clean-up and deadlines."""

    restart_policy: Literal["OnFailure", "ExitCode", "Never", "Always"] | None = doc(
        "When a replica that failed starts again. ExitCode: only for codes of 128 and above; a"
        " script's own error fails the job at once. null: ExitCode where k8sjob's agent keeps"
        " the script of several replicas, else OnFailure.",
        "OnFailure",
        default=None,
    )
    max_restarts: Whole = doc(
        "How often the whole group may start again after a failure.",
        3,
        unit="restarts",
        ge=0,
        le=1000,
        default=3,
    )
    clean_pod_policy: Literal["Running", "All", "None"] = doc(
        "Which pods go when the job ends. Running: those that still run, so that none keeps"
        " its GPU; None: none.",
        "Running",
        default="Running",
    )
    ttl_after_finished: Duration | None = doc(
        "How long after its end the job is deleted; null: never.", "1d", unit="time", default=None
    )
    active_deadline: Duration | None = doc(
        "How long the job may run before it fails; null: for ever.",
        "12h",
        unit="time",
        default=None,
    )
    suspend: Flag = doc("Create the job without starting it.", True, default=False)
    termination_grace: Duration = doc(
        "Time between SIGTERM and SIGKILL, in which the ranks write a checkpoint.",
        "60s",
        unit="time",
        default=60,
    )

    def rules(self) -> Iterator[Broken]:
        """Deadlines leave time."""
        if self.active_deadline == 0:
            yield Broken(("active_deadline",), "0s leaves no time at all; write a duration, as 12h")
        if self.termination_grace < 2:
            yield Broken(
                ("termination_grace",),
                f"{self.termination_grace}s leaves no time to stop; write at least 2s",
            )

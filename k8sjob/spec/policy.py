"""What happens when a replica fails, when the job ends, and who may run it when."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal

from k8sjob.spec.base import Broken, Count, Flag, Part, Whole, doc
from k8sjob.spec.duration import Duration
from k8sjob.spec.names import ObjectName

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["Gang", "Policy"]


class Gang(Part):
    """All pods are scheduled together or none, by a gang scheduler that the operator knows."""

    scheduler: Annotated[
        ObjectName | None,
        doc("Name of the scheduler; null: the cluster's default.", "volcano"),
    ] = None
    min_available: Annotated[
        Count | None,
        doc("Pods that must fit at once; null: all of them.", 4, unit="pods"),
    ] = None
    queue: Annotated[
        ObjectName | None,
        doc("The scheduler's queue; it cannot be changed later.", "research"),
    ] = None

    @classmethod
    def likely(cls, value: Any) -> Iterator[dict[str, Any]]:
        """The scheduler."""
        if isinstance(value, str):
            yield {"scheduler": value}


class Policy(Part):
    """Restarts, clean-up and deadlines."""

    restart_policy: Annotated[
        Literal["OnFailure", "ExitCode", "Never", "Always"] | None,
        doc(
            "When a replica that failed starts again. ExitCode: only for codes of 128 and above; a"
            " script's own error fails the job at once. null: ExitCode where k8sjob's agent keeps"
            " the script of several replicas, else OnFailure.",
            "OnFailure",
        ),
    ] = None
    max_restarts: Annotated[
        Whole,
        doc(
            "How often the whole group may start again after a failure.",
            3,
            unit="restarts",
            ge=0,
            le=1000,
        ),
    ] = 3
    clean_pod_policy: Annotated[
        Literal["Running", "All", "None"],
        doc(
            "Which pods go when the job ends. Running: those that still run, so that none keeps"
            " its GPU; None: none.",
            "Running",
        ),
    ] = "Running"
    ttl_after_finished: Annotated[
        Duration | None,
        doc("How long after its end the job is deleted; null: never.", "1d", unit="time"),
    ] = None
    active_deadline: Annotated[
        Duration | None,
        doc("How long the job may run before it fails; null: for ever.", "12h", unit="time"),
    ] = None
    suspend: Annotated[Flag, doc("Create the job without starting it.", True)] = False
    termination_grace: Annotated[
        Duration,
        doc(
            "Time between SIGTERM and SIGKILL, in which the ranks write a checkpoint.",
            "60s",
            unit="time",
        ),
    ] = 60

    def rules(self) -> Iterator[Broken]:
        """Deadlines leave time."""
        if self.active_deadline == 0:
            yield Broken(("active_deadline",), "0s leaves no time at all; write a duration, as 12h")
        if self.termination_grace < 2:
            yield Broken(
                ("termination_grace",),
                f"{self.termination_grace}s leaves no time to stop; write at least 2s",
            )

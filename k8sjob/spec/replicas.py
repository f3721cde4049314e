"""How many replicas, and how many processes in each."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

from k8sjob.spec.base import Broken, Count, Part, Whole, doc

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["Elastic", "Replicas"]


class Elastic(Part):
    """Bounds between which the number of nodes may change while the job runs."""

    min: Annotated[Count, doc("Fewest nodes that train.", 2, unit="nodes")]
    max: Annotated[Count, doc("Most nodes that train.", 4, unit="nodes")]

    def rules(self) -> Iterator[Broken]:
        """The bounds are in order."""
        if self.min > self.max:
            yield Broken(
                ("min",),
                f"{self.min} is more than max {self.max}; set min to at most {self.max}",
            )


class Replicas(Part):
    """The shape of the job: one Master and `workers` Workers, each one pod and one node."""

    workers: Annotated[
        Whole,
        doc(
            "Workers beside the Master; 0 is a job of the Master alone. An elastic job has no"
            " Master: its workers + 1 nodes are all Workers.",
            3,
            unit="pods",
            ge=0,
            le=9999,
        ),
    ] = 0
    nproc_per_node: Annotated[
        Count | None,
        doc(
            "Training processes in each pod; null: one for each GPU, or one without GPUs. With GPUs"
            " it must be their number.",
            2,
            unit="processes",
        ),
    ] = None
    elastic: Annotated[
        Elastic | None,
        doc(
            "Lets nodes come and go within these bounds: those that are there train, and go on"
            " from a checkpoint when that changes; null: the number is fixed.",
            {"min": 2, "max": 4},
        ),
    ] = None

    @classmethod
    def likely(cls, value: Any) -> Iterator[dict[str, Any]]:
        """A number of pods, one of which is the Master."""
        if isinstance(value, str) and value.strip().isascii() and value.strip().isdecimal():
            value = int(value[:9])
        if isinstance(value, int) and not isinstance(value, bool):
            yield {"workers": value - 1}

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

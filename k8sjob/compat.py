"""What goes together: strategies, their settings, backends, nodes, processes and GPUs.

One table that both sides check, the client before anything is rendered and the runtime before a
group is made, so that a job fails in a second on a laptop and not in an hour on a cluster. Hence
stdlib only.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from difflib import get_close_matches
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

__all__ = [
    "BACKENDS",
    "STRATEGIES",
    "Conflict",
    "Shape",
    "Strategy",
    "conflicts",
    "default_backend",
]

BACKENDS: Final[Mapping[str, str]] = MappingProxyType({"nccl": "GPUs", "gloo": "CPUs"})
"""Backends of a process group that torch's packages are built with, and what each is for."""

GONE: Final[Mapping[str, str]] = MappingProxyType(
    {"mpi": "is not built into torch's packages", "tcp": "is gone from torch"}
)
"""Backends that tutorials still name, and why there are none."""


@dataclass(frozen=True, slots=True)
class Shape:
    """The processes of a job.

    Attributes:
        nnodes: pods, each of which is a node.
        nproc_per_node: processes in each.
        gpus: GPUs of each node that the processes may use.
        master_gpus: GPUs of the Master, where they differ; None: as `gpus`.
    """

    nnodes: int
    nproc_per_node: int
    gpus: int = 0
    master_gpus: int | None = None

    @property
    def world_size(self) -> int:
        """Processes of the whole job."""
        return self.nnodes * self.nproc_per_node

    def __str__(self) -> str:
        return f"{self.nnodes} nodes x {self.nproc_per_node} processes = {self.world_size} ranks"


@dataclass(frozen=True, slots=True)
class Strategy:
    """One row of the table.

    Attributes:
        summary: what the strategy does, in one line.
        options: its settings and their defaults; a setting has its default's type.
        uniform: whether every node must have the same number of GPUs.
    """

    summary: str
    options: Mapping[str, bool | int] = field(default_factory=dict)
    uniform: bool = True


STRATEGIES: Final[Mapping[str, Strategy]] = MappingProxyType(
    {
        "ddp": Strategy(
            summary="every rank has the whole model, gradients are averaged",
            options={"accumulate": 1, "sync_batchnorm": False},
        ),
    }
)
"""All strategies, by the spec's `strategy.kind`."""


@dataclass(frozen=True, slots=True)
class Conflict:
    """Something that does not go together.

    Attributes:
        field: the spec's field to change, as "strategy.backend".
        message: what was found with all its factors, and the next step.
    """

    field: str
    message: str


def default_backend(gpus: int) -> str:
    """The backend for processes that have this many GPUs: nccl, or gloo for none."""
    return "nccl" if gpus else "gloo"


def conflicts(
    kind: str, options: Mapping[str, Any], shape: Shape, *, backend: str | None = None
) -> list[Conflict]:
    """What keeps these settings from working together; empty where they do.

    Args:
        kind: the strategy, a key of STRATEGIES.
        options: its settings; those left out have their defaults.
        shape: the job's processes.
        backend: of the process group; None chooses one.
    """
    row = STRATEGIES.get(kind)
    if row is None:
        message = f"{kind!r} is no strategy here; {_meant(kind, STRATEGIES)}"
        return [Conflict("strategy.kind", message)]
    found = [*_of_options(row, options), *_of_shape(row, shape)]
    if backend is not None:
        found += _of_backend(backend, shape)
    return found


def _of_options(row: Strategy, options: Mapping[str, Any]) -> Iterator[Conflict]:
    for name, value in options.items():
        at = f"strategy.{name}"
        default = row.options.get(name)
        if default is None:
            yield Conflict(at, f"no such setting; {_meant(name, row.options)}")
        elif type(value) is not type(default):
            wanted = "true or false" if isinstance(default, bool) else "a whole number"
            yield Conflict(at, f"{value!r} is not {wanted}; leave it out for {default!r}")
        elif not isinstance(default, bool) and value < 1:
            yield Conflict(at, f"{value} is less than 1; leave it out for {default}")


def _of_shape(row: Strategy, shape: Shape) -> Iterator[Conflict]:
    nproc, gpus, master = shape.nproc_per_node, shape.gpus, shape.master_gpus
    if shape.world_size < 1:
        yield Conflict("replicas", f"{shape}: no process would train; set both to at least 1")
    if gpus and nproc != gpus:
        yield Conflict(
            "replicas.nproc_per_node",
            f"{nproc} processes in a pod of {gpus} GPUs: one process drives one GPU; set it to"
            f" {gpus}, or leave it out",
        )
    if row.uniform and master is not None and master != gpus:
        yield Conflict(
            "resources.master.gpus",
            f"{master} GPUs on the Master and {gpus} on each Worker, but nproc_per_node is one"
            f" number for all pods; set it to {gpus}, or leave it out",
        )


def _of_backend(backend: str, shape: Shape) -> Iterator[Conflict]:
    if backend in GONE:
        message = f"{backend!r} {GONE[backend]}; use gloo on CPUs or nccl on GPUs"
        yield Conflict("strategy.backend", message)
    elif backend not in BACKENDS:
        message = f"{backend!r} is no backend here; {_meant(backend, BACKENDS)}"
        yield Conflict("strategy.backend", message)
    elif backend == "nccl" and shape.gpus < shape.nproc_per_node:
        yield Conflict(
            "strategy.backend",
            f"'nccl' needs a GPU for each process, and there are {shape.gpus} for"
            f" {shape.nproc_per_node}; set resources.gpus, or use gloo",
        )


def _meant(word: str, known: Mapping[str, Any]) -> str:
    close = get_close_matches(word.lower(), list(known), n=1, cutoff=0.6)
    return f"did you mean {close[0]!r}?" if close else f"there is {', '.join(known)}"

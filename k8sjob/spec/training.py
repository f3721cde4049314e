"""How the ranks train together, and where they leave their checkpoints."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator

from k8sjob.compat import GONE
from k8sjob.spec.base import Count, Flag, Part, doc, refuse
from k8sjob.spec.names import AbsolutePath

__all__ = ["Checkpoint", "Strategy"]


def _backend(value: Any) -> Any:
    if isinstance(value, str) and value in GONE:
        refuse(f"{value!r} {GONE[value]}; use gloo on CPUs or nccl on GPUs")
    return value


def _every(value: Any) -> Any:
    steps = isinstance(value, int) and not isinstance(value, bool) and value >= 1
    if value != "epoch" and not steps:
        refuse(f"{value!r} is not an interval; write epoch, or a number of optimizer steps")
    return value


class Strategy(Part):
    """The strategy, its settings, and the backend of the process group."""

    kind: Annotated[
        Literal["ddp"],
        doc("ddp: every rank has the whole model, gradients are averaged.", "ddp"),
    ] = "ddp"
    accumulate: Annotated[
        Count,
        doc(
            "Batches whose gradients are added up before one optimizer step; they are synchronised"
            " once.",
            8,
            unit="batches",
        ),
    ] = 1
    sync_batchnorm: Annotated[
        Flag, doc("Batch norm over all ranks' batches instead of each rank's own.", True)
    ] = False
    backend: Annotated[
        Annotated[Literal["nccl", "gloo"] | None, BeforeValidator(_backend)],
        doc("Backend of the process group; null: nccl on GPUs, gloo on CPUs.", "gloo"),
    ] = None


class Checkpoint(Part):
    """Checkpoints, from which a restarted job goes on."""

    dir: Annotated[
        AbsolutePath,
        doc(
            "Folder in the container; it outlives the pods only on a volume that all of them"
            " mount.",
            "/checkpoints",
        ),
    ] = "/checkpoints"
    every: Annotated[
        Annotated[Literal["epoch"] | Count, BeforeValidator(_every)],
        doc("epoch, or a number of optimizer steps.", "epoch", 500, unit="steps"),
    ] = "epoch"
    keep: Annotated[Count, doc("How many whole checkpoints stay.", 3, unit="checkpoints")] = 3

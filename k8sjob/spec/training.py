"""How the ranks train together, and where they leave their checkpoints."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, Strict

from k8sjob.compat import GONE
from k8sjob.spec.base import Count, Flag, Part, doc, refuse
from k8sjob.spec.names import AbsolutePath, Text

__all__ = ["Checkpoint", "Strategy"]


def _backend(value: Any) -> Any:
    if isinstance(value, str) and value in GONE:
        refuse(f"{value!r} {GONE[value]}; use gloo on CPUs or nccl on GPUs")
    return value


def _pattern(value: str) -> str:
    try:
        re.compile(value)
    except re.error as error:
        refuse(f"{value!r} is no regular expression: {error}; write a name, as encoder.0")
    return value


Pattern = Annotated[Text, AfterValidator(_pattern)]


def _every(value: Any) -> Any:
    steps = isinstance(value, int) and not isinstance(value, bool) and value >= 1
    if value != "epoch" and not steps:
        refuse(f"{value!r} is not an interval; write epoch, or a number of optimizer steps")
    return value


class Strategy(Part):
    """The strategy, its settings, and the backend of the process group."""

    kind: Annotated[
        Literal["ddp", "fsdp"],
        doc(
            "ddp: every rank has the whole model, gradients are averaged. fsdp: every rank has a"
            " part of each parameter and gathers the rest as it is needed.",
            "ddp",
            "fsdp",
        ),
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
    clip_norm: Annotated[
        Annotated[float, Strict(), Field(gt=0, allow_inf_nan=False)] | None,
        doc(
            "Largest norm of the gradients of all parameters together, over all ranks: larger ones"
            " are scaled down to it; null: as they are.",
            1.0,
            unit="L2 norm",
        ),
    ] = None
    bf16: Annotated[
        Flag,
        doc(
            "Compute in bfloat16 where it is safe (autocast); parameters and optimizer stay as they"
            " are.",
            True,
        ),
    ] = False
    blocks: Annotated[
        tuple[Pattern, ...],
        doc(
            "Layers that fsdp gathers and checkpoint_activations recomputes as one, by name or"
            " regular expression of the whole name; empty: the members of nn.Sequential and"
            " nn.ModuleList.",
            [r"encoder\.layers\.\d+"],
        ),
    ] = ()
    checkpoint_activations: Annotated[
        Flag,
        doc("Keep only the inputs of each block for backward, and compute it again there.", True),
    ] = False
    compile: Annotated[
        Flag, doc("torch.compile the model; under fsdp each block by itself.", True)
    ] = False
    reshard: Annotated[
        Flag,
        doc(
            "fsdp: let go of gathered parameters between forward and backward; false takes more"
            " memory and less traffic.",
            False,
        ),
    ] = True
    backend: Annotated[
        Annotated[Literal["nccl", "gloo"] | None, BeforeValidator(_backend)],
        doc("Backend of the process group; null: nccl on GPUs, gloo on CPUs.", "gloo"),
    ] = None

    @property
    def settings(self) -> dict[str, Any]:
        """The strategy's settings that differ from its defaults, as JSON has them."""
        return self.model_dump(mode="json", exclude={"kind", "backend"}, exclude_defaults=True)


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

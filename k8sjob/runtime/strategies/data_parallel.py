"""torch's nn.DataParallel: one process that copies the model to its GPUs in every step.

For whoever has it and wants it unchanged; ddp does the same with a process a GPU, and faster. On a
CPU, or on one GPU, there is nothing to divide.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from k8sjob.runtime.mesh import Mesh
from k8sjob.runtime.step import forward_backward
from k8sjob.runtime.strategies import Strategy, assemble

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch import Tensor

    from k8sjob.runtime.process_group import Group

__all__ = ["prepare"]


def prepare(
    model: nn.Module, loss: Callable[..., Tensor], group: Group, options: Mapping[str, Any]
) -> Strategy:
    """The row of the table: DataParallel over the GPUs that this process sees."""
    several = group.device.type == "cuda" and torch.cuda.device_count() > 1
    wrapped = nn.DataParallel(model) if several else model
    step = partial(forward_backward, wrapped, loss, bf16=options["bf16"])

    def backward(inputs: Any, targets: tuple[Any, ...], *, scale: float, sync: bool) -> Tensor:  # noqa: ARG001 - alone, there is nobody to be in step with
        return step(inputs, targets, scale=scale)

    return assemble(model, Mesh(group), backward, bf16=options["bf16"], wrapped=wrapped)

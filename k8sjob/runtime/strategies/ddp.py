"""Data parallel strategies: every rank, or every GPU of one process, has the whole model."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from k8sjob.runtime.comm.mesh import Mesh
from k8sjob.runtime.strategies import sync_batchnorm
from k8sjob.runtime.strategies.api import Strategy, assemble
from k8sjob.runtime.strategies.blocks import prepare_layers
from k8sjob.runtime.strategies.step import forward_backward, replicate

if TYPE_CHECKING:
    from torch import Tensor

    from k8sjob.runtime.comm.process_group import Group
    from k8sjob.runtime.strategies.step import Loss, Options


def prepare(model: nn.Module, loss: Loss, group: Group, options: Options) -> Strategy:
    """The row of the table: DistributedDataParallel, or the bare model on a single rank."""
    if options["sync_batchnorm"]:
        model = sync_batchnorm.convert(model, group)
    # DistributedDataParallel has no hooks between the layers, so one graph can have all of them.
    prepare_layers(model, options, as_one=True)
    wrapped, backward = replicate(model, loss, group, bf16=options["bf16"])
    return assemble(model, Mesh(group), backward, bf16=options["bf16"], wrapped=wrapped)


def prepare_data_parallel(model: nn.Module, loss: Loss, group: Group, options: Options) -> Strategy:
    """nn.DataParallel: one process copies the model in every step to the GPUs that it sees.

    On a CPU, or on one GPU, there is nothing to divide.
    """
    # nn.DataParallel over one device only adds a layer of calls.
    several = group.device.type == "cuda" and torch.cuda.device_count() > 1
    wrapped = nn.DataParallel(model) if several else model
    step = partial(forward_backward, wrapped, loss, bf16=options["bf16"])

    def backward(inputs: Any, targets: tuple[Any, ...], *, scale: float, sync: bool) -> Tensor:  # noqa: ARG001 - a single process
        return step(inputs, targets, scale=scale)

    return assemble(model, Mesh(group), backward, bf16=options["bf16"], wrapped=wrapped)

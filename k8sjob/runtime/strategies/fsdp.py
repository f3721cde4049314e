"""Fully sharded: every rank has a part of each parameter, of its gradient and optimizer state.

A block's parameters are gathered before it computes and let go of after it, so that a rank holds
1/world_size of the model and one block whole. Results are those of data parallel.
"""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from k8sjob.runtime.checkpoint import model_state
from k8sjob.runtime.comm.mesh import Mesh, broadcast_state
from k8sjob.runtime.strategies import sync_batchnorm
from k8sjob.runtime.strategies.api import Strategy, assemble
from k8sjob.runtime.strategies.blocks import prepare_layers
from k8sjob.runtime.strategies.step import clip_gradients, forward_backward

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import Tensor, nn
    from torch.optim import Optimizer

    from k8sjob.runtime.comm.process_group import Group
    from k8sjob.runtime.strategies.step import Loss, Options


def prepare(model: nn.Module, loss: Loss, group: Group, options: Options) -> Strategy:
    """The row of the table: FSDP2, or the bare model on a single rank."""
    if options["sync_batchnorm"]:
        model = sync_batchnorm.convert(model, group)
    blocks = prepare_layers(model, options)
    mesh = Mesh(group)
    if group.world_size > 1:
        # All ranks cut their parts out of one model, that of rank 0.
        broadcast_state(model, group)
        _shard(model, blocks, mesh, options)
    else:
        model.to(group.device)

    def backward(inputs: Any, targets: tuple[Any, ...], *, scale: float, sync: bool) -> Tensor:
        if isinstance(model, FSDPModule):
            # Without synchronization, the gradients of a window are kept whole on each rank.
            model.set_requires_gradient_sync(sync)
        # Each block gathers its parameters from the other ranks, so every step waits for them.
        with group.waiting() if isinstance(model, FSDPModule) else nullcontext():
            return forward_backward(model, loss, inputs, targets, scale=scale, bf16=options["bf16"])

    def parts(optimizer: Optimizer) -> dict[str, Any]:
        for module in model.modules():  # of what an evaluation gathered, and no backward freed
            if isinstance(module, FSDPModule):
                module.reshard()
        return model_state.parts(model, optimizer)

    return assemble(
        model,
        mesh,
        backward,
        bf16=options["bf16"],
        clip=partial(clip_gradients, ranks=mesh.process_group("data")),
        parts=parts,
        sharded=group.world_size > 1,
    )


def _shard(model: nn.Module, blocks: Iterable[nn.Module], mesh: Mesh, options: Options) -> None:
    # bfloat16 goes over the wire too; the sums of gradients stay in single precision.
    policy = MixedPrecisionPolicy()
    if options["bf16"]:
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    # Each block goes to the device as it is divided, so no GPU has all of them whole.
    ranks, reshard = mesh.axis("data"), options["reshard"]
    for block in blocks:
        fully_shard(block, mesh=ranks, mp_policy=policy, reshard_after_forward=reshard)
    # The root has what is in no block. By default it stays whole after its forward pass, since the
    # backward pass begins with it.
    fully_shard(model, mesh=ranks, mp_policy=policy)

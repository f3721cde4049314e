"""Data parallel: every rank has the whole model and a share of each batch."""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

from torch.nn.parallel import DistributedDataParallel

from k8sjob.runtime import sync_batchnorm
from k8sjob.runtime.blocks import compile_forward, find_blocks, recompute
from k8sjob.runtime.mesh import Mesh
from k8sjob.runtime.step import forward_backward
from k8sjob.runtime.strategies import Strategy, assemble

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch import Tensor, nn

    from k8sjob.runtime.process_group import Group

__all__ = ["prepare"]


def prepare(
    model: nn.Module, loss: Callable[..., Tensor], group: Group, options: Mapping[str, Any]
) -> Strategy:
    """The row of the table: DistributedDataParallel, or the bare model on one rank alone."""
    if options["sync_batchnorm"]:
        model = sync_batchnorm.convert_for(model, group)
    if options["checkpoint_activations"]:
        recompute(find_blocks(model, options["blocks"]).values())
    if options["compile"]:
        compile_forward([model])
    wrapped: nn.Module = model
    if group.world_size > 1:
        on_gpu = [group.device] if group.device.type == "cuda" else None
        wrapped = DistributedDataParallel(model, device_ids=on_gpu)

    def backward(inputs: Any, targets: tuple[Any, ...], *, scale: float, sync: bool) -> Tensor:
        """With sync=False nothing is sent."""
        silent = not sync and isinstance(wrapped, DistributedDataParallel)
        with wrapped.no_sync() if silent else nullcontext():  # type: ignore[operator]  # silent: it is DDP
            value = forward_backward(
                wrapped,
                loss,
                inputs,
                targets,
                scale=scale,
                bf16=options["bf16"],
                between=lambda: group.on_phase("sync" if sync else "compute"),
            )
        group.on_phase("compute")
        return value

    return assemble(model, Mesh(group), backward, bf16=options["bf16"], wrapped=wrapped)

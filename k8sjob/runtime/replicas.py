"""A whole model on every rank, and gradients that torch averages while it computes them."""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

from torch.nn.parallel import DistributedDataParallel

from k8sjob.runtime.step import forward_backward

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor, nn

    from k8sjob.runtime.process_group import Group
    from k8sjob.runtime.strategies import Backward

__all__ = ["replicate"]


def replicate(
    model: nn.Module, loss: Callable[..., Tensor], group: Group, *, bf16: bool
) -> tuple[nn.Module, Backward]:
    """The model under DistributedDataParallel, or as it is on one rank alone, and its step.

    Args:
        model: on the group's device; all ranks take rank 0's parameters and buffers.
        loss: loss(output, *targets) -> the mean over the batch.
        group: the ranks.
        bf16: whether to compute in bfloat16.

    Returns:
        What the forward pass of a training step goes through, and the step; with sync=False it
        sends nothing.
    """
    wrapped: nn.Module = model
    if group.world_size > 1:
        on_gpu = [group.device] if group.device.type == "cuda" else None
        wrapped = DistributedDataParallel(model, device_ids=on_gpu, gradient_as_bucket_view=True)

    def backward(inputs: Any, targets: tuple[Any, ...], *, scale: float, sync: bool) -> Tensor:
        silent = not sync and isinstance(wrapped, DistributedDataParallel)
        try:
            with wrapped.no_sync() if silent else nullcontext():  # type: ignore[operator]  # silent: it is DDP
                return forward_backward(
                    wrapped,
                    loss,
                    inputs,
                    targets,
                    scale=scale,
                    bf16=bf16,
                    between=lambda: group.on_phase("sync" if sync else "compute"),
                )
        finally:
            group.on_phase("compute")

    return wrapped, backward

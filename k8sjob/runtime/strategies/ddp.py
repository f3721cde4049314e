"""Data parallel: every rank has the whole model and a share of each batch."""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.parallel import DistributedDataParallel

from k8sjob.runtime import sync_batchnorm
from k8sjob.runtime.strategies import call

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch import Tensor, nn

    from k8sjob.runtime.process_group import Group

__all__ = ["DataParallel", "prepare"]


class DataParallel:
    """A model under DistributedDataParallel; the bare model where there is one rank alone."""

    def __init__(self, model: nn.Module, loss: Callable[..., Tensor], group: Group) -> None:
        self.model, self._loss, self._group = model, loss, group
        self.wrapped: nn.Module = model
        if group.world_size > 1:
            on_gpu = [group.device] if group.device.type == "cuda" else None
            self.wrapped = DistributedDataParallel(model, device_ids=on_gpu)

    def backward(
        self, inputs: Any, targets: tuple[Any, ...], *, scale: float, sync: bool
    ) -> Tensor:
        """Forward and backward; with sync=False nothing is sent."""
        wrapped = self.wrapped
        silent = not sync and isinstance(wrapped, DistributedDataParallel)
        with wrapped.no_sync() if silent else nullcontext():  # type: ignore[operator]  # silent: it is DDP
            loss = self._loss(call(wrapped, inputs), *targets)
            if loss.ndim:
                raise ValueError(
                    f"the loss has the shape {tuple(loss.shape)}, and must be one number, the mean "
                    "over the batch; leave reduction at its default, or call .mean()"
                )
            scaled = loss if scale == 1.0 else loss * scale
            if sync:
                self._group.on_phase("sync")
            scaled.backward()  # type: ignore[no-untyped-call]  # torch leaves it so
        self._group.on_phase("compute")
        return loss.detach()

    def settle(self) -> None:
        """Rank 0's buffers for all, as DDP itself does before each forward in training."""
        if self._group.world_size > 1:
            for buffer in self.model.buffers():
                buffer.copy_(self._group.broadcast(buffer))


def prepare(
    model: nn.Module, loss: Callable[..., Tensor], group: Group, options: Mapping[str, Any]
) -> DataParallel:
    """The row of the table; options: accumulate (used by the loop), sync_batchnorm."""
    if options.get("sync_batchnorm") and group.world_size > 1:
        if group.backend == "nccl":
            stock = torch.nn.SyncBatchNorm
            model = stock.convert_sync_batchnorm(model)  # type: ignore[no-untyped-call]  # torch leaves it so
        else:
            model = sync_batchnorm.convert(model)
    return DataParallel(model, loss, group)

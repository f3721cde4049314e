"""Batch normalization over the batches of all ranks, with any backend.

torch's own SyncBatchNorm works only on GPUs. This one reduces the moments of the batch by a
differentiable all_reduce, so that outputs, gradients and running statistics are those of the whole
batch in one process.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules.batchnorm import _BatchNorm

if TYPE_CHECKING:
    from k8sjob.runtime.comm.process_group import Group


class _AllReduce(torch.autograd.Function):
    """The sum over the ranks; its gradient is the sum of the ranks' gradients."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, ranks: Any) -> Tensor:
        ctx.ranks = ranks
        total = value.clone()
        dist.all_reduce(total, group=ranks)
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        # all_reduce writes into its tensor, and autograd may still use this gradient; collectives
        # take contiguous ones only.
        total = gradients[0].contiguous().clone()
        dist.all_reduce(total, group=ctx.ranks)
        return total, None


class SyncBatchNorm(_BatchNorm):  # DistributedDataParallel refuses torch's on CPUs
    """BatchNorm1d, 2d and 3d over all ranks; same parameters, buffers and state_dict.

    Takes (N, C, ...); N may differ between the ranks. Every rank must call it equally often.
    """

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - torch's name
        """Normalize with the moments of all ranks' batches; in eval mode as torch, on each rank."""
        if input.ndim < 2:
            raise ValueError(f"SyncBatchNorm takes (N, C, ...), got {tuple(input.shape)}")
        if not self.training:  # where ranks may have unequally many batches
            # Without running moments torch normalizes an evaluation by its own batch, too.
            moments, alone = (self.running_mean, self.running_var), self.running_mean is None
            return functional.batch_norm(
                input, *moments, self.weight, self.bias, training=alone, eps=self.eps
            )
        mean, variance, count = self._moments(input)
        if self.running_mean is not None:
            self._remember(mean.detach(), variance.detach(), count)
        shape = (1, -1, *(1 for _ in input.shape[2:]))
        factor = torch.rsqrt(variance + self.eps)
        factor = factor * self.weight if self.affine else factor
        shift = self.bias - mean * factor if self.affine else -mean * factor
        return input * factor.to(input.dtype).view(shape) + shift.to(input.dtype).view(shape)

    def _moments(self, batch: Tensor) -> tuple[Tensor, Tensor, float]:
        """Mean, biased variance (C each, float64) and values per channel, over all ranks.

        Each rank sends its sums about a center that all share: about zero they would cancel.
        """
        dims = [axis for axis in range(batch.ndim) if axis != 1]
        count = batch.numel() // batch.shape[1]
        # Of this rank's batch, in its own type; what the ranks add up is float64.
        variance, mean = torch.var_mean(batch, dims, correction=0)
        center = mean.new_zeros(mean.shape) if self.running_mean is None else self.running_mean
        apart = (mean - center).double()
        first, second = count * apart, count * (variance.double() + apart.square())
        ranks = self.process_group
        total = _AllReduce.apply(torch.cat([first, second, first.new_tensor([count])]), ranks)
        channels = mean.shape[0]
        values = float(total[-1].detach())
        if values <= 1:
            raise ValueError(
                f"one value per channel over all ranks, input {tuple(batch.shape)}: batch "
                "normalization needs more in training; use a larger batch"
            )
        apart = total[:channels] / values
        spread = total[channels:-1] / values - apart.square()
        return center.double() + apart, spread.clamp_min(0), values

    def _remember(self, mean: Tensor, variance: Tensor, count: float) -> None:
        """Move the running moments, with the unbiased variance, as torch's BatchNorm does."""
        if self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
        weight = self.momentum
        if weight is None:
            # momentum=None is torch's cumulative average.
            weight = 1.0 / float(self.num_batches_tracked or 1)
        unbiased = variance * (count / (count - 1))
        for running, value in ((self.running_mean, mean), (self.running_var, unbiased)):
            if running is not None:
                running.lerp_(value.to(running.dtype), weight)


def convert(model: nn.Module, group: Group, ranks: Any = None) -> nn.Module:
    """The model with its batch normalization synchronized over `ranks`, torch's own for nccl.

    Parameters and buffers are kept. A group of one changes nothing.
    """
    if group.world_size == 1:
        return model
    # torch finds the layers and moves their parameters; below, only the class is another one.
    model = nn.SyncBatchNorm.convert_sync_batchnorm(model, ranks)  # type: ignore[no-untyped-call]  # torch leaves it so
    for module in model.modules():
        if type(module) is nn.SyncBatchNorm and group.backend != "nccl":
            module.__class__ = SyncBatchNorm  # type: ignore[assignment]  # it has the same state
    return model

"""Training step: forward and backward for a batch, replicas, and gradients over ranks."""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import get_total_norm
from torch.utils._pytree import tree_leaves

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from contextlib import AbstractContextManager

    from torch import Tensor, nn
    from torch.optim import Optimizer

    from k8sjob.runtime.comm.mesh import Mesh
    from k8sjob.runtime.comm.process_group import Group

    Loss = Callable[..., Tensor]
    """A user's loss: the model's output and the targets -> the mean over the batch."""
    Options = Mapping[str, Any]
    """All settings of a strategy, which the caller has checked."""


class Backward(Protocol):
    """Forward and backward for one batch; adds to the parameters' gradients."""

    def __call__(
        self, inputs: Any, targets: tuple[Any, ...], *, scale: float, sync: bool
    ) -> Tensor:
        """Train on a batch.

        Args:
            inputs: what the model takes: a tensor, a tuple of arguments or a dict of them.
            targets: what the loss takes after the output.
            scale: factor for the loss (see data.BatchShard).
            sync: average the gradients over the ranks after this batch.

        Returns:
            The mean loss over this rank's batch, not scaled, detached; on the model's device.
        """


def call(model: nn.Module, inputs: Any) -> Any:
    """The model's output for a tensor, a tuple or list of arguments, or a dict of them."""
    if isinstance(inputs, dict):
        return model(**inputs)
    if isinstance(inputs, tuple | list):
        return model(*inputs)
    return model(inputs)


def autocast(device: torch.device, *, bf16: bool) -> AbstractContextManager[Any]:
    """A context in which operations that tolerate bfloat16 use it; parameters keep their type."""
    return torch.autocast(device.type, dtype=torch.bfloat16) if bf16 else nullcontext()


def forward(model: nn.Module, inputs: Any, *, bf16: bool) -> Any:
    """The output for an evaluation; metrics get it in single precision."""
    with autocast(next(model.parameters()).device, bf16=bf16):
        output = call(model, inputs)
    # numpy has no bfloat16, and sums in it lose the small addends.
    half = isinstance(output, torch.Tensor) and output.dtype == torch.bfloat16
    return output.float() if half else output


def mean_loss(loss: Loss, output: Any, targets: tuple[Any, ...]) -> Tensor:
    """The user's loss, which must be one number."""
    value = loss(output, *targets)
    if value.ndim:
        raise ValueError(
            f"the loss has the shape {tuple(value.shape)}, and must be one number, the mean "
            "over the batch; leave reduction at its default, or call .mean()"
        )
    return value


def forward_backward(
    model: nn.Module,
    loss: Loss,
    inputs: Any,
    targets: tuple[Any, ...],
    *,
    scale: float,
    bf16: bool,
    between: Callable[[], None] = lambda: None,
) -> Tensor:
    """Add a batch's gradients to the parameters', scaled; `between` is called before backward.

    Returns:
        The mean loss, not scaled, detached.
    """
    with autocast(next(model.parameters()).device, bf16=bf16):
        output = call(model, inputs)
        value = mean_loss(loss, output, targets)
    between()
    # Most steps need no factor, and so no operation for it.
    scaled = value if scale == 1.0 else value * scale
    if not scale and not scaled.isfinite():
        # A mean over no tokens is nan, and so are its gradients, even times 0. The other ranks wait
        # for this one's, which are 0.
        outputs = (leaf for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor))
        zeros = [leaf.sum() * 0.0 for leaf in outputs if leaf.requires_grad]
        scaled = sum(zeros[1:], start=zeros[0]) if zeros else value.nan_to_num() * 0.0
    scaled.backward()  # type: ignore[no-untyped-call]  # torch leaves it so
    return value.detach()


def replicate(
    model: nn.Module, loss: Loss, group: Group, *, bf16: bool
) -> tuple[nn.Module, Backward]:
    """The model under DistributedDataParallel, or as it is on a single rank, and its step.

    Returns:
        What the forward pass of a training step goes through, and the step; with sync=False it
        sends nothing.
    """
    wrapped: nn.Module = model
    if group.world_size > 1:
        on_gpu = [group.device] if group.device.type == "cuda" else None
        # Gradients are views of the buckets that are sent: one copy of them less in memory.
        wrapped = DistributedDataParallel(model, device_ids=on_gpu, gradient_as_bucket_view=True)

    def backward(inputs: Any, targets: tuple[Any, ...], *, scale: float, sync: bool) -> Tensor:
        # no_sync() must be around the forward pass too: torch reads it there.
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
                    # DistributedDataParallel sends in the backward pass. A rank that hangs in its
                    # own forward pass is found by the phase: the others are in "sync".
                    between=lambda: group.on_phase("sync" if sync else "compute"),
                )
        finally:
            group.on_phase("compute")

    return wrapped, backward


def check_groups(optimizer: Optimizer) -> None:
    """Refuse an optimizer whose state could not be put together from several places."""
    if len(optimizer.param_groups) > 1:
        raise ValueError(
            f"the optimizer has {len(optimizer.param_groups)} groups of parameters, and a model"
            " that is in several places can have one; give optimizer=(class, arguments)"
        )


class MixedError(RuntimeError):
    """A plain parameter got a distributed gradient."""


def synchronize(model: nn.Module, mesh: Mesh) -> None:
    """Bring gradients to their parameters' placements, and average them along data."""
    gradients = []
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        gradient = parameter.grad
        # The ranks would average lists of unequal lengths, and hang or mix up parameters.
        if gradient is None:
            raise RuntimeError(
                f"{name} has no gradient: the loss does not depend on it; use it, or call"
                " requires_grad_(False) on it"
            )
        if isinstance(gradient, DTensor):
            # A parameter that no layout names was used with a divided tensor outside of its own
            # layer.
            if not isinstance(parameter, DTensor):
                raise MixedError(name)
            if gradient.placements != parameter.placements:
                # A gradient may come as a partial sum over the axis model, or divided in another
                # way.
                gradient = gradient.redistribute(placements=parameter.placements)
                parameter.grad = gradient
        gradients.append(local(gradient))
    mesh.average(gradients)


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor that may be distributed."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def scale_gradients(optimizer: Optimizer, factor: Tensor) -> None:
    """Multiply all gradients, which are synchronised already, by a number."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is not None:
                gradient = local(parameter.grad)
                gradient.mul_(factor.to(gradient.device))


def clip_gradients(
    optimizer: Optimizer, largest: float | None, *, ranks: Any = None, sharded: bool = False
) -> Tensor:
    """Scale all gradients down so that the norm of all of them together is at most `largest`.

    Args:
        optimizer: of this rank's parameters, whose gradients are synchronised already.
        largest: L2 norm; None: only measure.
        ranks: process group of those that have the other parts; None where each has all of them.
        sharded: whether no two of these ranks have the same parameter; else DTensors that are
            sharded count on every rank, and the others once.

    Returns:
        The norm before, the same on all ranks.
    """
    parameters = (item for group in optimizer.param_groups for item in group["params"])
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    apart = [sharded or _is_sharded(gradient) for gradient in gradients]
    parts = [local(gradient).detach() for gradient in gradients]
    # Squares of parts add up over the ranks; of what all ranks have, they count once.
    mine = get_total_norm([part for part, is_apart in zip(parts, apart, strict=True) if is_apart])
    shared = get_total_norm(
        [part for part, is_apart in zip(parts, apart, strict=True) if not is_apart]
    )
    device = parts[0].device if parts else torch.device("cpu")
    square = mine.to(device).square()
    if ranks is not None:
        dist.all_reduce(square, group=ranks)
    norm: Tensor = (square + shared.to(device).square()).sqrt()
    if largest is None:
        return norm
    factor = (largest / (norm + 1e-6)).clamp(max=1.0)  # torch.nn.utils.clip_grad_norm_'s
    for part in parts:
        part.mul_(factor.to(part.device))
    return norm


def _is_sharded(gradient: Tensor) -> bool:
    return isinstance(gradient, DTensor) and any(
        placement.is_shard() for placement in gradient.placements
    )

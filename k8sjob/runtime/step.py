"""Forward and backward for one batch, and what is the same in all strategies around them."""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

    from torch import Tensor, nn

__all__ = ["autocast", "call", "forward", "forward_backward", "mean_loss"]


def call(model: nn.Module, inputs: Any) -> Any:
    """The model's output for a tensor, a tuple or list of arguments, or a dict of them."""
    if isinstance(inputs, dict):
        return model(**inputs)
    if isinstance(inputs, tuple | list):
        return model(*inputs)
    return model(inputs)


def autocast(device: torch.device, *, bf16: bool) -> AbstractContextManager[Any]:
    """Where bfloat16 is used for what can bear it; parameters keep their type."""
    return torch.autocast(device.type, dtype=torch.bfloat16) if bf16 else nullcontext()


def forward(model: nn.Module, inputs: Any, *, bf16: bool) -> Any:
    """The output for an evaluation; metrics get it in single precision."""
    with autocast(next(model.parameters()).device, bf16=bf16):
        output = call(model, inputs)
    half = isinstance(output, torch.Tensor) and output.dtype == torch.bfloat16
    return output.float() if half else output


def mean_loss(loss: Callable[..., Tensor], output: Any, targets: tuple[Any, ...]) -> Tensor:
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
    loss: Callable[..., Tensor],
    inputs: Any,
    targets: tuple[Any, ...],
    *,
    scale: float,
    bf16: bool,
    between: Callable[[], None] = lambda: None,
) -> Tensor:
    """Add a batch's gradients to the parameters'.

    Args:
        model: what the forward pass goes through, wrappers included.
        loss: loss(output, *targets) -> the mean over the batch.
        inputs: what the model takes.
        targets: what the loss takes after the output.
        scale: factor for the loss (see data.Share).
        bf16: whether to compute in bfloat16.
        between: called between forward and backward.

    Returns:
        The mean loss, not scaled, detached.
    """
    with autocast(next(model.parameters()).device, bf16=bf16):
        value = mean_loss(loss, call(model, inputs), targets)
    between()
    scaled = value if scale == 1.0 else value * scale
    scaled.backward()  # type: ignore[no-untyped-call]  # torch leaves it so
    return value.detach()

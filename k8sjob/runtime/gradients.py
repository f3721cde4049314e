"""The norm of a gradient of which each rank has a part, and clipping by it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.nn.utils import get_total_norm

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import Tensor, nn
    from torch.nn import Parameter

    from k8sjob.runtime.mesh import Mesh

__all__ = ["MixedError", "clip", "local", "synchronise"]


class MixedError(RuntimeError):
    """A plain parameter got a distributed gradient."""


def synchronise(model: nn.Module, mesh: Mesh) -> None:
    """Each gradient as its parameter lies, and the mean along data.

    Raises:
        RuntimeError: a parameter has no gradient, or a MixedError.
    """
    found = []
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        gradient = parameter.grad
        if gradient is None:
            raise RuntimeError(
                f"{name} has no gradient: the loss does not depend on it; use it, or call"
                " requires_grad_(False) on it"
            )
        if isinstance(gradient, DTensor):
            if not isinstance(parameter, DTensor):
                raise MixedError(name)
            if gradient.placements != parameter.placements:
                gradient = gradient.redistribute(placements=parameter.placements)
                parameter.grad = gradient
        found.append(local(gradient))
    mesh.average(found)


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor that may be distributed."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def clip(
    parameters: Iterable[Parameter],
    largest: float | None,
    *,
    ranks: Any = None,
    parted: bool = False,
) -> Tensor:
    """Scale all gradients down so that the norm of all of them together is at most `largest`.

    Args:
        parameters: this rank's, with gradients that are synchronised already.
        largest: L2 norm; None: all stay as they are, and are measured.
        ranks: process group of those that have the other parts; None where each has all of them.
        parted: whether no two of these ranks have the same parameter; else those that are sharded
            count on every rank and the others once.

    Returns:
        The norm before, the same on all ranks.
    """
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    apart = [parted or _sharded(gradient) for gradient in gradients]
    parts = [local(gradient).detach() for gradient in gradients]
    mine = get_total_norm([part for part, own in zip(parts, apart, strict=True) if own])
    shared = get_total_norm([part for part, own in zip(parts, apart, strict=True) if not own])
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


def _sharded(gradient: Tensor) -> bool:
    return isinstance(gradient, DTensor) and any(
        placement.is_shard() for placement in gradient.placements
    )

"""The whole state of a model of which each rank has a part, as one process would have it.

So a checkpoint has the same form whatever wrote it: plain tensors under the model's own names, the
optimizer's state under the numbers of the parameters. One strategy may resume what another saved.
"""

from __future__ import annotations

from collections import Counter
from copy import copy
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.tensor import DTensor, Replicate

from k8sjob.runtime.shards import Stored, gathered

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.optim import Optimizer

__all__ = ["capture", "divided_alone", "is_divided", "part", "parts", "placed", "restore", "whole"]


def parts(model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    """The states of both as this rank has them: its parts of the distributed tensors."""
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}


def capture(model: nn.Module, optimizer: Optimizer, *, keep: bool) -> dict[str, Any]:
    """A copy of the states of both, whole and in host memory.

    All ranks call it, since the parts are gathered one by one.

    Args:
        model: with parameters that may be distributed.
        optimizer: of these parameters.
        keep: whether this rank needs the result; the others only take part.
    """
    found: dict[str, Any] = whole(parts(model, optimizer), keep=keep)
    return found


def restore(model: nn.Module, optimizer: Optimizer, state: dict[str, Any]) -> None:
    """Put back what capture gave; all ranks have the whole state, and take their parts of it.

    Of a tensor that lies in a checkpoint still, no more than the part is read.

    Raises:
        RuntimeError, ValueError, KeyError: it belongs to another model or optimizer.
    """
    now = model.state_dict()
    weights = {name: part(value, now.get(name)) for name, value in state["model"].items()}
    model.load_state_dict(weights)
    parameters = [item for group in optimizer.param_groups for item in group["params"]]
    by_number = {
        number: {key: part(value, parameters[number]) for key, value in numbers.items()}
        for number, numbers in state["optimizer"]["state"].items()
        if number < len(parameters)
    }
    rest = {key: gathered(value) for key, value in state["optimizer"].items() if key != "state"}
    optimizer.load_state_dict({**rest, "state": by_number})


def whole(value: Any, *, keep: bool) -> Any:
    """A nest of containers with plain tensors of its own in host memory; all ranks call it.

    Args:
        value: with tensors that may be distributed.
        keep: whether this rank needs the result.
    """
    if isinstance(value, DTensor):
        full = value.full_tensor().detach()
        if not keep:
            return full.new_empty(0)
        # Of a tensor that every rank has whole it is the very memory that the optimizer changes.
        own = full.untyped_storage().data_ptr() != value.to_local().untyped_storage().data_ptr()
        return full.cpu() if own else full.to("cpu", copy=True)
    if isinstance(value, torch.Tensor):
        return value.detach().to("cpu", copy=True) if keep else value
    if isinstance(value, dict) and not isinstance(value, Counter):  # of a scheduler
        return {key: whole(item, keep=keep) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(whole(item, keep=keep) for item in value)
    return copy(value)


def is_divided(value: Any) -> bool:
    """Whether there is a distributed tensor in a nest of containers."""
    if isinstance(value, dict):
        return any(map(is_divided, value.values()))
    if isinstance(value, list | tuple):
        return any(map(is_divided, value))
    return isinstance(value, DTensor)


def divided_alone(value: Any) -> Any:
    """A nest of containers with its distributed tensors, and None in the place of any other."""
    if isinstance(value, DTensor):
        return value
    if isinstance(value, dict):
        return {key: divided_alone(item) for key, item in value.items()}
    if type(value) in {list, tuple}:
        return type(value)(map(divided_alone, value))
    return None


def placed(value: Any, like: Any) -> Any:
    """A nest of containers with each tensor divided as the one in the same place of another nest.

    All ranks call it. What has no counterpart there is whole, and on the CPU.
    """
    if isinstance(value, dict) and not isinstance(value, Counter):
        others = like if isinstance(like, dict) else {}
        return {key: placed(item, others.get(key)) for key, item in value.items()}
    if isinstance(value, list | tuple):
        pairs = like if isinstance(like, list | tuple) else ()
        return type(value)(map(placed, value, [*pairs, *[None] * len(value)]))
    return part(value, like)


def part(value: Any, like: Tensor | None) -> Any:
    """A whole tensor, or a stored one, divided as another one is.

    Raises:
        ValueError: that one has no memory.
    """
    stored = isinstance(value, Stored)
    whole_one = stored or isinstance(value, torch.Tensor)
    if not (whole_one and isinstance(like, DTensor) and value.shape == like.shape):
        return value.whole() if stored else value
    if like.device.type == "meta":
        raise ValueError(
            "the state that tells how to divide has no memory (device meta): give its modules"
            " some first, by to_empty(device=...)"
        )
    if stored:
        return value.divided_as(like)
    # All ranks have it whole, so each takes its part, and torch sends nothing.
    mesh = like.device_mesh
    everywhere = [Replicate()] * mesh.ndim
    have = DTensor.from_local(value.to(like.device), mesh, everywhere, run_check=False)
    return have.redistribute(placements=like.placements)

"""A strategy's interface: a model, ready to be trained over the ranks, and what most have alike.

A strategy owns the step (forward and backward), since some of them cut it in pieces. Everything
else (data, checkpoints, reports) is the same for all.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from k8sjob.runtime.checkpoint import model_state
from k8sjob.runtime.comm.mesh import broadcast_state
from k8sjob.runtime.strategies.step import Backward, clip_gradients, forward

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor, nn
    from torch.optim import Optimizer

    from k8sjob.runtime.comm.mesh import Mesh


@dataclass(frozen=True, kw_only=True)
class Strategy:
    """A model, ready to be trained over the ranks.

    Attributes:
        model: the model itself, without wrappers: for the optimizer and for evaluation.
        wrapped: what the forward pass of a training step goes through.
        mesh: the ranks, and which of them divide the data.
        backward: the step.
        forward: inputs -> the output for an evaluation, None on a rank that has none; all ranks
            call it equally often.
        settle: makes the model equal on all ranks where training lets it differ (buffers).
        clip: (optimizer, largest) -> the gradients' norm, after which they are scaled down to
            `largest`, or left alone for None; None if they are in no one place.
        capture: optimizer -> a copy of the whole state of both in rank 0's host memory; all ranks
            take part.
        parts: optimizer -> what this rank has of that, under the same keys; None where some of it
            is on no rank.
        sharded: whether ranks have different parts.
        restore: (optimizer, state) restores what capture gave, under this strategy or another.
        ready: called with the optimizer once it is made.
        counts: whether this rank has outputs whose losses and metrics count.
        rng_stream: ranks with the same number draw the same random numbers.
    """

    model: nn.Module
    wrapped: nn.Module
    mesh: Mesh
    backward: Backward
    forward: Callable[[Any], Any]
    settle: Callable[[], None]
    clip: Callable[[Optimizer, float | None], Tensor | None]
    capture: Callable[[Optimizer], dict[str, Any]]
    parts: Callable[[Optimizer], dict[str, Any]] | None
    sharded: bool
    restore: Callable[[Optimizer, dict[str, Any]], None]
    ready: Callable[[Optimizer], None]
    counts: bool
    rng_stream: int


def assemble(
    model: nn.Module, mesh: Mesh, backward: Backward, *, bf16: bool = False, **fields: Any
) -> Strategy:
    """A strategy; what is not given is that of a model that each rank has whole."""
    # None, as of parameter servers, comes with a capture of its own: no rank has all of the state.
    parts = fields.setdefault("parts", partial(model_state.parts, model))
    common = {
        "wrapped": model,
        "forward": partial(forward, model, bf16=bf16),
        "settle": partial(broadcast_state, model, mesh.group, only_buffers=True),
        "clip": clip_gradients,
        # All ranks take part where tensors are DTensors; only rank 0 keeps the copies.
        "capture": lambda optimizer: model_state.whole(parts(optimizer), keep=mesh.group.rank == 0),
        "sharded": False,
        "restore": partial(model_state.restore, model),
        "ready": lambda _: None,
        "counts": mesh.model_rank == 0,  # one rank of each copy of the model
        "rng_stream": mesh.data_rank,
    }
    return Strategy(model=model, mesh=mesh, backward=backward, **{**common, **fields})

"""How a model is trained over the ranks: one module a strategy, one row of the table each.

A strategy owns the step (forward and backward), since some of them cut it in pieces. Everything
else (data, checkpoints, reports) is the same for all.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any, Protocol

from k8sjob.compat import STRATEGIES
from k8sjob.runtime import full_state, gradients
from k8sjob.runtime.mesh import equalise_buffers
from k8sjob.runtime.step import forward

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch import Tensor, nn
    from torch.optim import Optimizer

    from k8sjob.runtime.mesh import Mesh
    from k8sjob.runtime.process_group import Group

__all__ = ["Backward", "Strategy", "assemble", "clipping", "strategy"]


class Backward(Protocol):
    """Forward and backward for one batch; adds to the parameters' gradients."""

    def __call__(
        self, inputs: Any, targets: tuple[Any, ...], *, scale: float, sync: bool
    ) -> Tensor:
        """Train on a batch.

        Args:
            inputs: what the model takes: a tensor, a tuple of arguments or a dict of them.
            targets: what the loss takes after the output.
            scale: factor for the loss (see data.Share).
            sync: average the gradients over the ranks after this batch.

        Returns:
            The mean loss over this rank's batch, not scaled, detached; on the model's device.
        """


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
            `largest`, or left alone for None; None where they are in no one place.
        capture: optimizer -> a copy of the whole state of both in rank 0's host memory; all ranks
            take part.
        parts: optimizer -> what this rank has of that, under the same keys; None where some of it
            is on no rank.
        parted: whether ranks have different parts.
        restore: (optimizer, state) takes up what capture gave, under this strategy or another.
        ready: told of the optimizer once it is made.
        counts: whether this rank has outputs whose losses and metrics count.
        stream: ranks with the same number draw the same random numbers.
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
    parted: bool
    restore: Callable[[Optimizer, dict[str, Any]], None]
    ready: Callable[[Optimizer], None]
    counts: bool
    stream: int


def assemble(
    model: nn.Module, mesh: Mesh, backward: Backward, *, bf16: bool = False, **own: Any
) -> Strategy:
    """A strategy from what is its own; the rest is that of a model that each rank has whole."""
    keep = mesh.group.rank == 0
    common = {
        "wrapped": model,
        "forward": partial(forward, model, bf16=bf16),
        "settle": partial(equalise_buffers, model, mesh.group),
        "clip": clipping(),
        "capture": partial(full_state.capture, model, keep=keep),
        "parts": partial(full_state.parts, model),
        "parted": False,
        "restore": partial(full_state.restore, model),
        "ready": lambda _: None,
        "counts": mesh.has_data,
        "stream": mesh.data_rank,
    }
    return Strategy(model=model, mesh=mesh, backward=backward, **{**common, **own})


def clipping(
    ranks: Any = None, *, parted: bool = False
) -> Callable[[Optimizer, float | None], Tensor]:
    """Strategy.clip where these ranks have the parts of a model: see gradients.clip."""

    def clip(optimizer: Optimizer, largest: float | None) -> Tensor:
        parameters = [item for group in optimizer.param_groups for item in group["params"]]
        return gradients.clip(parameters, largest, ranks=ranks, parted=parted)

    return clip


def strategy(
    kind: str,
    model: nn.Module,
    loss: Callable[..., Tensor],
    group: Group,
    options: Mapping[str, Any],
) -> Strategy:
    """A model under a strategy.

    Args:
        kind: a key of compat.STRATEGIES, with a module of its name here; the caller has checked it
            and its options.
        model: the same on all ranks.
        loss: loss(output, *targets) -> the mean over the batch's samples, a scalar.
        group: the ranks.
        options: all of the strategy's settings.

    Raises:
        ValueError: the settings do not fit the model.
    """
    prepare = import_module(f"k8sjob.runtime.strategies.{kind}").prepare
    if not STRATEGIES[kind].places:
        model.to(group.device)
    prepared: Strategy = prepare(model, loss, group, options)
    return prepared

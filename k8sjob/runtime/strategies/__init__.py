"""How a model is trained over the ranks: one module a strategy, one row of the table each.

A strategy owns the step (forward and backward), since some of them cut it in pieces. Everything
else (data, checkpoints, reports) is the same for all.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch import Tensor, nn

    from k8sjob.runtime.process_group import Group

__all__ = ["Strategy", "call", "strategy"]


class Strategy(Protocol):
    """A model, ready to be trained over the ranks of a group."""

    model: nn.Module
    """The model itself, without wrappers: for the optimizer, evaluation and checkpoints."""

    def backward(
        self, inputs: Any, targets: tuple[Any, ...], *, scale: float, sync: bool
    ) -> Tensor:
        """Forward and backward for one batch; adds to the parameters' gradients.

        Args:
            inputs: what the model takes: a tensor, a tuple of arguments or a dict of them.
            targets: what the loss takes after the output.
            scale: factor for the loss (see data.Share).
            sync: average the gradients over the ranks after this batch.

        Returns:
            The mean loss over this rank's batch, not scaled, detached; on the model's device.
        """

    def settle(self) -> None:
        """Make the model equal on all ranks where training lets it differ (buffers)."""


_HOME: Final = {"ddp": "k8sjob.runtime.strategies.ddp"}


def strategy(
    kind: str,
    model: nn.Module,
    loss: Callable[..., Tensor],
    group: Group,
    options: Mapping[str, Any],
) -> Strategy:
    """A model under a strategy.

    Args:
        kind: a key of compat.STRATEGIES; the caller has checked it and its options.
        model: on the group's device, equal on all ranks.
        loss: loss(output, *targets) -> the mean over the batch's samples, a scalar.
        group: the ranks.
        options: the strategy's settings.
    """
    prepared: Strategy = import_module(_HOME[kind]).prepare(model, loss, group, options)
    return prepared


def call(model: nn.Module, inputs: Any) -> Any:
    """The model's output for a tensor, a tuple or list of arguments, or a dict of them."""
    if isinstance(inputs, dict):
        return model(**inputs)
    if isinstance(inputs, tuple | list):
        return model(*inputs)
    return model(inputs)

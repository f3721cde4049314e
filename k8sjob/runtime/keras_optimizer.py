"""An optimizer of Keras where a training loop of torch's expects one of torch's."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import torch
from torch.optim import Optimizer

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["KerasOptimizer", "adopt"]


def adopt(recipe: Any, model: Any) -> Optimizer | None:
    """The optimizer for a model, where the recipe is one of Keras's; None where it is not.

    Args:
        recipe: an optimizer, or (class, arguments).
        model: a Keras model, built.
    """
    keras = sys.modules.get("keras")
    if keras is None:
        return None
    maker = recipe[0] if isinstance(recipe, tuple) else None
    if isinstance(maker, type) and issubclass(maker, keras.optimizers.Optimizer):
        recipe = maker(**recipe[1])
    if not isinstance(recipe, keras.optimizers.Optimizer):
        return None
    return KerasOptimizer(recipe, model.trainable_variables)


class KerasOptimizer(Optimizer):
    """Takes the gradients that torch left at the parameters.

    Attributes:
        keras: the optimizer itself.
    """

    def __init__(self, optimizer: Any, variables: Sequence[Any]) -> None:
        self.keras, self._trained = optimizer, list(variables)
        if not optimizer.built:
            optimizer.build(self._trained)
        super().__init__([variable.value for variable in self._trained], {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Apply the gradients; a closure has no meaning here."""
        if closure is not None:
            raise ValueError("a Keras optimizer takes no closure")
        gradients = [variable.value.grad for variable in self._trained]
        self.keras.apply(gradients, self._trained)

    def state_dict(self) -> dict[str, Any]:
        """The optimizer's variables, in Keras's order; torch's own keys are empty."""
        values = [variable.value.detach() for variable in self.keras.variables]
        return {"state": {}, "param_groups": [], "variables": values}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Put back what state_dict() gave.

        Raises:
            ValueError: it belongs to another optimizer.
        """
        found, own = state_dict.get("variables"), self.keras.variables
        shapes = None if found is None else [tuple(value.shape) for value in found]
        if found is None or shapes != [tuple(variable.shape) for variable in own]:
            raise ValueError("the state of another optimizer, or of one for other weights")
        for variable, value in zip(own, found, strict=True):
            variable.assign(value.to(variable.value.device))

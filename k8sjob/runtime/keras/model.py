"""Keras models and optimizers in a loop of torch: what would otherwise go wrong silently.

A Keras layer is a torch module, and yet train() does not switch its dropout and batch normalization
on, its running statistics are no buffers, its seeds are variables that all ranks would share, and
its regularisers are not in the loss. Keras itself is never imported here: a model that exists has
imported it.
"""

from __future__ import annotations

import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import nn
from torch.optim import Optimizer

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from k8sjob.runtime.comm.mesh import Mesh

TEST_BATCH: Final = 256
"""Samples of one rank in one batch of an evaluation."""
_RANK_STRIDE: Final = 0x9E3779B1
_SEEDS: Final = 2**31 - 1
"""Keras keeps a seed in 32 bits with a sign."""


def is_keras(model: Any) -> bool:
    """Whether this is a Keras layer or model, whatever Keras computes with."""
    keras = sys.modules.get("keras")
    return keras is not None and isinstance(model, keras.layers.Layer)


def refuse(model: Any, *, backend: str = "torch") -> str | None:
    """Why a model cannot be trained as it is; None if it can, or has nothing of Keras.

    `backend` is what Keras must compute with.
    """
    keras = sys.modules.get("keras")
    if keras is None:
        return None
    name = type(model).__name__
    if is_keras(model):
        if keras.backend.backend() != backend:
            kind = "keras" if backend == "torch" else "keras_mesh"
            return (
                f"Keras computes with {keras.backend.backend()}, and {name} needs {backend}:"
                f" set KERAS_BACKEND={backend} before `import keras` (strategy.kind: {kind} does)"
            )
        if not model.built or not model.trainable_variables:
            return (
                f"{name} has no weights to train yet: begin it with keras.Input(shape), or call it"
                " once on a batch inside build()"
            )
        return None
    if isinstance(model, nn.Module) and any(map(is_keras, model.modules())):
        return (
            f"{name} is a torch module with Keras layers inside, which train() and eval() would"
            " not switch; make it a keras.Model (which takes torch modules as layers)"
        )
    return None


@contextmanager
def on(device: torch.device) -> Iterator[None]:
    """Keras puts its tensors on this device, instead of on the first GPU that it finds."""
    keras = sys.modules.get("keras")
    if keras is None or keras.backend.backend() != "torch":
        yield
    else:
        with keras.device(str(device)):
            yield


class AsTorch(nn.Module):
    """A Keras model that is called as a torch model is; train() and eval() set its mode.

    Attributes:
        keras: the model.
    """

    def __init__(self, model: Any, device: torch.device) -> None:
        super().__init__()
        self.keras = model
        self._device = device

    def forward(self, *inputs: Any, **named: Any) -> Any:
        """The output for a tensor, several of them, or a dict by the names of the inputs."""
        # Keras's functional models take one argument: a tensor, a list, or a dict by names.
        call_inputs = named or (inputs[0] if len(inputs) == 1 else list(inputs))
        with on(self._device):  # also where Keras was imported after the session began
            return self.keras(call_inputs, training=self.keras.training)


class Moved:
    """Variables that training changes without gradients, as the statistics of batch normalization.

    A forward pass shows which they are; what stays as it is, as frozen weights, is not sent.
    """

    def __init__(self, model: Any, mesh: Mesh) -> None:
        self._mesh = mesh
        # Not `buffers()`: Keras's variables are parameters of torch without gradients.
        self._values = [variable.value for variable in model.non_trainable_weights]
        self.begin()

    def begin(self) -> None:
        """Count from here: the variables are the same on all ranks now."""
        self._seen = self._versions()

    def average(self) -> None:
        """Replace what changed since the last call by its mean over the ranks."""
        now = self._versions()
        moved = [
            value
            for value, before, after in zip(self._values, self._seen, now, strict=True)
            # Counters move alike on all ranks, and a mean of them would be no whole number.
            if before != after and value.is_floating_point()
        ]
        if moved:
            with self._mesh.group.waiting(), torch.no_grad():
                self._mesh.average(moved)
        self.begin()

    def _versions(self) -> list[int]:
        return [value._version for value in self._values]  # noqa: SLF001 - torch's count of changes


class Seeds:
    """The states of a model's seed generators, a sequence of its own on each rank.

    A state is (seed, count); the counts are the same on all ranks.
    """

    def __init__(self, model: Any) -> None:
        # What a model has beside its weights and metrics are the states of its seed generators.
        saved = [*model.weights, *getattr(model, "metrics_variables", ())]
        saved_ids = {id(variable) for variable in saved}
        self._states = [
            variable.value for variable in model.variables if id(variable) not in saved_ids
        ]
        self._first = [int(state[0]) for state in self._states]

    def part(self, stream: int) -> None:
        """Take this rank's sequences; ranks with the same stream draw the same. Counts stay."""
        with torch.no_grad():
            for state, seed in zip(self._states, self._first, strict=True):
                # From the seed that all ranks began with, so that a restored model gets the same
                # sequences.
                state[0] = (seed + (stream + 1) * _RANK_STRIDE) % _SEEDS


def adopt(recipe: Any, model: Any) -> Optimizer | None:
    """The optimizer for a Keras model, where the recipe is one of Keras's; None if it is not."""
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
    """Optimizer of Keras that takes the gradients that torch left at the parameters.

    Attributes:
        keras: the optimizer itself.
    """

    def __init__(self, optimizer: Any, variables: Sequence[Any]) -> None:
        self.keras, self._trained = optimizer, list(variables)
        # An optimizer makes its variables in its first step otherwise, and a checkpoint comes
        # before.
        if not optimizer.built:
            optimizer.build(self._trained)
        # For torch's schedulers, clipping and zero_grad(), which look at the parameters' gradients.
        super().__init__([variable.value for variable in self._trained], {})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]  # takes no closure
        """Apply the gradients."""
        gradients = [variable.value.grad for variable in self._trained]
        self.keras.apply(gradients, self._trained)

    def state_dict(self) -> dict[str, Any]:
        """The optimizer's variables, in Keras's order; torch's own keys are empty."""
        values = [variable.value.detach() for variable in self.keras.variables]
        return {"state": {}, "param_groups": [], "variables": values}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore what state_dict() gave; ValueError if it is of another optimizer."""
        values, variables = state_dict.get("variables"), self.keras.variables
        shapes = None if values is None else [tuple(value.shape) for value in values]
        if values is None or shapes != [tuple(variable.shape) for variable in variables]:
            raise ValueError("the state of another optimizer, or of one for other weights")
        for variable, value in zip(variables, values, strict=True):
            variable.assign(value.to(variable.value.device))

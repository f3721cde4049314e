"""The strategies, which train a model over the ranks: a module and a row of the table for each."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Final

from k8sjob.strategies import STRATEGIES

if TYPE_CHECKING:
    from torch import nn

    from k8sjob.runtime.comm.process_group import Group
    from k8sjob.runtime.strategies.api import Strategy
    from k8sjob.runtime.strategies.step import Loss, Options

_HOME: Final = {
    "data_parallel": ("strategies.ddp", "prepare_data_parallel"),
    "keras": ("keras.strategy", "prepare"),
    "mesh": ("strategies.tensor_parallel", "prepare"),
    "model_split": ("strategies.pipeline", "prepare_model_split"),
}
"""(module, function) of a strategy; for all others the module of its name, and `prepare`."""


def strategy(kind: str, model: nn.Module, loss: Loss, group: Group, options: Options) -> Strategy:
    """A model under a strategy.

    `kind` is a key of STRATEGIES, with all of its settings, which the caller has checked. The model
    is the same on all ranks; for the loss see Job.prepare.

    Raises:
        ValueError: the settings do not fit the model.
    """
    module, function = _HOME.get(kind, (f"strategies.{kind}", "prepare"))
    prepare = getattr(import_module(f"k8sjob.runtime.{module}"), function)
    # Strategies that place layers themselves would not fit the whole model on this one device.
    if not STRATEGIES[kind].places:
        model.to(group.device)
    prepared: Strategy = prepare(model, loss, group, options)
    return prepared

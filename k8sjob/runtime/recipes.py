"""Optimizer, schedule and loss as scripts give them to job.prepare."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dis import get_instructions
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.nn import functional
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from k8sjob.runtime.keras import model as keras_model

_OWN_LOOP = "write your own loop: docs/how-to/from-ddp.md#several-models-or-optimizers"


def make_optimizer(recipe: Any, model: nn.Module) -> Optimizer:
    """The optimizer of a model whose strategy is prepared."""
    optimizer = keras_model.adopt(recipe, model)
    if optimizer is None and isinstance(recipe, Optimizer):
        held = {id(each) for group in recipe.param_groups for each in group["params"]}
        if not held <= set(map(id, model.parameters())):
            raise ValueError(
                "optimizer: its parameters are not those that are trained, which the strategy or"
                f" build() makes; give optimizer=(torch.optim.{type(recipe).__name__}, {{...}})"
            )
        optimizer = recipe
    if optimizer is None:
        optimizer = _construct("optimizer", recipe, model.parameters())
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:  # LBFGS
        name = type(optimizer).__name__
        raise ValueError(f"optimizer: {name} needs the loss several times a step; {_OWN_LOOP}")
    return optimizer


def make_scheduler(recipe: Any, optimizer: Optimizer, by: str) -> Any:
    """The learning rate's schedule; None without one."""
    if recipe is None:
        return None
    if isinstance(optimizer, keras_model.KerasOptimizer):
        raise ValueError(  # noqa: TRY004 - the pair does not fit
            "scheduler: an optimizer of Keras has its own; give it learning_rate="
            "keras.optimizers.schedules...., or use one of torch.optim"
        )
    finished = isinstance(recipe, LRScheduler) and recipe.optimizer is optimizer
    scheduler = recipe if finished else _construct("scheduler", recipe, optimizer)
    plateau = isinstance(scheduler, ReduceLROnPlateau)
    fits = by != "step" and (by != "epoch" or scheduler.mode == "min") if plateau else None
    if not (by in {"epoch", "step"} if fits is None else fits):
        raise ValueError(
            f"schedule_by={by!r} of {type(scheduler).__name__}: "
            + ('give a name of run.evaluate(), as "eval_accuracy"' if plateau else "epoch or step")
        )
    return scheduler


def end_epoch(scheduler: Any, by: str, numbers: Mapping[str, float]) -> None:
    """Step a schedule by epochs; `numbers` are the epoch's, "epoch" the one to judge it by."""
    if isinstance(scheduler, ReduceLROnPlateau):
        if by not in numbers:
            raise ValueError(f"schedule_by={by!r}: this epoch has only {', '.join(numbers)}")
        scheduler.step(numbers[by])
    elif scheduler is not None and by == "epoch":
        scheduler.step()


def _construct(field: str, recipe: Any, subject: Any) -> Any:
    """The result of (class, arguments) or of a function for a subject."""
    maker, *arguments = recipe if isinstance(recipe, tuple) and recipe else (recipe,)
    if callable(maker) and len(arguments) < 2 and all(isinstance(a, Mapping) for a in arguments):
        return maker(subject, **(arguments[0] if arguments else {}))
    several = f"; for several, as of a GAN, {_OWN_LOOP}" if field == "optimizer" else ""
    raise TypeError(f"{field}: give (class, {{arguments}}) or a function, not {recipe!r}{several}")


def is_sum(loss: Any) -> bool:
    """Whether the loss is a sum over the batch that nothing divides."""
    constants = getattr(getattr(loss, "__code__", None), "co_consts", ())  # also names of arguments
    named = any("reduction" in names for names in constants if isinstance(names, tuple))
    if named and "sum" in constants:
        return not any(each.argrepr.startswith("/") for each in get_instructions(loss))
    return bool(_setting(loss, "reduction") == "sum")


def missing_weight(loss: Any, targets: tuple[Any, ...]) -> str:
    """What a loss is a mean over besides samples, and what to write; looks at device's numbers."""
    function = loss.func if isinstance(loss, partial) else loss
    plain = function in (functional.cross_entropy, functional.nll_loss)
    weights = _setting(loss, "weight", getattr(loss, "weight", None))
    # Other losses with weights divide by the samples.
    if isinstance(weights, Tensor) and (
        plain or isinstance(loss, nn.NLLLoss | nn.CrossEntropyLoss)
    ):
        return "has weights of classes; write run.step(..., weight=class_weights[labels].sum())"
    index = _setting(loss, "ignore_index", -100 if plain else None)
    tensors = [target for target in targets[:1] if isinstance(target, Tensor)]
    if index is not None and any(bool((target == index).any()) for target in tensors):
        text = "run.step(x, labels, weight=(labels != ignore_index).sum())"
        return f"passes over targets (ignore_index); write {text}"
    return ""


def _setting(loss: Any, name: str, default: Any = None) -> Any:
    settings = loss.keywords if isinstance(loss, partial) else getattr(loss, "__dict__", {})
    return settings.get(name, default)

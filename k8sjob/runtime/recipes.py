"""Optimizer, schedule and loss as scripts give them to job.prepare."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from torch.nn import functional
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from k8sjob.runtime.keras import model as keras_model

_BY_CLASS = (functional.cross_entropy, functional.nll_loss)
OWN_LOOP = 'write your own loop; see "Several models or optimizers" in the documentation'


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
        raise ValueError(f"optimizer: {name} needs the loss several times a step; {OWN_LOOP}")
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
    several = f"; for several, as of a GAN, {OWN_LOOP}" if field == "optimizer" else ""
    raise TypeError(f"{field}: give (class, {{arguments}}) or a function, not {recipe!r}{several}")


def loss_remark(loss: Any, targets: tuple[Any, ...]) -> str:
    """What makes a step depend on the number of ranks, and what to write; empty if nothing does.

    Looks at the numbers of the targets, for which the device is waited for.
    """
    settings = getattr(loss, "keywords", None) or getattr(loss, "__dict__", {})
    if settings.get("reduction") == "sum":
        return 'has reduction="sum", and ranks average gradients; use the mean, with a larger lr'
    function = getattr(loss, "func", loss)
    if function not in _BY_CLASS and not isinstance(loss, nn.NLLLoss | nn.CrossEntropyLoss):
        return ""  # other losses divide by the samples, also with weights
    if isinstance(settings.get("weight", getattr(loss, "weight", None)), Tensor):
        return "has weights of classes; write run.step(..., weight=class_weights[labels].sum())"
    ignored = settings.get("ignore_index", -100)
    if any(isinstance(part, Tensor) and bool((part == ignored).any()) for part in targets[:1]):
        text = "run.step(x, labels, weight=(labels != ignore_index).sum())"
        return f"passes over targets (ignore_index); write {text}"
    return ""

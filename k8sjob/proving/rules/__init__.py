"""The causes of a difference: a table of rules over what the runs recorded.

A rule yields where it sees its cause, the first place first. The first difference of a training is
that of the earliest step; in one step the order of the table is the causal order: data, model,
gradient, weight.
"""

from __future__ import annotations

import math
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Final

from k8sjob.proving.rules import data, evaluation, gradients, runs
from k8sjob.proving.rules.evidence import NEXT, Difference, Evidence, Fault, message
from k8sjob.proving.rules.runs import repeats

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ["NEXT", "Difference", "Evidence", "Fault", "first_difference", "message", "not_compared",
           "notes", "repeats"]  # fmt: skip

_RULES: Final[tuple[Callable[[Evidence], Iterator[Difference]], ...]] = (
    data.not_sharded,
    data.overlap,
    data.divided_twice,
    data.without_loader,
    data.same_in_workers,
    data.unseen_epoch,
    data.not_reseeded,
    data.same_augmentation,
    runs.determinism,
    gradients.model_init,
    partial(gradients.weights, "before"),
    gradients.modes,
    gradients.random_numbers,
    gradients.options,
    gradients.schedules,
    gradients.skipped,
    gradients.kept,
    gradients.buffers,
    data.uneven,
    gradients.weights_averaged,
    gradients.gradient,
    partial(gradients.weights, "after"),
    evaluation.result,
    runs.ignored_state,
    runs.failed_restart,
    runs.checkpoint,
    runs.hang,
    runs.error,
)


def first_difference(evidence: Evidence) -> Difference | None:
    """The first difference of several processes from one; None: they are equal."""
    if runs.failed_alike(evidence):
        return next(runs.error(evidence))
    differences = [difference for rule in _RULES if (difference := next(rule(evidence), None))]
    # Of differences in one step, min gives the first: the table is in causal order.
    return min(differences, key=_step, default=None)


def _step(difference: Difference) -> float:
    return math.inf if difference.step is None else difference.step


def notes(evidence: Evidence) -> Iterator[str]:
    """What is no difference of the job's own run, and may be worth a change."""
    return chain(data.padded(evidence), runs.other_seeds(evidence), runs.moved(evidence))


def not_compared(evidence: Evidence) -> Iterator[str]:
    """What the runs do not show, by name."""
    if not evidence.many.fails:
        yield from runs.not_compared(evidence)
        yield from data.not_compared(evidence)
        yield from evaluation.not_compared(evidence)

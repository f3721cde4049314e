"""Rules over evaluations: samples counted twice, or results of the ranks added up wrongly."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Final

from k8sjob.proving.rules.data import identified
from k8sjob.proving.rules.evidence import Difference, Fault, message

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from k8sjob.proving.rules.evidence import Evidence
    from k8sjob.proving.trace import Evaluation, Trace

    _Pair = tuple[Any, Any]

_NUMBER: Final = re.compile(r"-?\d+(?:\.\d+)?(?:e[-+]?\d+)?")
# The possessive quantifiers keep the time linear: without them it grew with the cube of the text.
_CLOCK: Final = re.compile(
    r"(?i)(?:time|took|elapsed)\W{0,3}[\d.:]+"
    r"|(?<![\d.:])[\d.:]++ ?(?:(?:m?s|secs?|seconds?|minutes?)\b|\w{0,30}+/s\w*)"
)


def result(evidence: Evidence) -> Iterator[Difference]:
    """An evaluation gives another result, for samples are counted twice or not at all."""
    single = evidence.single.evaluations if evidence.single else []
    by_step = {evaluation.step: evaluation for evaluation in single}
    for many in evidence.ranks[0].evaluations:
        alone = by_step.get(many.step)
        # Of next(iter(loader)) ranks rightly see other samples than one process.
        partial = many.passes and not _whole(evidence.ranks, many)
        miscount = None if alone is None or partial else _miscounted(evidence, many, alone)
        if miscount is not None:
            text, pair = miscount
            # Without a reduction each rank has a result of its own; rank 0's is compared.
            rank = None if many.reductions else 0
            yield Difference(Fault.EVALUATION, many.step, "evaluation", text, None, rank, pair)


def not_compared(evidence: Evidence) -> Iterator[str]:
    """Evaluations that there were not, or that were not whole."""
    ran = evidence.ranks[0].evaluations
    partial = [many for many in ran if many.passes and not _whole(evidence.ranks, many)]
    if partial:
        yield f"the evaluation after step {partial[0].step} (it does not read its data to the end)"
    if not ran:
        yield "an evaluation (there was none)"


def _whole(ranks: Sequence[Trace], evaluation: Evaluation) -> list[tuple[int, int]]:
    """Its passes over all of a loader."""
    return [
        key
        for key in evaluation.passes
        if all(trace.passes[key].complete for trace in ranks if key in trace.passes)
    ]


def _miscounted(
    evidence: Evidence, many: Evaluation, alone: Evaluation
) -> tuple[str, tuple[float, float]] | None:
    samples: list[list[int]] = []
    for key in _whole(evidence.ranks, many):
        samples += identified([t.passes[key] for t in evidence.ranks if key in t.passes])[1]
    total = sum(map(len, samples))
    unique = len({sample for rank in samples for sample in rank})
    divided = bool(samples) and max(map(len, samples)) < unique
    # The second equal run, in which a number must come again to count: see _repeats.
    repeated = evidence.again.traces[0].evaluations if evidence.again else []
    again = next((evaluation for evaluation in repeated if evaluation.step == many.step), many)
    losses = _training_losses(evidence.ranks[0], many.step)
    size, differing = evidence.size, [*_printed(many, alone, again, losses)]
    printed = next(iter(differing), None)
    if not many.reductions:
        part = len(samples[0]) if samples else 0
        text = message("own-part", part=part, unique=unique)
        return (text, printed) if divided and printed else None
    reduced = _reduced(size, many, alone, again)
    if total > unique and divided:
        counted = (unique, total) if (alone.largest, many.largest) == (unique, total) else None
        pair = reduced or printed or counted
        if pair:
            return f"{total} samples are counted and there are {unique}: some are repeated", pair
    # Within 2 %: the last digits that are printed are rounded.
    for expected, value in differing:
        if abs(value - size * expected) > 0.02 * abs(value):
            continue
        if total > unique and not divided:
            return message("evaluated-by-all", unique=unique), (expected, value)
        if _is_reduced(value, many) and _is_reduced(expected, alone):
            return message("means-added"), (expected, value)
    # Gathered values are not recorded, so only a single printed number is known to be of them.
    gathered = not many.reduced and len(re.findall(r"\d\.\d", many.text)) == 1
    if gathered and printed:
        return message("gathered"), printed
    return (message("mean-of-means"), reduced) if reduced else None


def _reduced(
    size: int, many: Evaluation, alone: Evaluation, again: Evaluation
) -> tuple[float, float] | None:
    """The first reduced value that is neither that of one process nor that of all added up."""
    for theirs, mine, repeated in zip(many.reduced, alone.reduced, again.reduced, strict=False):
        for value, expected, second in zip(theirs, mine, repeated, strict=False):
            right = expected, size * expected
            if not _repeats(value, second):
                continue
            near = any(abs(value - r) <= 0.02 * abs(r) + 1e-6 for r in right)
            # The largest of several reduced numbers, where it is whole, is usually the number of
            # samples.
            count = expected.is_integer() and expected == max(mine) and len(mine) > 1
            if not near or (count and value not in right):
                return expected, value
    return None


def _is_reduced(value: float, evaluation: Evaluation) -> bool:
    return any(abs(v - value) <= 0.01 * abs(value) for each in evaluation.reduced for v in each)


def _printed(
    many: Evaluation, alone: Evaluation, again: Evaluation, losses: Sequence[float]
) -> Iterator[_Pair]:
    """The numbers that are printed otherwise, but for training losses and those of a clock."""
    texts = [_CLOCK.sub("", each.text) for each in (many, alone, again)]
    # Where the words differ, the numbers cannot be paired.
    if len({_NUMBER.sub("#", text) for text in texts}) > 1:
        return
    for theirs, mine, repeated in zip(*map(_NUMBER.findall, texts), strict=True):
        rounding = 1.5 * 10.0 ** -len(mine.partition(".")[2])
        value, expected = float(theirs), float(mine)
        counts = _repeats(value, float(repeated)) and all(abs(value - n) > rounding for n in losses)
        if counts and abs(value - expected) > 0.02 * abs(expected) + rounding:
            yield expected, value


def _repeats(value: float, again: float) -> bool:
    """Whether a second run gives it, too: it is not measured by a clock."""
    return abs(value - again) <= 1e-3 * abs(value)


def _training_losses(trace: Trace, step: int) -> list[float]:
    """The last loss of training, and the mean since the evaluation before."""
    earlier = (each.step for each in trace.evaluations if each.step < step)
    steps = trace.steps[max(earlier, default=0) : step]
    losses = [loss for each in steps for loss in each.losses if loss is not None]
    return [losses[-1], sum(losses) / len(losses)] if losses else []

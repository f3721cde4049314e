"""Rules over evaluations: samples counted twice, or results of the ranks added up wrongly."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Final

from k8sjob.proving.rules.data import identified
from k8sjob.proving.rules.evidence import Difference, Fault

if TYPE_CHECKING:
    from collections.abc import Iterator

    from k8sjob.proving.rules.evidence import Evidence
    from k8sjob.proving.trace import Evaluation

    _Pair = tuple[Any, Any]

_NUMBER: Final = re.compile(r"-?\d+(?:\.\d+)?(?:e[-+]?\d+)?")


def result(evidence: Evidence) -> Iterator[Difference]:
    """An evaluation gives another result, for samples are counted twice or not at all."""
    single = evidence.single.evaluations if evidence.single else []
    by_step = {one.step: one for one in single}
    for many in evidence.ranks[0].evaluations:
        one = by_step.get(many.step)
        found = None if one is None else _miscounted(evidence, many, one)
        if found is not None:
            text, pair = found
            rank = None if many.reductions else 0
            yield Difference(Fault.EVALUATION, many.step, "evaluation", text, None, rank, pair)


def _miscounted(
    evidence: Evidence, many: Evaluation, one: Evaluation
) -> tuple[str, tuple[float, float]] | None:
    samples: list[list[int]] = []
    for key in many.passes:
        samples += identified([t.passes[key] for t in evidence.ranks if key in t.passes])[1]
    total = sum(map(len, samples))
    unique = len({sample for rank in samples for sample in rank})
    divided = bool(samples) and max(map(len, samples)) < unique
    printed = _printed(many.text, one.text)
    if not many.reductions:
        text = (
            f"rank 0 reports what it found in {len(samples[0]) if samples else 0} of {unique}"
            " samples; nothing is reduced over the ranks"
        )
        return (text, printed) if divided and printed else None
    reduced = _reduced(evidence.size, many, one)
    if total > unique and divided:
        counted = (unique, total) if (one.largest, many.largest) == (unique, total) else None
        seen = reduced or printed or counted
        if seen:
            return f"{total} samples are counted and there are {unique}: some are repeated", seen
    if total > unique and not divided and printed:
        text = f"every rank evaluates all {unique} samples, and their results are added up"
        return text, printed
    if printed and _added_up(evidence.size, printed, many, one):
        return "means of the ranks are added up and not divided by their number", printed
    gathered = not many.reduced and len(re.findall(r"\d\.\d", many.text)) == 1
    if gathered and printed:
        text = "what the ranks gather is not what one process finds: another order, or repeated"
        return text, printed
    text = (
        "what the ranks reduce is not what one process finds: a mean of means, or parts of the data"
        " that are counted more than once"
    )
    return (text, reduced) if reduced else None


def _reduced(size: int, many: Evaluation, one: Evaluation) -> tuple[float, float] | None:
    """The first reduced value that is neither that of one process nor that of all added up."""
    for theirs, mine in zip(many.reduced, one.reduced, strict=False):
        for value, expected in zip(theirs, mine, strict=False):
            right = expected, size * expected
            near = any(abs(value - r) <= 0.02 * abs(r) + 1e-6 for r in right)
            count = expected.is_integer() and expected == max(mine) and len(mine) > 1
            if not near or (count and value not in right):
                return expected, value
    return None


def _added_up(size: int, printed: _Pair, many: Evaluation, one: Evaluation) -> bool:
    """Whether what is printed is a reduced value, and so many times that of one process."""
    expected, value = printed
    known = [v for values in many.reduced for v in values if abs(v - value) <= 0.01 * abs(value)]
    mine = [v for each in one.reduced for v in each if abs(v - expected) <= 0.01 * abs(expected)]
    return bool(known and mine) and abs(value - size * expected) <= 0.02 * abs(value)


def _printed(many: str, one: str) -> tuple[float, float] | None:
    """The first number that is printed otherwise."""
    if _NUMBER.sub("#", many) != _NUMBER.sub("#", one):
        return None
    for theirs, mine in zip(_NUMBER.findall(many), _NUMBER.findall(one), strict=True):
        rounding = 1.5 * 10.0 ** -len(mine.partition(".")[2])
        if abs(float(theirs) - float(mine)) > 0.02 * abs(float(mine)) + rounding:
            return float(mine), float(theirs)
    return None

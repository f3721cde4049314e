"""Arithmetic with sketches of tensors: lengths, differences, and what one is made of."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Sequence

    from k8sjob.proving.trace import Sketch

_ZERO: Final[Sketch] = [0.0] * 4


def norm(sketch: Sketch) -> float:
    """The length of a tensor."""
    return math.sqrt(max(sketch[0], 0.0))


def distance(one: Sketch, other: Sketch) -> float:
    """About the length of the difference of two tensors."""
    parts = [(a - b) ** 2 for a, b in zip(one[1:], other[1:], strict=True)]
    return math.sqrt(sum(parts) / len(parts))


def length(sketches: Sequence[Sketch | None]) -> float:
    """The length of several tensors together."""
    return math.sqrt(sum(norm(one) ** 2 for one in sketches if one))


def changed(one: Sketch, other: Sketch | None) -> bool:
    """Whether two copies of a weight differ."""
    return other is not None and distance(one, other) > 1e-5 * (norm(one) + 1e-12)


def worst(
    ones: Sequence[Sketch | None], others: Sequence[Sketch | None], tolerance: float, floor: float
) -> int | None:
    """The index of the tensor that differs most; None: they differ by rounding only.

    Args:
        ones: None is a tensor of zeros.
        others: as many.
        tolerance: relative to the length of a tensor.
        floor: the length that a shorter one is taken for.
    """
    most, at = 1.0, None
    for index, pair in enumerate(zip(ones, others, strict=False)):
        a, b = (one or _ZERO for one in pair)
        gap = distance(a, b) / (tolerance * max(norm(a), norm(b), floor))
        if not math.isfinite(gap):
            gap = 1e9 if math.isfinite(norm(a)) or math.isfinite(norm(b)) else 0.0
        if gap > most:
            most, at = gap, index
    return at


def mean(parts: Sequence[Sequence[Sketch | None]]) -> list[Sketch | None] | None:
    """The mean of the ranks' tensors; None: a rank lacks one."""
    if any(one is None for part in parts for one in part):
        return None
    columns = zip(*parts, strict=True)
    return [[sum(v) / len(parts) for v in zip(*column, strict=True)] for column in columns]


def shown(one: Sketch | None, other: Sketch | None) -> tuple[float, float]:
    """Two numbers that show the difference: the lengths, or projections where those agree."""
    a, b = one or _ZERO, other or _ZERO
    lengths = norm(a), norm(b)
    return lengths if abs(lengths[0] - lengths[1]) > 1e-4 * max(lengths) else (a[1], b[1])


def shares(
    target: Sequence[Sketch | None], parts: Sequence[Sequence[Sketch | None]]
) -> tuple[list[float], float]:
    """By how much each part is in the target, by least squares; and what is left, relative."""
    rows = [[v for one in part for v in (one or _ZERO)[1:]] for part in parts]
    goal = [v for one in target for v in (one or _ZERO)[1:]]
    size = len(rows)
    table = [[_dot(row, other) for other in (*rows, goal)] for row in rows]
    for i in range(size):
        pivot = max(range(i, size), key=lambda r: abs(table[r][i]))
        table[i], table[pivot] = table[pivot], table[i]
        if abs(table[i][i]) < 1e-30:
            return [0.0] * size, 1.0
        for r in range(size):
            if r != i:
                factor = table[r][i] / table[i][i]
                table[r] = [a - factor * b for a, b in zip(table[r], table[i], strict=True)]
    found = [table[i][size] / table[i][i] for i in range(size)]
    sums = (_dot(found, column) for column in zip(*rows, strict=True))
    left = [a - b for a, b in zip(goal, sums, strict=True)]
    return found, math.sqrt(_dot(left, left)) / (math.sqrt(_dot(goal, goal)) or 1e-30)


def _dot(one: Sequence[float], other: Sequence[float]) -> float:
    return sum(a * b for a, b in zip(one, other, strict=True))

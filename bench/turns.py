"""Two loops that take turns in the same processes, so that the machine's noise falls upon both."""

from __future__ import annotations

import statistics
from itertools import chain, repeat
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

__all__ = ["alternate", "endless", "ratio"]


def alternate(timed: Mapping[str, Callable[[], Any]], turns: int) -> dict[str, list[Any]]:
    """What each of them tells of its turns; who goes first changes each time."""
    taken: dict[str, list[Any]] = {by: [] for by in timed}
    for number in range(turns):
        for by in sorted(timed, reverse=bool(number % 2)):
            taken[by].append(timed[by]())
    return taken


def endless(step: Any, loader: Iterable[Any]) -> tuple[Callable[..., Any], Iterator[Any]]:
    """A step, and the batches of all epochs."""
    return step, chain.from_iterable(repeat(loader))


def ratio(groups: Sequence[tuple[Sequence[float], Sequence[float]]]) -> tuple[float, float]:
    """The mean over groups of processes, with its standard error.

    Args:
        groups: of each what the turns by hand took, and what the runtime's did; of neighboring
            turns the ratio is taken, and of a group the median.
    """
    medians = [
        statistics.median(hand / ours for hand, ours in zip(*group, strict=True))
        for group in groups
    ]
    return statistics.mean(medians), statistics.stdev(medians) / len(medians) ** 0.5

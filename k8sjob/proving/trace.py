"""The recorded trace of a run's processes, and arithmetic with the sketches of tensors in it."""

from __future__ import annotations

import json
import math
from contextlib import suppress
from dataclasses import dataclass, field
from signal import Signals
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    _Event = Mapping[str, Any]

Sketch = list[float]
"""The sum of squares of a tensor, and linear projections of it; see recording/sketch.py."""
_ZERO: Final[Sketch] = [0.0] * 4


@dataclass(slots=True)
class Batch:
    """A batch that a loader gave.

    Attributes:
        ids: indices of its samples in the data set itself; None: not known.
        raw: indices that the sampler gave.
        digests: of the contents.
        drawn: random numbers that the data set has drawn for it: source, states before and after.
        slices: digests of what the model was called with, where that was a part of the batch.
        trained: a loss of it was differentiated.
    """

    size: int
    ids: list[int] | None
    raw: list[int] | None
    digests: list[int] | None
    drawn: list[list[int]] = field(default_factory=list)
    slices: list[int] = field(default_factory=list)
    trained: bool = False


@dataclass(slots=True)
class Pass:
    """One pass over a loader."""

    about: Mapping[str, Any]
    step: int
    batches: list[Batch] = field(default_factory=list)
    complete: bool = False

    @property
    def trained(self) -> bool:
        """Whether it was for training."""
        return any(batch.trained for batch in self.batches)

    def samples(self, kind: str) -> list[int]:
        """Its samples, as "ids", "raw", "digests" or "slices"."""
        return [sample for batch in self.batches for sample in getattr(batch, kind) or ()]


Step = SimpleNamespace
"""One step of an optimizer, and what led to it: the fields of the event; see Recorder."""


@dataclass(slots=True)
class Evaluation:
    """The forward passes without gradients between two steps.

    Attributes:
        passes: over loaders: (loader, number).
        reductions: collectives that gather or reduce.
        text: what was printed.
    """

    step: int
    passes: list[tuple[int, int]] = field(default_factory=list)
    reductions: list[Mapping[str, Any]] = field(default_factory=list)
    text: str = ""

    @property
    def reduced(self) -> list[list[float]]:
        """The values that each all_reduce gives; large tensors are left out."""
        return [e["after"] for e in self.reductions if e["name"] == "all_reduce" and e["after"]]

    @property
    def largest(self) -> float:
        """The largest reduced value: usually the number of samples."""
        return max((value for values in self.reduced for value in values), default=0.0)


class Trace:
    """The record of one rank."""

    def __init__(self, file: Path) -> None:
        self.steps: list[Step] = []
        self.passes: dict[tuple[int, int], Pass] = {}
        self.models: list[_Event] = []
        self.evaluations: list[Evaluation] = []
        self.events: list[_Event] = []
        self.end: _Event = {"how": "killed", "message": ""}
        self._evaluation: Evaluation | None = None
        for line in file.read_text().splitlines() if file.exists() else ():
            with suppress(ValueError):  # the process was killed while it wrote
                self.events.append(json.loads(line))
        for event in self.events:
            if event["kind"] in {"pass", "batch", "slice", "over"}:
                self._on_data(event)
            else:
                self._on_training(event)
        self._close_evaluation()
        errors = file.with_name(f"{file.stem.replace('trace', 'err')}")
        # A rank that was killed has written no end; its standard error may say more.
        if self.end["how"] == "killed" and errors.exists():
            self.end = {"how": "killed", "message": errors.read_text(errors="replace")[-2000:]}

    def _evaluating(self) -> Evaluation:
        self._evaluation = self._evaluation or Evaluation(len(self.steps))
        return self._evaluation

    def _close_evaluation(self) -> None:
        evaluation, self._evaluation = self._evaluation, None
        if evaluation is not None:
            # A pass for training begins outside of any step, too, and is known as such by its first
            # backward pass.
            evaluation.passes = [key for key in evaluation.passes if not self.passes[key].trained]
            if evaluation.passes or evaluation.reductions:
                self.evaluations.append(evaluation)

    def _on_data(self, event: _Event) -> None:
        key, kind = (event["loader"], event["number"]), event["kind"]
        if kind == "pass":
            self.passes[key] = Pass(event, len(self.steps))
        elif kind == "over":
            self.passes[key].complete = True
        elif kind == "slice":
            self.passes[key].batches[event["index"]].slices += event["digests"]
        else:
            fields = {name: event[name] for name in ("size", "ids", "raw", "digests")}
            self.passes[key].batches.append(Batch(**fields, drawn=event["drawn"] or []))
            # The first batch of a pass: whether it is an evaluation or training is not known yet.
            if not event["index"]:
                self._evaluating().passes.append(key)

    def _on_training(self, event: _Event) -> None:
        evaluation = self._evaluation
        match event["kind"]:
            # A forward pass without gradients begins an evaluation, and the next backward pass ends
            # it.
            case "mode" if not event["grad"]:
                self._evaluating()
            case "backward":
                for loader, number, index in event["batches"]:
                    self.passes[loader, number].batches[index].trained = True
                self._close_evaluation()
            case "collective" if evaluation:
                evaluation.reductions.append(event)
            case "text" if evaluation:
                evaluation.text += event["text"]
            case "step":
                self.steps.append(Step(**event))
            case "model":
                self.models.append(event)
            case "end":
                self.end = event
            case _:
                pass

    def of(self, kind: str) -> Iterator[Mapping[str, Any]]:
        """The events of a kind."""
        return (event for event in self.events if event["kind"] == kind)


@dataclass(slots=True)
class TracedRun:
    """All ranks of one run.

    Attributes:
        traces: by rank.
        answer: how their processes ended; see forking/ranks.py.
    """

    traces: list[Trace]
    answer: Mapping[str, Any]

    @classmethod
    def read(cls, folder: Path, answer: Mapping[str, Any]) -> TracedRun:
        """The run whose records are in a folder."""
        traces = [Trace(folder / f"trace-{rank}.jsonl") for rank in range(answer["ranks"])]
        return cls(traces, answer)

    @property
    def fails(self) -> bool:
        """Whether a rank fails, is killed, or waits for ever."""
        ended = any(trace.end["how"] == "error" for trace in self.traces)
        return ended or bool(self.answer["hung"] or self.answer["failed"])

    @property
    def killed(self) -> dict[int, str]:
        """The ranks that ended in the middle of what they did, and how."""
        codes = {int(rank): code for rank, code in self.answer["failed"].items()}
        return {
            rank: f"is killed by {Signals(-code).name}" if code < 0 else f"exits with {code}"
            for rank, code in sorted(codes.items())
            if rank < len(self.traces) and self.traces[rank].end["how"] == "killed"
        }

    @property
    def sharded(self) -> bool:
        """Whether the ranks have parts of the parameters."""
        return any(model["sharded"] for trace in self.traces for model in trace.models)

    @property
    def norms(self) -> set[str]:
        """The kinds of batch normalization in the models."""
        return {name for trace in self.traces for model in trace.models for name in model["norms"]}

    def whole(self, step: int, when: str) -> list[Sketch | None]:
        """The sketches of all parameters at a step: "before", "grads" or "after"."""
        mine: Sequence[Sketch | None] = getattr(self.traces[0].steps[step], when)
        if not self.sharded:
            return list(mine)
        rows = [
            getattr(trace.steps[step], when) for trace in self.traces if len(trace.steps) > step
        ]
        return [
            None if None in column else [sum(v) for v in zip(*column, strict=True)]
            for column in zip(*rows, strict=True)
        ]


def norm(sketch: Sketch) -> float:
    """The length of a tensor."""
    return math.sqrt(max(sketch[0], 0.0))


def distance(first: Sketch, second: Sketch) -> float:
    """About the length of the difference of two tensors."""
    # Three random projections: the mean of their squares estimates the squared length.
    parts = [(a - b) ** 2 for a, b in zip(first[1:], second[1:], strict=True)]
    return math.sqrt(sum(parts) / len(parts))


def update(before: Sequence[Sketch], after: Sequence[Sketch]) -> list[Sketch]:
    """What was added to tensors."""
    pairs = [zip(*pair, strict=True) for pair in zip(before, after, strict=True)]
    deltas = [[b - a for a, b in pair][1:] for pair in pairs]
    return [[sum(v * v for v in delta) / len(delta), *delta] for delta in deltas]


def length(sketches: Sequence[Sketch | None]) -> float:
    """The length of several tensors together."""
    return math.sqrt(sum(norm(sketch) ** 2 for sketch in sketches if sketch))


def changed(first: Sketch, second: Sketch | None) -> bool:
    """Whether two copies of a weight differ."""
    return second is not None and distance(first, second) > 1e-5 * (norm(first) + 1e-12)


def worst(
    first: Sequence[Sketch | None], second: Sequence[Sketch | None], tolerance: float, floor: float
) -> int | None:
    """The index of the tensor that differs most; None: they differ by rounding only.

    Args:
        first: None is a tensor of zeros.
        second: as many.
        tolerance: relative to the length of a tensor.
        floor: the length that a shorter one is taken for.
    """
    at, gap = largest_gap(first, second, floor)
    return at if gap > tolerance else None


def largest_gap(
    first: Sequence[Sketch | None], second: Sequence[Sketch | None], floor: float
) -> tuple[int, float]:
    """The index of the tensor that differs most, and its difference relative to its length."""
    at, most = 0, 0.0
    for index, pair in enumerate(zip(first, second, strict=False)):
        a, b = (sketch or _ZERO for sketch in pair)
        # The floor: a gradient that is nearly zero may differ by all of its length.
        gap = distance(a, b) / max(norm(a), norm(b), floor)
        # Two tensors that both have nan count as equal; nan in one alone is the largest difference.
        if not math.isfinite(gap):
            gap = 1e9 if math.isfinite(norm(a)) or math.isfinite(norm(b)) else 0.0
        if gap > most:
            at, most = index, gap
    return at, most


def mean(parts: Sequence[Sequence[Sketch | None]]) -> list[Sketch | None] | None:
    """The mean of the ranks' tensors; None: a rank lacks one."""
    if any(sketch is None for part in parts for sketch in part):
        return None
    columns = zip(*parts, strict=True)
    return [[sum(v) / len(parts) for v in zip(*column, strict=True)] for column in columns]


def shown(first: Sketch | None, second: Sketch | None) -> tuple[float, float]:
    """Two numbers that show the difference: the lengths, or projections where those agree."""
    a, b = first or _ZERO, second or _ZERO
    lengths = norm(a), norm(b)
    return lengths if abs(lengths[0] - lengths[1]) > 1e-4 * max(lengths) else (a[1], b[1])


def shares(
    target: Sequence[Sketch | None], parts: Sequence[Sequence[Sketch | None]]
) -> tuple[list[float], float]:
    """The weight of each part in the target by least squares, and the relative residual."""
    rows = [[v for sketch in part for v in (sketch or _ZERO)[1:]] for part in parts]
    goal = [v for sketch in target for v in (sketch or _ZERO)[1:]]
    size = len(rows)
    table = [[_dot(row, column) for column in (*rows, goal)] for row in rows]
    for i in range(size):
        # Gauss-Jordan with pivots: the client has no numpy, and there are a few ranks.
        pivot = max(range(i, size), key=lambda r: abs(table[r][i]))
        table[i], table[pivot] = table[pivot], table[i]
        if abs(table[i][i]) < 1e-30:
            return [0.0] * size, 1.0
        for r in range(size):
            if r != i:
                factor = table[r][i] / table[i][i]
                table[r] = [a - factor * b for a, b in zip(table[r], table[i], strict=True)]
    weights = [table[i][size] / table[i][i] for i in range(size)]
    sums = (_dot(weights, column) for column in zip(*rows, strict=True))
    residual = [a - b for a, b in zip(goal, sums, strict=True)]
    return weights, math.sqrt(_dot(residual, residual)) / (math.sqrt(_dot(goal, goal)) or 1e-30)


def _dot(row: Sequence[float], column: Sequence[float]) -> float:
    return sum(a * b for a, b in zip(row, column, strict=True))

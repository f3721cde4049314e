"""The recorded trace of a run's processes, and arithmetic with the sketches of tensors in it."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field, replace
from signal import Signals
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    _Event = Mapping[str, Any]

Sketch = list[float]
"""The sum of squares of a tensor, and linear projections of it; see k8sjob.runtime.prover."""
_ZERO: Final[Sketch] = [0.0] * 4
_REDUCING: Final = frozenset({
    "all_reduce", "reduce", "all_gather", "gather", "all_gather_into_tensor", "all_gather_object",
    "gather_object",
})  # fmt: skip


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
        return [one for batch in self.batches for one in getattr(batch, kind) or ()]


@dataclass(slots=True)
class Step:
    """One step of an optimizer, with what led to it.

    Attributes:
        about: the event: weights before and after, gradients, buffers, rates.
        inputs: digests of the samples of the first forward pass, where no DataLoader made them.
        clips: what the script clips gradients to.
        reduced: the script calls all_reduce after the last backward pass.
        training: modules in training mode, for each backward pass.
        host: random numbers of Python and numpy that were drawn, as in Batch.
        alone: one process drew random numbers for which each rank had its own.
    """

    about: Mapping[str, Any] = field(default_factory=dict)
    losses: list[float | None] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    samples: list[int] = field(default_factory=list)
    draws: list[tuple[str, int]] = field(default_factory=list)
    inputs: list[int] = field(default_factory=list)
    clips: list[float | None] = field(default_factory=list)
    training: list[int] = field(default_factory=list)
    host: list[list[int]] = field(default_factory=list)
    autocast: bool = False
    reduced: bool = False
    alone: bool = False

    def __getattr__(self, name: str) -> Any:
        return self.about[name]


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
        self._batch: Batch | None = None
        self._evaluation: Evaluation | None = None
        self._since = Step()
        for line in file.read_text().splitlines() if file.exists() else ():
            try:
                event = json.loads(line)
            except ValueError:
                continue  # the process was killed while it wrote
            self.events.append(event)
            fold = getattr(self, f"_on_{event['kind']}", None)
            if fold is not None:
                fold(event)
        self._close_evaluation()
        errors = file.with_name(f"{file.stem.replace('trace', 'err')}")
        if self.end["how"] == "killed" and errors.exists():
            self.end = {"how": "killed", "message": errors.read_text(errors="replace")[-2000:]}

    def _evaluating(self) -> Evaluation:
        self._evaluation = self._evaluation or Evaluation(len(self.steps))
        return self._evaluation

    def _close_evaluation(self) -> None:
        found, self._evaluation = self._evaluation, None
        if found is not None:
            found.passes = [key for key in found.passes if not self.passes[key].trained]
            if found.passes or found.reductions:
                self.evaluations.append(found)

    # --- one for each kind of event ---------------------------------------------------------------

    def _on_pass(self, event: _Event) -> None:
        self.passes[event["loader"], event["number"]] = Pass(event, len(self.steps))

    def _on_batch(self, event: _Event) -> None:
        key = (event["loader"], event["number"])
        size, ids, raw, digests = (event[name] for name in ("size", "ids", "raw", "digests"))
        self._batch = Batch(size, ids, raw, digests, event.get("drawn") or [])
        self.passes[key].batches.append(self._batch)
        if not event["index"]:
            self._evaluating().passes.append(key)

    def _on_over(self, event: _Event) -> None:
        self.passes[event["loader"], event["number"]].complete = True

    def _on_mode(self, event: _Event) -> None:
        if not event["grad"]:
            self._evaluating()

    def _on_backward(self, event: _Event) -> None:
        since, batches = self._since, [self._batch]
        if "batches" in event:
            batches = [self.passes[key[0], key[1]].batches[key[2]] for key in event["batches"]]
        since.reduced = False
        since.losses.append(event["loss"])
        since.autocast = since.autocast or event["autocast"]
        since.training.append(event.get("training", 0))
        since.host += event.get("host", [])
        for batch in batches:
            if batch is not None and not batch.trained:
                batch.trained = True
                since.sizes.append(batch.size)
                since.samples += batch.digests or []
        self._close_evaluation()

    def _on_draw(self, event: _Event) -> None:
        self._since.draws.append((event["name"], event["digest"]))

    def _on_clip(self, event: _Event) -> None:
        self._since.clips.append(event.get("most"))

    def _on_alone(self, _event: _Event) -> None:
        self._since.alone = True

    def _on_slice(self, event: _Event) -> None:
        if self._batch is not None:
            self._batch.slices += event["digests"]

    def _on_input(self, event: _Event) -> None:
        self._since.inputs = self._since.inputs or event["digests"] or []

    def _on_collective(self, event: _Event) -> None:
        if self._evaluation is None:
            by_hand = event["name"] == "all_reduce" and not event.get("inside")
            self._since.reduced = self._since.reduced or by_hand
        elif event["name"] in _REDUCING:
            self._evaluation.reductions.append(event)

    def _on_text(self, event: _Event) -> None:
        if self._evaluation is not None:
            self._evaluation.text += event["text"]

    def _on_step(self, event: _Event) -> None:
        since, self._since = self._since, Step()
        if not since.losses and self.steps:  # of a second optimizer
            since = self.steps[-1]
        self.steps.append(replace(since, about=event))

    def _on_model(self, event: _Event) -> None:
        self.models.append(event)

    def _on_end(self, event: _Event) -> None:
        self.end = event

    def of(self, kind: str) -> Iterator[Mapping[str, Any]]:
        """The events of a kind."""
        return (event for event in self.events if event["kind"] == kind)


@dataclass(slots=True)
class TracedRun:
    """All ranks of one run.

    Attributes:
        traces: by rank.
        answer: how their processes ended; see k8sjob.runtime.prover.
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
        return ended or bool(self.answer["hung"] or self.answer.get("failed"))

    @property
    def killed(self) -> dict[int, str]:
        """The ranks that ended in the middle of what they did, and how."""
        codes = {int(rank): code for rank, code in self.answer.get("failed", {}).items()}
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

    def whole(self, step: int, what: str) -> list[Sketch | None]:
        """The sketches of all parameters at a step: "before", "grads" or "after"."""
        mine: Sequence[Sketch | None] = getattr(self.traces[0].steps[step], what)
        if not self.sharded:
            return list(mine)
        rows = [
            getattr(trace.steps[step], what) for trace in self.traces if len(trace.steps) > step
        ]
        return [
            None
            if any(one is None for one in column)
            else [sum(v) for v in zip(*column, strict=True)]
            for column in zip(*rows, strict=True)
        ]


def norm(sketch: Sketch) -> float:
    """The length of a tensor."""
    return math.sqrt(max(sketch[0], 0.0))


def distance(one: Sketch, other: Sketch) -> float:
    """About the length of the difference of two tensors."""
    parts = [(a - b) ** 2 for a, b in zip(one[1:], other[1:], strict=True)]
    return math.sqrt(sum(parts) / len(parts))


def update(before: Sequence[Sketch], after: Sequence[Sketch]) -> list[Sketch]:
    """What was added to tensors."""
    pairs = [zip(*pair, strict=True) for pair in zip(before, after, strict=True)]
    deltas = [[b - a for a, b in pair][1:] for pair in pairs]
    return [[sum(v * v for v in delta) / len(delta), *delta] for delta in deltas]


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
    at, gap = largest_gap(ones, others, floor)
    return at if gap > tolerance else None


def largest_gap(
    ones: Sequence[Sketch | None], others: Sequence[Sketch | None], floor: float
) -> tuple[int, float]:
    """The index of the tensor that differs most, and its difference relative to its length."""
    at, most = 0, 0.0
    for index, pair in enumerate(zip(ones, others, strict=False)):
        a, b = (one or _ZERO for one in pair)
        gap = distance(a, b) / max(norm(a), norm(b), floor)
        if not math.isfinite(gap):
            gap = 1e9 if math.isfinite(norm(a)) or math.isfinite(norm(b)) else 0.0
        if gap > most:
            at, most = index, gap
    return at, most


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
    """The weight of each part in the target by least squares, and the relative residual."""
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

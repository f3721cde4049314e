"""The input and output of rules: the runs of one script, and a difference with its cause."""

from __future__ import annotations

import math
import tomllib
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from k8sjob.proving.trace import largest_gap, length, update

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from k8sjob.proving.trace import Sketch, Step, Trace, TracedRun

_BY_ROUNDING: Final = 0.01
"""Maximum relative difference of a gradient where single numbers of it are decided by rounding."""
_GROWTH: Final = 1000.0
"""Maximum relative difference of gradients over that of their weights."""
_LARGE: Final = 0.1
_ROUNDING: Final = {"torch.bfloat16": 2**-9, "torch.float16": 2**-12}
"""Of numbers with fewer than 32 bits."""


class Fault(StrEnum):
    """Why one process and several differ; docs/reference/prove.md says what each one means."""

    ERROR = "error"
    HANG = "hang"
    NOT_SHARDED = "sampler-not-sharded"
    OVERLAP = "sampler-overlap"
    NOT_RESEEDED = "sampler-not-reseeded"
    NON_DETERMINISM = "non-determinism"
    MODEL_INIT = "model-init-differs"
    DROPOUT = "dropout-seed"
    BATCHNORM = "batchnorm-statistics"
    RANK_DEPENDENT = "rank-dependent-model"
    LAST_BATCH = "last-batch"
    LOSS_SCALING = "loss-scaling"
    CLIPPING = "gradient-clipping-local"
    ACCUMULATION = "accumulation"
    NOT_AVERAGED = "gradient-not-averaged"
    AVERAGED_TWICE = "gradient-averaged-twice"
    LEARNING_RATE = "learning-rate-scaled"
    SKIPS_STEP = "rank-skips-step"
    EVALUATION = "evaluation-double-counted"
    CHECKPOINT = "checkpoint-incomplete"


_TEXTS: Final[dict[str, dict[str, str]]] = tomllib.loads(
    Path(__file__).with_name("texts.toml").read_text(encoding="utf-8")
)
NEXT: Final = _TEXTS["next"]
"""How to correct each cause."""


def message(key: str, **values: object) -> str:
    """The text of a rule with these values."""
    return _TEXTS["messages"][key].format(**values)


class Difference(NamedTuple):
    """The first difference, and its cause.

    It is no Finding, since rules compare differences by their step, and a proof in JSON has the
    tensor, the rank and both values as fields of their own.

    Attributes:
        step: optimizer steps done before; None: it concerns no step.
        values: on one process (or what is expected), on several.
        next: how to correct it, where NEXT says too much.
    """

    cause: Fault
    step: int | None
    tensor: str | None
    message: str
    name: str | None = None
    rank: int | None = None
    values: tuple[Any, Any] | None = None
    next: str = ""


@dataclass(frozen=True)  # without slots, for what is computed once
class Evidence:
    """The runs of one script.

    Attributes:
        many: on all ranks.
        alone: on one process, with the same batches; None if it could not be run.
        again: as many, once more.
        resumed: as many, restarted from the files of its first checkpoint.
        moved: one process, started from the same files.
        hashed: as many, with different seeds of hashes, where it is not equal to `many`.
    """

    many: TracedRun
    alone: TracedRun | None = None
    again: TracedRun | None = None
    resumed: TracedRun | None = None
    moved: TracedRun | None = None
    hashed: TracedRun | None = None

    @property
    def ranks(self) -> list[Trace]:
        """The traces of all ranks."""
        return self.many.traces

    @property
    def single(self) -> Trace | None:
        """The trace of the one process."""
        return self.alone.traces[0] if self.alone else None

    @property
    def size(self) -> int:
        """The number of ranks."""
        return len(self.ranks)

    @cached_property
    def common(self) -> int:
        """Steps that all ranks do together: until they begin a pass over data apart."""
        # A pass that the ranks begin at different steps has other batches side by side from there
        # on.
        apart = [
            min(starts)
            for key in self.ranks[0].passes
            if len(starts := {t.passes[key].step for t in self.ranks if key in t.passes}) > 1
        ]
        return min([*apart, *(len(trace.steps) for trace in self.ranks)])

    @cached_property
    def compared(self) -> tuple[int, str]:
        """Steps that can be compared with one process, and why not more of the common ones."""
        if self.single is None:
            return 0, "it was not run"
        end = self.single.end
        # Some scripts cannot run on one process: that is no fault of the training.
        if end["how"] == "error":
            first = (end["message"].strip().splitlines() or [""])[0]
            return 0, f"the script fails: {end['type']}: {first} at {end['where']}"
        for at in range(self.common):
            if at >= len(self.single.steps):
                return at, end.get("message") or f"there are {at} steps"
            reason = _unlike(self.single.steps[at], [trace.steps[at] for trace in self.ranks])
            if reason:
                return at, f"at step {at} {reason}"
        return self.common, ""

    def steps(self) -> Iterator[tuple[int, list[Step], Step | None]]:
        """Each common step, with that of the one process where they can be compared."""
        compared, _ = self.compared
        for at in range(self.common):
            alone = self.single.steps[at] if self.single and at < compared else None
            yield at, [trace.steps[at] for trace in self.ranks], alone

    @cached_property
    def averaged(self) -> dict[int, int]:
        """Steps after which the ranks make unequal weights equal, with the optimizer's next step.

        An optimizer's last step stands for itself: what comes after it is not recorded.
        """
        following: dict[int, int] = {}
        last: dict[int, tuple[int, Sequence[Step]]] = {}
        for at, row, _ in self.steps():
            before, steps = last.get(row[0].optimizer, (at, row))
            unequal = any(step.after != steps[0].after for step in steps)
            # Local SGD: weights differ after a step, and are equal before the next one.
            if before != at and unequal and all(step.before == row[0].before for step in row):
                following |= {before: at, at: at}
            else:
                following.pop(before, None)
            last[row[0].optimizer] = at, row
        return following

    @cached_property
    def floors(self) -> dict[int, float]:
        """By step, the length that a shorter gradient is taken for."""
        floors: dict[int, float] = {}
        largest: dict[int, float] = {}
        for at, row, _ in self.steps():
            size, optimizer = length(self.many.whole(at, "grads")), row[0].optimizer
            largest[optimizer] = max(largest.get(optimizer, 0.0), size)
            # 3 % of all gradients of the step, and 0.1 % of the largest so far: less is noise.
            floors[at] = max(0.03 * size, 1e-3 * largest[optimizer], 1e-12)
        return floors

    @cached_property
    def explained(self) -> dict[int, float]:
        """By step, the relative difference from one process's gradient that rounding explains.

        One process sums its larger batches in another order. Which of equal numbers a maximum
        takes, and the sign of a number near zero before a ReLU, may then differ, and the gradient
        with them. So do the weights after this step, and later gradients some hundred times as
        much. Weights that differ by more than all gradients so far differ for another reason.
        """
        explained: dict[int, float] = {}
        drifts: dict[int, float] = {}
        gaps = 0.0
        for at, row, alone in self.steps():
            if alone is None or at in self.averaged:
                continue
            drifts[row[0].optimizer] = self._drift(at, alone, "before")
            # Weights that have drifted further than all gradients so far explain are a fault.
            grown = _GROWTH * min(max(drifts.values(), default=0.0), gaps)
            explained[at] = max(self.tolerance(at), _BY_ROUNDING, grown)
            _, gap = largest_gap(alone.grads, self.many.whole(at, "grads"), self.floors[at])
            gaps += gap
            drifts[row[0].optimizer] = self._drift(at, alone, "after")
        return explained

    def _drift(self, at: int, alone: Step, when: str) -> float:
        """How far the weights are from those of one process, relative to these; 0: not known."""
        mine: Sequence[Sketch] = getattr(alone, when)
        whole = [weight for weight in self.many.whole(at, when) if weight]
        if len(whole) != len(mine):
            return 0.0
        return length(update(mine, whole)) / (length(mine) or 1.0)

    @property
    def loose(self) -> int | None:
        """The first step at which rounding explains so much that only a large fault is found."""
        return next(
            (at for at, part in self.explained.items() if part > max(_LARGE, self.tolerance(at))),
            None,
        )

    @cached_property
    def rounding(self) -> float:
        """The largest relative rounding of a weight."""
        kinds = {kind for t in self.ranks for model in t.models for kind in model["dtype"]}
        return max((part for kind, part in _ROUNDING.items() if kind in kinds), default=2**-24)

    def tolerance(self, step: int) -> float:
        """The largest relative difference that is rounding, where the sums have one order."""
        low = any(t.steps[step].autocast for t in self.ranks if len(t.steps) > step)
        low = low or self.rounding > 2**-24
        # A communication hook of DistributedDataParallel may send half precision.
        low = low or any(True for _ in self.ranks[0].of("hook"))
        # 5 % was too little for a small model in half precision. Differences add up over the first
        # steps.
        return (0.1 if low else 2e-3) * min(1 + step / 10, 10)


def unlike(
    first: Sequence[Mapping[str, Any]], second: Sequence[Mapping[str, Any]]
) -> Iterator[tuple[str, Any, Any]]:
    """The options of optimizers that differ: name and values."""
    for mine, theirs in zip(first, second, strict=False):
        for name, value in mine.items():
            its = theirs.get(name, value)
            pairs = zip(_numbers(value), _numbers(its), strict=False)
            # A script may compute its limit from the norm of the gradients.
            exact = 0.05 if name == "clip" else 1e-3
            if not all(math.isclose(a, b, rel_tol=exact) for a, b in pairs):
                yield name, value, its


def _numbers(value: Any) -> list[float]:
    return value if isinstance(value, list) else [value]


def _unlike(alone: Step, row: list[Step]) -> str:
    """Why a step of one process differs from that of the ranks; "" if it does not."""
    samples = sum(size for step in row for size in step.sizes)
    if alone.names != row[0].names:
        return "it trains other parameters"
    # One for one, or one process does the backward passes of all ranks.
    if len(alone.losses) not in {len(row[0].losses), len(row[0].losses) * len(row)}:
        return f"it has {len(alone.losses)} backward passes and each rank {len(row[0].losses)}"
    if alone.sizes and sum(alone.sizes) != samples:
        return f"it has {sum(alone.sizes)} samples and the ranks together {samples}"
    if alone.alone or len({str(step.host) for step in row}) > 1:
        return "each rank draws random numbers that one process cannot be given"
    if alone.inputs and sorted(alone.inputs) != sorted(i for step in row for i in step.inputs):
        return "the model is called with other samples"
    return ""

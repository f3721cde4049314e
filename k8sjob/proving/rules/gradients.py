"""Rules over the model: its weights, buffers and random numbers, and how gradients are reduced."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import TYPE_CHECKING, Final

from k8sjob.proving.rules.evidence import Difference, Fault, message, unlike
from k8sjob.proving.trace import changed, distance, length, mean, norm, shares, shown, update, worst

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from k8sjob.proving.rules.evidence import Evidence
    from k8sjob.proving.trace import Sketch, Step, Trace

_FEW: Final = 8
"""Steps that may be those of a schedule by chance."""


def model_init(evidence: Evidence) -> Iterator[Difference]:
    """The ranks begin with different weights."""
    # Of a sharded model each rank has other parts.
    every = [] if evidence.many.sharded else [trace.models for trace in evidence.ranks]
    for first, *models in zip(*every, strict=False):
        for rank, model in enumerate(models, 1):
            mine_of, its = ({**m["weights"], **m["buffers"]} for m in (first, model))
            for name, mine in mine_of.items():
                weight = its.get(name)
                # DistributedDataParallel makes weights equal when it is made, which may be after
                # this call.
                if weight is not None and changed(mine, weight) and not _equalized(evidence, name):
                    text = f"{name} of rank {rank} is not that of rank 0 when training begins"
                    pair = norm(mine), norm(weight)
                    yield Difference(Fault.MODEL_INIT, 0, "weight", text, name, rank, pair)


def _equalized(evidence: Evidence, name: str) -> bool:
    """Whether it is equal on all ranks at their first step: DDP may be made after a first pass."""
    steps = [trace.steps[0] for trace in evidence.ranks if trace.steps]
    values = [dict(zip(step.names, step.before, strict=True)) | step.buffers for step in steps]
    return bool(values) and all(
        name in value and not changed(values[0][name], value[name]) for value in values
    )


def random_numbers(evidence: Evidence) -> Iterator[Difference]:
    """The ranks use the same random numbers for different samples."""
    for at, row, _ in evidence.steps():
        first = row[0].draws
        if first and all(step.draws == first for step in row):
            text = message("same-masks", name=first[0][0])
            yield Difference(Fault.DROPOUT, at, "input", text)


def modes(evidence: Evidence) -> Iterator[Difference]:
    """Modules are in training mode on some ranks only."""
    for at, row, _ in evidence.steps():
        for rank, step in enumerate(row):
            modes = row[0].training + step.training
            if any(mine != its for mine, its in zip(row[0].training, step.training, strict=False)):
                text, pair = message("modes", rank=rank), (min(modes), max(modes))
                yield Difference(Fault.RANK_DEPENDENT, at, "weight", text, rank=rank, values=pair)


def buffers(evidence: Evidence) -> Iterator[Difference]:
    """The ranks' buffers differ, and that of rank 0 is not that of one process."""
    for at, row, alone in evidence.steps():
        for name, mine in row[0].buffers.items():
            expected = alone.buffers.get(name) if alone else None
            # Rank 0 has what one process has, and its buffers are the ones that DDP broadcasts and
            # that a checkpoint gets.
            if expected is not None and distance(expected, mine) <= 1e-6 * norm(mine):
                continue
            for rank, step in enumerate(row[1:], 1):
                buffer = step.buffers.get(name)
                if buffer is None or distance(mine, buffer) <= evidence.tolerance(at) * norm(mine):
                    continue
                # By the name: the record has buffers of any module.
                statistics = any(word in name for word in ("mean", "var", "std", "running"))
                cause = Fault.BATCHNORM if statistics else Fault.RANK_DEPENDENT
                text = message("buffer", name=name, rank=rank)
                pair = norm(expected or mine), norm(buffer)
                yield Difference(cause, at, "buffer", text, name, rank, pair)


def options(evidence: Evidence) -> Iterator[Difference]:
    """An option of the optimizer differs, or what gradients are clipped to."""
    clipping = {"clip": Fault.CLIPPING}
    causes = clipping | {"lr": Fault.LEARNING_RATE}
    for at, row, alone in evidence.steps():
        for rank, step in enumerate(row):
            for name, value, its in unlike(row[0].options, step.options):
                cause = causes.get(name, Fault.RANK_DEPENDENT)
                text = f"{name} of rank {rank} is {its}, of rank 0 {value}"
                yield Difference(cause, at, "weight", text, rank=rank, values=(value, its))
        for name, value, its in unlike(alone.options, row[0].options) if alone else ():
            values = {"name": name, "other": its, "value": value, "size": evidence.size}
            text = message("option-of-one", **values)
            cause = clipping.get(name, Fault.LEARNING_RATE)
            yield Difference(cause, at, "weight", text, values=(value, its))


def schedules(evidence: Evidence) -> Iterator[Difference]:
    """A schedule is made for the steps of one process, computed from the data set."""
    first = evidence.ranks[0]
    passes = [row for row in first.passes.values() if row.trained]
    ended = [trace.end["how"] == "done" for trace in evidence.ranks]
    if not all([*ended, *(row.complete for row in passes)]):
        return
    about, epochs = passes[0].about if passes else {}, len(passes)
    length, size = about.get("length"), about.get("batch_size")
    if len({row.about["loader"] for row in passes}) != 1 or not length or not size:
        return
    # With drop_last, without it, and in one number over all epochs.
    of_one = {epochs * (length // size), epochs * -(-length // size), epochs * length // size}
    done = sum(len(row.batches) for row in passes)
    for event in first.of("schedule"):
        lengths = {number for number in event["numbers"] if number >= done}
        # The schedule stepped with each batch, and one of its numbers is the length for one
        # process.
        if event["done"] == done >= _FEW and lengths and lengths <= of_one and done not in lengths:
            of = {"name": event["name"], "length": max(lengths), "done": done}
            text = message("schedule", size=evidence.size, **of)
            advice = "count the steps of a rank: epochs * len(loader), with its sampler"
            at, pair = len(first.steps) - 1, (max(lengths), done)
            yield Difference(Fault.LEARNING_RATE, at, "weight", text, values=pair, next=advice)


def skipped(evidence: Evidence) -> Iterator[Difference]:
    """A backward pass is followed by a step on some ranks only."""
    counts = [len(trace.steps) for trace in evidence.ranks]
    sequences = [_stepped(trace) for trace in evidence.ranks]
    for at, after in enumerate(zip(*sequences, strict=False)):
        if len(set(after)) > 1:
            rank, stepping = after.index(False), after.index(True)
            text = f"rank {rank} does no optimizer step where rank {stepping} does one"
            step, pair = sum(sequences[stepping][:at]), (counts[stepping], counts[rank])
            yield Difference(Fault.SKIPS_STEP, step, "weight", text, rank=rank, values=pair)


def _stepped(trace: Trace) -> list[bool]:
    """For each backward pass, whether a step of an optimizer came before the next one."""
    begun = [event["step"] for event in trace.of("backward")]
    # A backward pass without a step after it accumulates, or was skipped.
    after = [later > now for now, later in pairwise([*begun, len(trace.steps)])]
    # Without its last one where the process has ended before the step.
    return after if trace.end["how"] == "done" or after[-1:] == [True] else after[:-1]


def kept(evidence: Evidence) -> Iterator[Difference]:
    """Gradients of the step before are left on some ranks only."""
    for row in zip(*(trace.of("backward") for trace in evidence.ranks), strict=False):
        accumulates = [event["kept"] for event in row]
        if len(set(accumulates)) > 1:
            rank = accumulates.index(True)
            text = message("gradients-kept", rank=rank, other=accumulates.index(False))
            yield Difference(Fault.ACCUMULATION, row[0]["step"], "gradient", text, rank=rank)


def weights(when: str, evidence: Evidence) -> Iterator[Difference]:
    """The ranks' weights differ "before" a step, or "after" one, and their gradients do not."""
    stepped: set[int] = set()
    begun = {name for model in evidence.ranks[0].models for name in model["weights"]}
    averaged = evidence.averaged if when == "after" else {}
    for at, row, _ in evidence.steps() if not evidence.many.sharded else ():
        if at in averaged:
            continue
        # Parameters that are small beside the others differ by rounding.
        floor = max(0.03 * length(row[0].before), 1e-12)
        for rank, step in enumerate(row[1:], 1):
            mine, theirs = getattr(row[0], when), getattr(step, when)
            index = worst(mine, theirs, evidence.tolerance(at), floor)
            if index is None:
                continue
            name = row[0].names[index]
            text = f"{name} of rank {rank} is not that of rank 0"
            cause = Fault.RANK_DEPENDENT
            if when == "after":
                text += " after the step, and their gradients are equal"
            # It was equal when training began, or at an earlier step.
            elif row[0].optimizer in stepped or name in begun:
                text += ": it was changed outside the optimizer"
            else:
                cause = Fault.MODEL_INIT
            pair = shown(mine[index], theirs[index])
            yield Difference(cause, at, "weight", text, name, rank, pair)
        stepped.add(row[0].optimizer)


def weights_averaged(evidence: Evidence) -> Iterator[Difference]:
    """The ranks average weights after the step, and these are not those of one process."""
    compared, _ = evidence.compared
    for at, following in evidence.averaged.items():
        if evidence.single is None or not at < following < compared:
            continue
        mine, theirs = (
            (trace.steps[at], trace.steps[following])
            for trace in (evidence.single, evidence.ranks[0])
        )
        expected, averaged = (update(now.before, later.before) for now, later in (mine, theirs))
        tolerance = evidence.tolerance(at)
        rounded = 3 * evidence.rounding * length(mine[0].before)  # by the step and by the average
        floor = max(0.03 * length(expected), rounded / tolerance)
        index = worst(expected, averaged, tolerance, floor)
        if index is not None:
            name = theirs[0].names[index]
            text = message("weights-averaged", name=name)
            pair = shown(expected[index], averaged[index])
            advice = "average gradients before the step"
            yield Difference(Fault.NOT_AVERAGED, at, "weight", text, name, values=pair, next=advice)


def gradient(evidence: Evidence) -> Iterator[Difference]:
    """The first gradient that differs: between ranks, or from that of one process."""
    for at, row, alone in evidence.steps():
        if at in evidence.averaged:
            continue
        tolerance, floor = evidence.tolerance(at), evidence.floors[at]
        for rank, step in enumerate(row) if not evidence.many.sharded else ():
            index = worst(row[0].grads, step.grads, tolerance, floor)
            if index is not None:
                yield _between_ranks(evidence, at, row, rank, index)
        grads = evidence.many.whole(at, "grads")
        expected = alone.grads if alone else None
        # Without one process: the mean of the ranks' own gradients.
        if evidence.single is None and not evidence.many.sharded:
            expected = mean([step.local for step in row])
        if expected is None:
            continue
        if alone:
            tolerance = evidence.explained[at]
        index = worst(expected, grads, tolerance, floor)
        if index is not None:
            yield _from_one(evidence, at, row, alone, expected, grads, index)


def _between_ranks(
    evidence: Evidence, at: int, row: Sequence[Step], rank: int, index: int
) -> Difference:
    """The ranks step with different gradients."""
    first, name = row[0], row[0].names[index]
    # Rank 0's gradient as a sum of the ranks' own, by least squares.
    weights, residual = shares(first.grads, [step.local for step in row])
    # The first cause that fits, as each of them leaves unequal gradients.
    if _accumulates(evidence):
        cause, why = Fault.ACCUMULATION, "not every micro-batch was averaged"
    elif first.options[-1]["clip"] and residual < 0.01 and min(weights) > 0.2 * max(weights):
        cause, why = Fault.CLIPPING, "each rank clips by its own norm"
    else:
        cause, why = Fault.NOT_AVERAGED, "it was not averaged"
    text = f"the gradient of {name} on rank {rank} is not that of rank 0: {why}"
    pair = shown(first.grads[index], row[rank].grads[index])
    return Difference(cause, at, "gradient", text, name, rank, pair)


def _accumulates(evidence: Evidence) -> bool:
    return any(len(step.losses) > 1 for trace in evidence.ranks for step in trace.steps)


def _from_one(  # noqa: PLR0917 - what the caller has
    evidence: Evidence,
    at: int,
    row: Sequence[Step],
    alone: Step | None,
    expected: Sequence[Sketch | None],
    grads: Sequence[Sketch | None],
    index: int,
) -> Difference:
    """All ranks step with the same gradient, and it is not that of one process."""
    size, name, partial = len(row), row[0].names[index], _partial(row)
    # Each rank's share of the gradient, over that of one process in its own: 1/size is right.
    rank_shares, unexplained = [1 / size] * size, 0.0
    if not evidence.many.sharded:
        rank_shares, unexplained = shares(grads, [step.local for step in row])
        # One process, too, may scale or clip its gradient before the step.
        base = shares(alone.grads, [alone.local])[0][0] if alone else 1.0
        rank_shares = [share / (base or 1.0) for share in rank_shares]
    mean_share = sum(rank_shares) / size
    equal_shares = max(rank_shares) - min(rank_shares) <= 0.02 * max(map(abs, rank_shares))

    def each_has(share: float) -> bool:
        return equal_shares and abs(mean_share / share - 1) < 0.05

    (scale,), misfit = shares(grads, [expected])
    clipped = any(bool(step.options[-1]["clip"]) for step in row)
    ordered = sorted(rank_shares)
    of_one_rank = size > 1 and ordered[-1] > 0.95 and ordered[-2] < 0.05 and unexplained < 0.05
    proportional = misfit <= 0.02 and not clipped
    sizes = tuple(sum(step.sizes) for step in row)
    equal_batches = len(set(sizes)) == 1
    losses = _losses(row, alone)
    equal_losses = losses is not None and math.isclose(*losses, rel_tol=1e-5)
    # A gradient that a rank has changed by itself is no part of the mean on one process.
    weights, residual = shares(alone.local if alone else [], [step.local for step in row])
    weighted = residual < 0.02 and abs(sum(weights) - 1) < 0.02
    weight_texts = ", ".join(f"{weight:.3g}" for weight in weights)
    wrappers = {model["wrapper"] for model in evidence.ranks[0].models}
    # DistributedDataParallel has averaged, and the script calls all_reduce after that.
    reduced_again = "DistributedDataParallel" in wrappers and row[0].reduced
    twice = not each_has(1 / size) and (each_has(1 / size**2) or (each_has(1) and reduced_again))
    shares_of_local, residual = shares([grads[index]], [[step.local[index]] for step in row])
    divided_again = all(abs(share * size**2 - 1) < 0.05 for share in shares_of_local)
    once_more = residual < 0.02 and divided_again and not evidence.many.sharded
    # The gradient is 1/size of that of one process.
    divided = proportional and abs(scale * size - 1) < 0.02
    micro_batches = _accumulates(evidence)
    causes = (  # in this order; texts.toml says what each one means
        (partial is not None, Fault.RANK_DEPENDENT, "partial"),
        (micro_batches and (unexplained > 0.02 or each_has(1)), Fault.ACCUMULATION, "micro"),
        (once_more and not (twice or clipped), Fault.AVERAGED_TWICE, "once-more"),
        (of_one_rank and equal_batches, Fault.NOT_AVERAGED, "of-one-rank"),
        (unexplained > 0.05 or (not equal_shares and equal_batches), Fault.CLIPPING, "no-mean"),
        (twice, Fault.AVERAGED_TWICE, "weight"),
        (equal_shares and not each_has(1 / size), Fault.NOT_AVERAGED, "weight"),
        (not (equal_batches or proportional), Fault.LAST_BATCH, "unequal-batches"),
        (equal_losses and divided, Fault.AVERAGED_TWICE, "loss-agrees"),
        (equal_losses and weighted, Fault.LOSS_SCALING, "own-number"),
        (equal_losses, Fault.CLIPPING, "changed"),
        (proportional and abs(scale - 1) > 0.02, Fault.LOSS_SCALING, "scaled"),
        (evidence.many.norms - {"SyncBatchNorm"}, Fault.BATCHNORM, "statistics"),
        (True, Fault.LOSS_SCALING, "mean-of-losses"),
    )
    cause, key = next((cause, key) for holds, cause, key in causes if holds)
    text = message(
        f"gradient-{key}", name=partial or name, size=size, rank=rank_shares.index(ordered[-1]),
        part=mean_share, sizes=sizes, scale=scale, weights=weight_texts,
    )  # fmt: skip
    where = {Fault.LOSS_SCALING: "loss", Fault.BATCHNORM: "buffer"}
    tensor = "gradient" if equal_losses else where.get(cause, "gradient")
    pair = losses if tensor == "loss" and losses else shown(expected[index], grads[index])
    return Difference(cause, at, tensor, text, partial or name, None, pair)


def _losses(row: Sequence[Step], alone: Step | None) -> tuple[float, float] | None:
    """The loss on one process, and the mean of the ranks' losses; None: one is not known."""
    mine = alone.losses if alone is not None else []
    theirs = [loss for step in row for loss in step.losses]
    losses = [loss for loss in (*mine, *theirs) if loss is not None]
    if not mine or len(losses) < len(mine) + len(theirs):
        return None
    return sum(losses[: len(mine)]), sum(losses[len(mine) :]) / len(row)


def _partial(row: Sequence[Step]) -> str | None:
    """A parameter without a gradient on some ranks."""
    for name, *local in zip(row[0].names, *(step.local for step in row), strict=False):
        if None in local and any(local):
            return str(name)
    return None

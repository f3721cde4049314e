"""Rules over runs as wholes: repeated, restarted, failed or waiting."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from k8sjob.proving.rules.data import training
from k8sjob.proving.rules.evidence import Difference, Fault
from k8sjob.proving.trace import changed, length, norm, shown, worst

if TYPE_CHECKING:
    from collections.abc import Iterator

    from k8sjob.proving.rules.evidence import Evidence
    from k8sjob.proving.trace import Step, Trace

    _Pair = tuple[Any, Any]


def determinism(evidence: Evidence) -> Iterator[Difference]:
    """The same run once more is another one."""
    traces = evidence.again.traces if evidence.again else []
    for rank, (trace, other) in enumerate(zip(evidence.ranks, traces, strict=False)):
        for tensor, step, name, pair in _unrepeated(trace, other):
            what = "batch" if tensor == "input" else " ".join(filter(None, (tensor, name)))
            text = (
                f"two equal runs with the {what} of rank {rank} different: a random number does not"
                " come from a seed"
            )
            yield Difference(Fault.NON_DETERMINISM, step, tensor, text, name, rank, pair)


def _unrepeated(trace: Trace, other: Trace) -> Iterator[tuple[str, int, str | None, _Pair | None]]:
    """The first difference between two equal runs: tensor, step, name and values."""
    for one, two in zip(trace.models, other.models, strict=False):
        for name, mine in one["weights"].items():
            twin = two["weights"].get(name)
            if changed(mine, twin):
                yield "weight", 0, name, (norm(mine), norm(twin))
    for at, (first, second) in enumerate(zip(trace.steps, other.steps, strict=False)):
        if first.samples and first.samples != second.samples:
            yield "input", at, None, None
        for loss, again in zip(first.losses, second.losses, strict=False):
            if loss is None or again is None:
                continue
            if abs(loss - again) > 1e-3 * (abs(loss) + 1e-3):
                yield "loss", at, None, (loss, again)


def checkpoint(evidence: Evidence) -> Iterator[Difference]:
    """A restart from the first checkpoint is not as the run that was not interrupted."""
    if evidence.resumed is None:
        return
    trace, other = evidence.ranks[0], evidence.resumed.traces[0]
    # What the first run reads at its beginning is data, unless it is written in training.
    data = {event["path"] for event in trace.of("load") if event["step"] == 0}
    saved = [event["path"] for event in trace.of("save") if event["step"]]
    data = {path for path in data if not any(one.startswith(path) for one in saved)}  # x.pt.tmp
    loads = [one for one in other.of("load") if one["step"] == 0 and one["path"] not in data]
    begin = next((event["step"] for event in trace.of("save") if event["step"]), None)
    if not loads or begin is None or not other.steps:
        return
    pairs = zip(evidence.ranks, evidence.resumed.traces, strict=False)
    ranks = [zip(mine.steps[begin:], its.steps, strict=False) for mine, its in pairs]
    for at, row in enumerate(zip(*ranks, strict=False)):
        for rank, (kept, again) in enumerate(row):
            found = _restarted(kept, again, evidence.tolerance(0) / 10, first=not at)
            if found is not None:
                tensor, text, name, pair = found
                text = f"restarted from the checkpoint of step {begin}, {text}"
                yield Difference(Fault.CHECKPOINT, begin + at, tensor, text, name, rank, pair)
    expected, done = len(trace.steps) - begin, len(other.steps)
    if trace.end["how"] == other.end["how"] == "done" and done > expected:
        text = (
            f"restarted from the checkpoint of step {begin}, {done} steps are done in place of"
            f" {expected}: the epoch is not restored"
        )
        at, pair = begin + expected, (expected, done)
        yield Difference(Fault.CHECKPOINT, at, "weight", text, None, 0, pair)


def _restarted(
    kept: Step, again: Step, tolerance: float, *, first: bool
) -> tuple[str, str, str | None, _Pair | None] | None:
    """The first difference in a step after a restart: tensor, message, name and values."""
    floor = max(0.01 * length(kept.before), 1e-12)
    found = worst(kept.before, again.before, tolerance, floor)
    if kept.names == again.names and found is not None:
        text = "the state of the optimizer is not restored"
        if first:
            text = "the weights are not those of the run that was not interrupted"
        return "weight", text, kept.names[found], shown(kept.before[found], again.before[found])
    if kept.rates != again.rates:
        text = "the learning rate is not restored (scheduler)"
        return "weight", text, None, (kept.rates[0], again.rates[0])
    # Batches that are read and passed over, to come to the right one, precede it.
    if kept.samples != again.samples[-len(kept.samples) :]:
        text = "the batches are different (epoch, sampler or random numbers)"
        return "input", text, None, None
    return None


def hang(evidence: Evidence) -> Iterator[Difference]:
    """The ranks wait for each other."""
    answer, ends = evidence.many.answer, [trace.end for trace in evidence.ranks]
    steps = min(len(trace.steps) for trace in evidence.ranks)
    failed = [end for end in ends if end["how"] == "error"]
    if not answer["hung"]:
        if not failed or not all(_lost(end["message"]) for end in failed):
            return
        lost = ends.index(failed[0])
        text = f"rank {lost} loses another rank at {failed[0]['where']}: "
        other = next((r for r, end in enumerate(ends) if end["how"] == "done"), None)
        if any("collective mismatch" in end.get("message", "") for end in ends):
            text += "the ranks call different collectives at the same time"
        elif other is not None:
            text += f"rank {other} has ended after {len(evidence.ranks[other].steps)} steps"
        else:
            return
        yield Difference(Fault.HANG, steps, None, text + _unequal(evidence), rank=lost)
        return
    places = {int(rank): place for rank, place in answer["places"].items()}
    where = [
        f"rank {rank} is at {places[rank] or 'no line of the script'}" for rank in sorted(places)
    ]
    ended = [str(rank) for rank in range(evidence.size) if rank not in places]
    if ended:
        where.append(f"ended: rank {', '.join(ended)}")
    text = f"the ranks wait for each other: {'; '.join(where)}{_unequal(evidence)}"
    yield Difference(Fault.HANG, steps, None, text)


def _unequal(evidence: Evidence) -> str:
    """How many batches the ranks have, where that differs in a pass that all have ended."""
    for rows in training(evidence):
        counts = [len(row.batches) for row in rows]
        if all(row.complete for row in rows) and len(set(counts)) > 1:
            return f"; the ranks have {tuple(counts)} batches in a pass"
    return ""


def error(evidence: Evidence) -> Iterator[Difference]:
    """A rank raises an exception; that it lost the others comes after what made those end."""
    if evidence.many.answer["hung"]:
        return
    failed = [
        (_lost(trace.end["message"]), rank)
        for rank, trace in enumerate(evidence.ranks)
        if trace.end["how"] == "error"
    ]
    for _, rank in sorted(failed):
        trace = evidence.ranks[rank]
        first = (trace.end["message"].strip().splitlines() or [""])[0]
        text = f"{trace.end['type']}: {first} at {trace.end['where']}"
        yield Difference(Fault.ERROR, len(trace.steps), None, text, rank=rank)


def failed_alike(evidence: Evidence) -> bool:
    """Whether all ranks raise the same exception at the same place."""
    ends = [trace.end for trace in evidence.ranks]
    if any(end["how"] != "error" or _lost(end["message"]) for end in ends):
        return False
    return len({(end["type"], end["where"]) for end in ends}) == 1


def _lost(message: str) -> bool:
    """Whether an exception is about the connection to another rank."""
    return "onnection" in message

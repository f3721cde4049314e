"""Rules over runs as wholes: repeated, restarted, failed or waiting."""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING, Any

from k8sjob.proving.rules.data import training
from k8sjob.proving.rules.evidence import Difference, Fault, message, unlike
from k8sjob.proving.trace import changed, length, norm, shown, worst

if TYPE_CHECKING:
    from collections.abc import Iterator

    from k8sjob.proving.rules.evidence import Evidence
    from k8sjob.proving.trace import Step, Trace, TracedRun

    _Pair = tuple[Any, Any]


def determinism(evidence: Evidence) -> Iterator[Difference]:
    """The same run once more is another one."""
    traces = evidence.again.traces if evidence.again else []
    for rank, (trace, repeated) in enumerate(zip(evidence.ranks, traces, strict=False)):
        for tensor, step, name, pair in _unrepeated(trace, repeated):
            label = "batch" if tensor == "input" else " ".join(filter(None, (tensor, name)))
            text = message("not-repeated", what=label, rank=rank)
            yield Difference(Fault.NON_DETERMINISM, step, tensor, text, name, rank, pair)


def repeats(many: TracedRun, again: TracedRun) -> bool:
    """Whether a run is equal to the first one."""
    pairs = zip(many.traces, again.traces, strict=False)
    return not again.fails and not any(any(_unrepeated(*pair)) for pair in pairs)


def other_seeds(evidence: Evidence) -> Iterator[str]:
    """Ranks with different seeds of hashes train otherwise; the agent gives them one."""
    hashed, again = evidence.hashed, evidence.again
    if hashed is None or again is None or not repeats(evidence.many, again):
        return
    text = next((f"rank {rank} fails: {failure}" for rank, failure in _failures(hashed)), "")
    for rank, pair in enumerate(zip(evidence.ranks, hashed.traces, strict=False)):
        for tensor, step, name, _ in _unrepeated(*pair):
            text = text or f"the {name or tensor} of rank {rank} is another one at step {step}"
    yield message("other-seeds", what=text)


def _unrepeated(
    trace: Trace, repeated: Trace
) -> Iterator[tuple[str, int, str | None, _Pair | None]]:
    """The first difference between two equal runs: tensor, step, name and values."""
    for model, twin in zip(trace.models, repeated.models, strict=False):
        for name, weight in model["weights"].items():
            again = twin["weights"].get(name)
            if changed(weight, again):
                yield "weight", 0, name, (norm(weight), norm(again))
    for at, (first, second) in enumerate(zip(trace.steps, repeated.steps, strict=False)):
        # A step may have no known samples, where no DataLoader made them.
        if first.samples and first.samples != second.samples:
            yield "input", at, None, None
        for loss, again in zip(first.losses, second.losses, strict=False):
            if loss is None or again is None:
                continue
            if abs(loss - again) > 1e-3 * (abs(loss) + 1e-3):
                yield "loss", at, None, (loss, again)


def checkpoint(evidence: Evidence) -> Iterator[Difference]:
    """A restart from the first checkpoint is not as the run that was not interrupted."""
    if evidence.resumed is None or not _reads_checkpoint(evidence):
        return
    trace, resumed = evidence.ranks[0], evidence.resumed.traces[0]
    begin = _begin(evidence)
    pairs = zip(evidence.ranks, evidence.resumed.traces, strict=False)
    ranks = [zip(mine.steps[begin:], its.steps, strict=False) for mine, its in pairs]
    for at, row in enumerate(zip(*ranks, strict=False)):
        for rank, (uninterrupted, again) in enumerate(row):
            mismatch = _restarted(uninterrupted, again, evidence.tolerance(0) / 10, first=not at)
            if mismatch is not None:
                tensor, text, name, pair = mismatch
                text = f"restarted from the checkpoint of step {begin}, {text}"
                yield Difference(Fault.CHECKPOINT, begin + at, tensor, text, name, rank, pair)
    expected, done = len(trace.steps) - begin, len(resumed.steps)
    # Both ran to their end, and not to the limit of steps.
    ended = trace.end["how"] == resumed.end["how"] == "done"
    if ended and (done > expected or not done):
        text = message("epoch-not-restored", begin=begin, done=done, expected=expected)
        at, pair = begin + expected, (expected, done)
        yield Difference(Fault.CHECKPOINT, at, "weight", text, None, 0, pair)


def _begin(evidence: Evidence) -> int:
    """The step of the checkpoint of which the files were kept."""
    snapshots = (event for trace in evidence.ranks for event in trace.of("snapshot"))
    return next((event["step"] for event in snapshots), 0)


def _reads_checkpoint(evidence: Evidence) -> bool:
    """Whether the restarted run reads what the first one has written."""
    if evidence.resumed is None:
        return False
    # What the first run reads at its beginning is data, unless it is written in training.
    files = [event for trace in evidence.ranks for event in trace.events if "path" in event]
    inputs = {e["path"] for e in files if e["kind"] == "load" and e["step"] == 0}
    saved = [event["path"] for event in files if event["kind"] == "save" and event["step"]]
    # A draft that is renamed later is a save as well.
    inputs = {p for p in inputs if not any(path.startswith(p) for path in saved)}  # x.pt.tmp
    loads = (event for resumed in evidence.resumed.traces for event in resumed.of("load"))
    return any(event["step"] == 0 and event["path"] not in inputs for event in loads)


def ignored_state(evidence: Evidence) -> Iterator[Difference]:
    """load_state_dict(strict=False) leaves out weights for the prefix of their names."""
    for run, begin in ((evidence.many, 0), (evidence.resumed, _begin(evidence))):
        for event in run.traces[0].of("ignored") if run else ():
            name, at = event["name"], begin + event["step"]
            text = f"load_state_dict(strict=False) ignores {event['saved']}: the model has {name}"
            advice = "save model.module.state_dict(), and load it with strict=True"
            yield Difference(Fault.CHECKPOINT, at, "weight", text, name, next=advice)


def failed_restart(evidence: Evidence) -> Iterator[Difference]:
    """A restart from the first checkpoint fails, once it has read that."""
    # A script that does not resume may fail at its own output of the first run.
    if evidence.resumed is None or not _reads_checkpoint(evidence):
        return
    begin = _begin(evidence)
    for rank, failure in _failures(evidence.resumed):
        text = f"restarted from the checkpoint of step {begin}, rank {rank} fails: {failure}"
        advice = "make the script start from the files that it has written"
        yield Difference(Fault.CHECKPOINT, begin, None, text, rank=rank, next=advice)


def moved(evidence: Evidence) -> Iterator[str]:
    """A restart on another number of processes fails, where one on as many does not."""
    resumed, single = evidence.resumed, evidence.single
    # Some scripts cannot run on one process at all.
    # A restart that fails on the job's own processes is a difference: see failed_restart.
    if evidence.moved and resumed and not resumed.fails and single and single.end["how"] != "error":
        for _, failure in islice(_failures(evidence.moved), 1):
            yield f"restarted from its checkpoint on 1 process, the script fails: {failure}"


def not_compared(evidence: Evidence) -> Iterator[str]:
    """Runs that there were not, or that did not show anything."""
    compared, reason = evidence.compared
    if compared < evidence.common:
        yield f"one process from step {compared} on ({reason})"
    if evidence.again is not None and evidence.again.fails:
        _, failure = next(_failures(evidence.again), (0, "it ends early"))
        yield f"a second equal run ({failure})"
    saves = [event for event in evidence.ranks[0].of("save") if event["step"]]
    if evidence.resumed is None:
        reason = "no checkpoint was written between two steps"
        if any(event["step"] < len(evidence.ranks[0].steps) for event in saves):
            reason = "the checkpoint is outside of the working folder and the volumes, or too large"
        yield f"a restart ({reason})"
    elif not _reads_checkpoint(evidence):
        _, failure = next(_failures(evidence.resumed), (0, "its first step"))
        yield f"a restart (the script reads no checkpoint with torch.load before {failure})"


def _restarted(
    uninterrupted: Step, again: Step, tolerance: float, *, first: bool
) -> tuple[str, str, str | None, _Pair | None] | None:
    """The first difference in a step after a restart: tensor, message, name and values."""
    # A parameter with less than 1 % of all is compared by that length.
    floor = max(0.01 * length(uninterrupted.before), 1e-12)
    index = worst(uninterrupted.before, again.before, tolerance, floor)
    if uninterrupted.names == again.names and index is not None:
        text = "the state of the optimizer is not restored"
        if first:
            text = "the weights are not those of the run that was not interrupted"
        pair = shown(uninterrupted.before[index], again.before[index])
        return "weight", text, uninterrupted.names[index], pair
    for option, value, restored in unlike(uninterrupted.options, again.options):
        return "weight", f"{option} is not restored (scheduler)", None, (value, restored)
    # Batches that are read and passed over, to come to the right one, precede it.
    if uninterrupted.samples != again.samples[-len(uninterrupted.samples) :]:
        text = "the batches are different (epoch, sampler or random numbers)"
        return "input", text, None, None
    return None


def hang(evidence: Evidence) -> Iterator[Difference]:
    """The ranks wait for each other."""
    answer, ends = evidence.many.answer, [trace.end for trace in evidence.ranks]
    unlike = any("collective mismatch" in end.get("message", "") for end in ends)
    if evidence.many.killed and not unlike:  # gloo itself aborts where collectives differ
        return
    steps = min(len(trace.steps) for trace in evidence.ranks)
    if answer["hung"]:
        places = {int(rank): place for rank, place in answer["places"].items()}
        where = "; ".join(
            f"rank {rank} is at {places[rank] or 'no line of the script'}"
            if rank in places
            else f"rank {rank} has ended"
            for rank in range(evidence.size)
        )
        text = f"the ranks wait for each other: {where}{_unequal(evidence)}"
        yield Difference(Fault.HANG, steps, None, text)
        return
    # Not hung, but a rank has lost another one that has left already.
    failed = [rank for rank, end in enumerate(ends) if end["how"] == "error"]
    done = [rank for rank, end in enumerate(ends) if end["how"] == "done"]
    lost = bool(failed) and all(_lost(ends[rank]["message"]) for rank in failed)
    if lost and (unlike or done):
        text = f"rank {failed[0]} loses another rank at {ends[failed[0]]['where']}: "
        if unlike:
            text += "the ranks call different collectives at the same time"
        else:
            text += f"rank {done[0]} has ended after {len(evidence.ranks[done[0]].steps)} steps"
        yield Difference(Fault.HANG, steps, None, text + _unequal(evidence), rank=failed[0])


def _unequal(evidence: Evidence) -> str:
    """How many batches the ranks have, where that differs in a pass that all have ended."""
    for rows in training(evidence):
        counts = [len(row.batches) for row in rows]
        if all(row.complete for row in rows) and len(set(counts)) > 1:
            return f"; the ranks have {tuple(counts)} batches in a pass"
    return ""


def error(evidence: Evidence) -> Iterator[Difference]:
    """A rank is killed, or raises an exception."""
    if evidence.many.answer["hung"] and not evidence.many.killed:
        return
    for rank, text in _failures(evidence.many):
        advice = ""
        if rank in evidence.many.killed:
            advice = "see what ends this rank: its memory (`k8sjob fit`), a library or the script"
        steps = min(len(trace.steps) for trace in evidence.ranks)
        yield Difference(Fault.ERROR, steps, None, text, rank=rank, next=advice)


def _failures(run: TracedRun) -> Iterator[tuple[int, str]]:
    """The ranks that fail, and how: a cause before what it has done to the other ranks."""
    for rank, how in run.killed.items():
        trace = run.traces[rank]
        lines = [] if "SIGKILL" in how else trace.end["message"].strip().splitlines()
        yield rank, ": ".join([f"it {how} after step {len(trace.steps)}", *lines[-1:]])
    errors = [
        (_lost(trace.end["message"]), rank)
        for rank, trace in enumerate(run.traces)
        if trace.end["how"] == "error"
    ]
    # Sorted: False, an error of its own, comes before True, a connection that another rank has
    # lost.
    for _, rank in sorted(errors):
        end = run.traces[rank].end
        lines = [line.strip() for line in end["message"].strip().splitlines()] or [""]
        # As of load_state_dict: the first line only announces the others.
        message = " ".join(lines[: 2 if lines[0].endswith(":") else 1])
        yield rank, f"{end['type']}: {message} at {end['where']}"
    for rank, place in run.answer["places"].items():
        if run.answer["hung"]:
            yield int(rank), f"it waits at {place or 'no line of the script'}"


def failed_alike(evidence: Evidence) -> bool:
    """Whether all ranks raise the same exception at the same place."""
    ends = [trace.end for trace in evidence.ranks]
    if any(end["how"] != "error" or _lost(end["message"]) for end in ends):
        return False
    return len({(end["type"], end["where"]) for end in ends}) == 1


def _lost(message: str) -> bool:
    """Whether an exception is about the connection to another rank."""
    # "Connection reset", "connection closed" and others, of gloo and the store.
    return "onnection" in message

"""Rules over the data: which samples each rank trains on, and in which order."""

from __future__ import annotations

from collections import Counter
from itertools import islice, pairwise
from typing import TYPE_CHECKING

from k8sjob.proving.rules.evidence import Difference, Fault, message
from k8sjob.proving.trace import shares

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from k8sjob.proving.rules.evidence import Evidence
    from k8sjob.proving.trace import Pass

_MOST = 0.6
"""The part of the samples that ranks without their own data have in common, at least."""


def identified(rows: Sequence[Pass]) -> tuple[str, list[list[int]]]:
    """The samples by keys that hold on all ranks: "ids" of one data set, or contents."""
    # Indices mean the same samples only in one data set.
    same = len({row.about["data"] for row in rows}) == 1 and rows[0].about["data"] is not None
    kind = "ids" if same and all(row.samples("ids") for row in rows) else "digests"
    return kind, [row.samples(kind) for row in rows]


def training(evidence: Evidence) -> Iterator[list[Pass]]:
    """Each pass over training data, by rank."""
    for key, first in evidence.ranks[0].passes.items():
        rows = [trace.passes[key] for trace in evidence.ranks if key in trace.passes]
        # A pass that some ranks do not have is a matter of other rules.
        if first.trained and len(rows) == evidence.size:
            yield rows


def _shards(evidence: Evidence) -> Iterator[tuple[str, list[list[int]], list[Pass]]]:
    for rows in training(evidence):
        kind, samples = identified(rows)
        slices = [row.samples("slices") for row in rows]
        if all(0 < len(mine) < len(every) for mine, every in zip(slices, samples, strict=True)):
            kind, samples = "digests", slices  # the ranks divide each batch themselves
        if all(samples):
            yield kind, samples, rows


def _shared(samples: Sequence[Sequence[int]]) -> int:
    """The number of samples that more than one rank has."""
    counts = Counter(sample for rank in samples for sample in set(rank))
    return sum(1 for count in counts.values() if count > 1)


def _drawn(kind: str, samples: Sequence[Sequence[int]]) -> bool:
    """Whether a sampler draws with replacement: ranks may then have the same sample."""
    return kind == "ids" and all(len(set(rank)) < len(rank) for rank in samples)


def not_sharded(evidence: Evidence) -> Iterator[Difference]:
    """The ranks train on the same samples."""
    for kind, samples, rows in _shards(evidence):
        about = rows[0].about
        length, size, batches = about["length"], about["batch_size"], about["batches"]
        shared, least = _shared(samples), min(len(set(rank)) for rank in samples)
        if _drawn(kind, samples):
            # With replacement, ranks have samples in common by chance; the same one in the same
            # place, they do not.
            rounds = [*zip(*samples, strict=False)]
            shared, least = sum(len(set(row)) < len(row) for row in rounds), len(rounds)
        # Each rank has batches for the whole data set: nothing divides it.
        whole = kind == "ids" and length and batches and size and batches * size >= length > size
        if shared >= _MOST * least or (whole and shared):
            text = message("same-data", shared=shared, least=least)
            yield Difference(Fault.NOT_SHARDED, rows[0].step, "input", text, values=(0, shared))


def without_loader(evidence: Evidence) -> Iterator[Difference]:
    """The same where no DataLoader makes the batches: known by what the model is called with."""
    loaded = any(row.trained for trace in evidence.ranks for row in trace.passes.values())
    if loaded or not all(trace.steps for trace in evidence.ranks):
        return
    inputs = [trace.steps[0].inputs for trace in evidence.ranks]  # later ones: of another epoch
    shared, least = _shared(inputs), min(len(set(rank)) for rank in inputs)
    if least > 1 and shared >= _MOST * least:
        text = f"all ranks train on the same data: {shared} of {least} samples of a batch"
        yield Difference(Fault.NOT_SHARDED, 0, "input", text, values=(0, shared))


def overlap(evidence: Evidence) -> Iterator[Difference]:
    """The ranks' parts overlap, or do not cover the data."""
    for kind, samples, rows in _shards(evidence):
        about = rows[0].about
        unique = len({sample for rank in samples for sample in rank})
        twice = sum(map(len, samples)) - unique
        inside = sum(len(rank) - len(set(rank)) for rank in samples)
        complete = all(row.complete for row in rows)
        if _drawn(kind, samples):
            continue
        # Contents may be equal by themselves, as empty pictures are; indices are not.
        if kind == "ids" and (_shared(samples) or (twice and not inside)):
            # A sampler repeats some samples so that all ranks have equally many; padded() notes it.
            if _padding(kind, samples, rows):
                continue
            text = "the ranks' parts of the data overlap"
            text += f"; used twice in a pass: {twice} of {about['length']}"
            at, pair = _first_repeated(samples, rows), (0, twice)
            yield Difference(Fault.OVERLAP, at, "input", text, values=pair)
        length = about["length"] if kind == "ids" and not about["iterable"] else None
        # A RandomSampler or a Subset may choose a part of the data on purpose.
        chosen = about["sampler"] == "RandomSampler" or "Subset" in str(about["sampler"])
        if not complete or not length or twice or chosen:
            continue
        missing = length - unique
        # A sampler of batches decides itself how large they are, and leaves the rest out.
        size = about["batch_size"] or max(part.size for row in rows for part in row.batches)
        batch, by_sampler = size * evidence.size, about["batch_size"] is None
        # What is missing is less than a global batch, and was left out as the last one.
        incomplete = by_sampler or about["drop_last"] or missing == length % batch
        if missing > length % evidence.size and not (incomplete and missing < batch):
            text = f"{missing} of {length} samples are on no rank in a pass"
            yield Difference(Fault.OVERLAP, rows[0].step, "input", text, values=(0, missing))


def _padding(kind: str, samples: Sequence[Sequence[int]], rows: Sequence[Pass]) -> int:
    """The number of samples that are repeated only to fill up the last part of a pass."""
    about, unique = rows[0].about, len({sample for rank in samples for sample in rank})
    twice = sum(map(len, samples)) - unique
    ended = all(row.complete or len(row.batches) == about["batches"] for row in rows)
    whole = kind == "ids" and unique == about["length"]
    return twice if whole and ended and twice < len(rows) else 0


def padded(evidence: Evidence) -> Iterator[str]:
    """Samples that a sampler repeats by design: the steps are equal to those of one process."""
    for kind, samples, rows in _shards(evidence):
        if twice := _padding(kind, samples, rows):
            about = rows[0].about
            key = "padded-shards" if about["sampler"] == "ShardSampler" else "padded"
            yield message(key, twice=twice, length=about["length"])
            return


def not_compared(evidence: Evidence) -> Iterator[str]:
    """What a short run does not show of the data."""
    passes = [row for row in evidence.ranks[0].passes.values() if row.trained]
    if not passes:
        yield "the samples of the ranks (they come from no DataLoader of torch)"
    elif len(passes) == len({row.about["loader"] for row in passes}):
        yield "the order of a second pass over the data (there was one)"


def same_in_workers(evidence: Evidence) -> Iterator[Difference]:
    """Each worker of a loader gives all samples of a stream."""
    for kind, samples, rows in _shards(evidence):
        about, counts = rows[0].about, [Counter(rank).values() for rank in samples]
        workers = about["workers"]
        whole = kind == "digests" and about["iterable"] and all(row.complete for row in rows)
        if whole and workers > 1 and all(n % workers == 0 for each in counts for n in each):
            text = message("same-in-workers", workers=workers)
            yield Difference(Fault.OVERLAP, rows[0].step, "input", text, values=(1, workers))


def same_augmentation(evidence: Evidence) -> Iterator[Difference]:
    """The ranks' data sets draw the same random numbers for different samples."""
    for rows in training(evidence):
        workers = rows[0].about["workers"]
        draws = [[batch.drawn for batch in row.batches] for row in rows]
        for at, drawn in enumerate(zip(*draws, strict=False)):
            # Worker n prepares batch n first.
            if at < max(workers, 1):  # a process's first one: it may be a seed of each sample
                continue
            # A draw is its source with the states before and after: equal ones gave equal numbers.
            if any(all(draw in rank for rank in drawn[1:]) for draw in drawn[0]):
                where = " in the workers of their DataLoaders" if workers else ""
                text = message("same-augmentation", where=where)
                yield Difference(Fault.DROPOUT, rows[0].step + at, "input", text)


def divided_twice(evidence: Evidence) -> Iterator[Difference]:
    """A sampler divides data sets that are not the same on all ranks."""
    for rows in training(evidence):
        fingerprints = [row.about["own"] for row in rows]
        # None: the data set gives other samples each time, or cannot be read by index.
        if (rows[0].about["replicas"] or 1) < 2 or None in fingerprints:
            continue
        for rank, fingerprint in enumerate(fingerprints):
            if fingerprint != fingerprints[0]:
                text = message("divided-twice", rank=rank, size=evidence.size)
                yield Difference(Fault.OVERLAP, rows[0].step, "input", text, rank=rank)


def _first_repeated(samples: Sequence[Sequence[int]], rows: Sequence[Pass]) -> int:
    """The step of the first sample that is used twice."""
    used: set[int] = set()
    samples_of_ranks = [iter(rank) for rank in samples]
    for at in range(max(len(row.batches) for row in rows)):
        for row, rank in zip(rows, samples_of_ranks, strict=True):
            for sample in islice(rank, row.batches[at].size if at < len(row.batches) else 0):
                if sample in used:
                    return row.step + at
                used.add(sample)
    return rows[0].step


def uneven(evidence: Evidence) -> Iterator[Difference]:
    """A pass in which a rank does steps that others have no batch for."""
    for rows in training(evidence):
        counts = [sum(batch.trained for batch in row.batches) for row in rows]
        most, least = counts.index(max(counts)), min(counts)
        alone = rows[most].step + least
        steps = evidence.ranks[most].steps
        # Passes that begin at different steps cannot be laid side by side.
        if len({row.step for row in rows}) > 1 or not all(row.complete for row in rows):
            return
        if counts[most] == least or alone >= len(steps) or steps[alone].sizes == []:
            continue
        # 1: the rank steps with its own gradient; less: that was divided among ranks that had none.
        (share,), _ = shares(steps[alone].grads, [steps[alone].local])
        if share < 0.95:
            later = [step.sizes for trace in evidence.ranks for step in trace.steps[alone:][:1]]
            key = "next-pass" if len(later) == evidence.size and all(later) else "uneven"
            text = message(key, rank=most, most=counts[most], least=least, share=share)
            pair = 1.0, share
            yield Difference(Fault.LAST_BATCH, alone, "gradient", text, rank=most, values=pair)


def _repeated(evidence: Evidence, kind: str) -> Iterator[tuple[Pass, Pass, list[int]]]:
    """Two passes of a loader, one after the other, with the same samples in the same order.

    Where others differ, the epoch is set: a search for a rate may come before the first of them.
    """
    loaders: dict[int, list[Pass]] = {}
    for (loader, _), row in evidence.ranks[0].passes.items():
        if row.trained and len(row.samples(kind)) > 3:
            loaders.setdefault(loader, []).append(row)
    for rows in loaders.values():
        shortest = min(len(row.samples(kind)) for row in rows)
        orders = [row.samples(kind)[:shortest] for row in rows]
        always = orders.count(orders[0]) == len(orders)
        for (first, order), (second, again) in pairwise(zip(rows, orders, strict=True)):
            if order == again and (always or order != orders[0]):
                yield first, second, order


def unseen_epoch(evidence: Evidence) -> Iterator[Difference]:
    """A data set is given its epoch, and persistent workers have a copy of it from before."""
    for first, second, _ in _repeated(evidence, "digests"):
        changed = [name for name in ("epochs", "data") if first.about[name] != second.about[name]]
        # The number that the data set keeps has changed, and what the workers give has not.
        if "epochs" in changed and ("data" in changed or second.about["iterable"]):
            text, advice = message("unseen-epoch"), message("epoch-in-shared-memory")
            yield Difference(Fault.NOT_RESEEDED, second.step, "input", text, rank=0, next=advice)


def not_reseeded(evidence: Evidence) -> Iterator[Difference]:
    """A shuffled order comes again."""
    for _, second, samples in _repeated(evidence, "raw"):
        # An order that rises is none of a shuffle.
        if second.about["shuffles"] and any(a > b for a, b in pairwise(samples)):
            text = "the samples of this pass come in the same order as those of the one before"
            yield Difference(Fault.NOT_RESEEDED, second.step, "input", text, rank=0)
    orders, steps = set[int](), 0
    for event in evidence.ranks[0].events:
        steps += event["kind"] == "step"
        if event["kind"] == "order":
            if event["digest"] in orders:
                text = f"torch.randperm gives the same order of {event['size']} again"
                yield Difference(Fault.NOT_RESEEDED, steps, "input", text, rank=0)
            orders.add(event["digest"])

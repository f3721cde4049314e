"""Batches of a stream: of an IterableDataset, of a generator of samples, or of one of batches.

Nobody knows a stream's length, and no rank may wait for one that has ended. So before each step the
ranks tell each other how many samples they have, and continue until all have ended; one that has
none computes with its last batch, at weight 0.
"""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from operator import itemgetter
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader, IterableDataset, default_collate, get_worker_info

from k8sjob.runtime.comm import rng
from k8sjob.runtime.data import BatchShard, global_size

if TYPE_CHECKING:
    from k8sjob.runtime.comm.mesh import Mesh


def is_stream(source: Any) -> bool:
    """Whether this can only be read from its beginning; TypeError for a DataLoader."""
    if isinstance(source, DataLoader):
        raise TypeError(
            "this is a DataLoader, and run.batches() makes one by itself; give it"
            " loader.dataset, batch_size=..., and the loader's other options"
        )
    # IterableDataset inherits a __getitem__ that raises.
    by_index = hasattr(source, "__getitem__") and hasattr(source, "__len__")
    return isinstance(source, IterableDataset) or (isinstance(source, Iterable) and not by_index)


def samples_in(batch: Any) -> int:
    """The length of the first tensor in a batch; 1 where there is none."""
    parts = tree_leaves(dict(batch) if isinstance(batch, Mapping) else batch)
    return next((int(part.shape[0]) for part in parts if getattr(part, "shape", ())), 1)


def _digest(item: Any) -> int:
    """A number by which ranks see that they read the same: of the first numbers and texts."""
    parts = list(item.values()) if isinstance(item, Mapping) else item
    content: Any = item if isinstance(item, str | bytes | int | float) else type(item).__name__
    if isinstance(parts, list | tuple):
        content = [_digest(part) for part in parts[:8]]
    elif hasattr(item, "flatten"):
        content = item.flatten()[:64].tolist()
    return zlib.crc32(repr(content).encode()) & 0xFFFFFF  # exact in float32 too


class _Parts(IterableDataset[Any]):
    """(batch, samples, digest) of this rank, from each group of a stream's items."""

    def __init__(self, source: Any, group: int, mesh: Mesh, **settings: Any) -> None:
        self._source, self._group = source, group
        self._rank, self._ranks = mesh.data_rank, mesh.data_size
        self._sharded, self._drops = settings["sharded"], settings["drops"]
        self._collate, self._seed = settings["collate"], settings["seed"]

    def __iter__(self) -> Iterator[tuple[Any, int, int]]:
        worker, place, workers = get_worker_info(), 0, 1
        divides = self._sharded and isinstance(self._source, IterableDataset)
        if worker is not None and not divides:
            # Each reads all, in the same order: a data set that divides itself among workers, as
            # most do, would be divided twice.
            torch.utils.data._utils.worker._worker_info = None  # noqa: SLF001 - no public form
            rng.seed_all(self._seed, self._rank if self._sharded else None)
            place, workers = worker.id, worker.num_workers
        stream = iter(self._source)
        groups = iter(lambda: list(islice(stream, self._group)), [])
        for group in islice(groups, place, None, workers):
            items = group if self._sharded else group[self._rank :: self._ranks]
            if len(group) == self._group or not self._drops:
                batch = (self._collate or itemgetter(0))(items or group[:1])
                yield (
                    batch,
                    len(items) if self._collate else sum(map(samples_in, items)),
                    _digest(group),
                )


class StreamFeed:
    """A stream with its loader, for one epoch.

    Attributes:
        form: how it is divided, which a position within an epoch depends on.
    """

    def __init__(
        self, source: Any, mesh: Mesh, options: dict[str, Any], *, sharded: bool, **settings: Any
    ) -> None:
        """`options` are the sizes of run.batches and DataLoader's; `settings` those of _Parts."""
        batch, total = options.pop("batch_size"), options.pop("global_batch")
        sized = (batch, total) != (None, None)
        group = global_size(batch, total, mesh.data_size, 0) if sized else mesh.data_size
        if sharded and group % mesh.data_size:
            raise ValueError(f"global_batch={group} must divide by the {mesh.data_size} ranks")
        collate = options.pop("collate_fn", default_collate) if sized else None
        self.form = f"{group} by {mesh.data_size}" if sharded else str(group)
        self._mesh, self._sharded, self._drops = mesh, sharded, settings["drops"]
        size = group // mesh.data_size if sharded else group
        parts = _Parts(source, size, mesh, sharded=sharded, collate=collate, **settings)
        options.pop("persistent_workers", None)  # they would read the epoch before
        seeded = torch.Generator().manual_seed(rng.of_rank(settings["seed"], mesh.data_rank))
        self._loader = DataLoader(parts, batch_size=None, generator=seeded, **options)

    def windows(self, done: int, length: int) -> Iterator[list[tuple[BatchShard, Any]]]:
        """The batches of each step, up to `length`, after the first `done` batches of all ranks."""
        parts = iter(self._loader)
        # One of an earlier start, if this rank has no more.
        last, _, _ = next(iter(deque(islice(parts, done), maxlen=1)), (None, 0, 0))
        while True:
            window = list(islice(parts, length))
            rows = self._exchange(window, length)
            lengths = [int(row[0]) for row in rows]
            if not done and not min(lengths):
                raise RuntimeError(
                    f"run.batches() got no sample for share {lengths.index(0)} of {len(rows)}: use"
                    " fewer ranks; a generator has only one pass, make it again in each epoch"
                )
            # Ranks that have ended compute with their last batch at weight 0: the others'
            # collectives need them.
            count = min(lengths) if self._drops else max(lengths)
            if not count:
                return
            total = sum(sum(row[2 : 2 + count]) for row in rows)
            shards = []
            for at in range(count):
                last, samples, _ = window[at] if at < len(window) else (last, 0, 0)
                scale, closes = samples * self._mesh.data_size / total, at + 1 == count
                shards.append((BatchShard(done, done + 1, samples, scale, closes), last))
                done += 1
            yield shards

    def _exchange(self, window: list[Any], length: int) -> list[list[float]]:
        """By data rank: batches, the first one's digest, and the samples of each batch."""
        counts = [samples for _, samples, _ in window] + [0] * (length - len(window))
        mine = [len(window), window[0][2] if window else 0, *counts]
        rows = self._mesh.group.table(mine)[:: self._mesh.model_size]
        # From a stream that is seeded differently on each rank the ranks would take some samples
        # twice, and others never.
        apart = [rank for rank, row in enumerate(rows) if row[:2] != rows[0][:2]]
        if apart and not self._sharded:
            raise RuntimeError(
                f"share {apart[0]} of run.batches() reads other data than share 0, and each takes"
                " its part of one stream; where ranks read data of their own, write"
                " run.batches(..., sharded=True), else seed equally what the stream draws"
            )
        return rows

"""Data of a run: which rank sees which sample and when, and the loader that delivers batches.

An epoch is one permutation of the data set, the same on all ranks. It is cut into global batches,
and each rank takes every world_size-th sample of each. So the samples of a step depend neither on
the number of ranks nor on where a run was interrupted; one global offset is the position.
"""

from __future__ import annotations

from dataclasses import dataclass
from operator import index
from typing import TYPE_CHECKING, Any, Literal, cast

import torch
from torch.utils._pytree import tree_map_only
from torch.utils.data import DataLoader, DistributedSampler

from k8sjob.runtime.comm import rng

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sized

Tail = Literal["pad", "short", "drop"]
"""The treatment of an epoch that does not divide evenly: see ShardSampler."""


@dataclass(frozen=True, slots=True)
class BatchShard:
    """One rank's part of one global batch.

    Attributes:
        start: global offset of the batch in the epoch, in samples.
        end: global offset after it.
        count: this rank's samples; 0 where it has only a placeholder (see ShardSampler.indices).
        scale: factor for the mean loss over this rank's samples, such that the mean of the
            gradients over the ranks, summed over the window, is the gradient of the mean loss over
            all of the window's samples.
        closes: whether it is the last batch of its window: the optimizer steps after it.
    """

    start: int
    end: int
    count: int
    scale: float
    closes: bool


class ShardSampler(DistributedSampler[int]):
    """A DistributedSampler that resumes in the middle of an epoch, with any number of ranks.

    With one process and with four, the same global batch holds the same samples. `tail` says what
    happens where N samples do not divide by R ranks:

    - "pad": as the stock sampler, ceil(N/R) * R - N samples are seen twice; shards are equal.
    - "short": each sample is seen exactly once; shards of the last batch may differ by one.
    - "drop": the samples of the last, incomplete global batch are left out.

    Call `set_epoch` at the start of each epoch and `advance` after each optimizer step; save
    `state_dict` with the model. An epoch that is over cannot be iterated again: that would be an
    epoch without samples.
    """

    def __init__(
        self,
        dataset: Sized,
        *,
        rank: int,
        world_size: int,
        batch_size: int | None = None,
        global_batch: int | None = None,
        accumulate: int = 1,
        shuffle: bool = True,
        seed: int = 0,
        tail: Tail = "pad",
        in_blocks: bool = False,
        max_ranks: int = 0,
        sampler: Any = None,
    ) -> None:
        """Shards of a data set.

        Args:
            dataset: anything with a length.
            rank: 0 to world_size - 1.
            world_size: number of ranks.
            batch_size: samples of one rank in one batch; or
            global_batch: samples of all ranks in one batch. Exactly one of the two.
            accumulate: batches in a window, that is between two steps of the optimizer.
            shuffle: a new permutation each epoch, by seed + epoch; else the data set's order.
            seed: the same on all ranks.
            tail: "pad", "short" or "drop".
            in_blocks: the ranks' samples of a batch, put one behind the other, are in the order of
                one process; for batches that divide by the ranks. Else they take turns.
            max_ranks: so many ranks may come to divide the global batch; 0: as many as now.
            sampler: draws the indices of all ranks for an epoch, instead of `shuffle`.

        Raises:
            ValueError: a size or the tail is invalid, or they leave no batch.
            TypeError: the data set has no length.
        """
        check_dataset(dataset)
        sampler, self._sampler = dataset if sampler is None else sampler, sampler
        if tail not in ("pad", "short", "drop"):
            raise ValueError(f'tail={tail!r}: it must be "pad", "short" or "drop"')
        if accumulate < 1:
            raise ValueError(f"accumulate={accumulate}: batches in a step, at least 1")
        self.global_batch = global_size(batch_size, global_batch, world_size, max_ranks)
        # The stock sampler asks for a Dataset and uses only its length.
        super().__init__(
            cast("Any", dataset), num_replicas=world_size, rank=rank, shuffle=shuffle, seed=seed
        )
        self.accumulate, self.tail = accumulate, tail
        if not hasattr(sampler, "__len__"):
            raise TypeError(
                f"sampler={type(sampler).__name__}: it has no length; give it __len__, the number"
                " of the indices that it draws in an epoch"
            )
        self.samples = len(sampler)
        if tail == "drop" and self.samples < self.global_batch:
            raise ValueError(
                f'tail="drop" leaves no batch: the data set has {self.samples} samples, and all '
                f'ranks together take {self.global_batch}; use a smaller batch, or tail="pad"'
            )
        self.in_blocks = in_blocks
        self.offset = 0
        self._is_over = False
        self._order: torch.Tensor | None = None

    def set_epoch(self, epoch: int) -> None:
        """Begin that epoch; the epoch that load_state_dict loaded continues where it was saved."""
        if epoch != self.epoch:
            self.epoch, self.offset, self._order, self._is_over = epoch, 0, None, False

    def advance(self, batches: int = 1) -> None:
        """Count batches as done: in the loop, since a loader's workers run ahead of it."""
        end = self._end()
        if self.offset >= end:
            raise RuntimeError(
                f"sampler.advance() after the last batch of epoch {self.epoch}: call it once for "
                f"each batch of {self.global_batch} samples (all ranks together), and "
                "sampler.set_epoch(epoch) at the start of each epoch"
            )
        self.offset = min(self.offset + batches * self.global_batch, end)
        self._is_over = self.offset == end

    def state_dict(self) -> dict[str, int]:
        """The position of the run, with the data size and seed that it depends on."""
        return {
            "epoch": self.epoch,
            "offset": self.offset,
            "samples": self.samples,
            "seed": self.seed,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a saved state, with this number of ranks and this batch size.

        Raises:
            ValueError: the state is within an epoch, and belongs to other data or another seed.
        """
        saved = (state["samples"], state["seed"])
        if state["offset"] and saved != (self.samples, self.seed):
            raise ValueError(
                f"saved within an epoch with {saved[0]} samples and seed {saved[1]}, now there are "
                f"{self.samples} samples and seed {self.seed}: the epoch cannot be continued"
            )
        self.epoch, self.offset, self._order = int(state["epoch"]), int(state["offset"]), None
        self._is_over = False

    def __len__(self) -> int:
        """Samples that this rank has left in this epoch."""
        return sum(shard.count for shard in self.shards())

    def __iter__(self) -> Iterator[int]:
        """This rank's samples of the rest of the epoch, in the order of the batches."""
        if self._is_over:
            raise RuntimeError(
                f"epoch {self.epoch} of this sampler is over: call sampler.set_epoch(epoch) at the "
                "start of each epoch; for a second pass over the data, use another sampler"
            )
        # Saved at the end of an epoch, a run resumes with none of its samples left: once.
        self._is_over = self.offset >= self._end()
        return (index for shard in self.shards() if shard.count for index in self.indices(shard))

    def steps(self, start: int | None = None) -> int:
        """Optimizer steps from an offset to the end of the epoch; from here by default."""
        remaining = self._end() - (self.offset if start is None else start)
        return -(-max(remaining, 0) // (self.global_batch * self.accumulate))

    def shards(self) -> Iterator[BatchShard]:
        """This rank's part of each batch that is left in the epoch."""
        # The end depends on the offset under "drop", so it is computed once.
        end, start = self._end(), self.offset
        window = self.global_batch * self.accumulate
        while start < end:
            window_end = min(start + window, end)
            in_window = window_end - start
            while start < window_end:
                stop = min(start + self.global_batch, window_end)
                count = len(range(start + self.rank, stop, self.num_replicas))
                scale = count * self.num_replicas / in_window
                yield BatchShard(start, stop, count, scale, stop == window_end)
                start = stop

    def leaves_out(self) -> bool:
        """Whether the epoch's last batch is too small for all ranks to have a sample of it."""
        return 0 < (self._end() - self.offset) % self.global_batch < self.num_replicas

    def indices(self, shard: BatchShard) -> list[int]:
        """The samples of a shard; a placeholder where it is empty.

        A rank without samples computes too, with a loss of scale 0: the others wait for it.
        """
        if self._order is None:
            self._order = self._permutation()
        if self.in_blocks:
            first = shard.start + self.rank * shard.count
            return cast("list[int]", self._order[first : first + shard.count].tolist())
        # Ranks take turns, so that an epoch which another number of ranks began continues with the
        # same samples.
        picked = self._order[shard.start + self.rank : shard.end : self.num_replicas]
        return picked.tolist() if shard.count else [int(self._order[0])]

    def _end(self) -> int:
        """Global offset at which the epoch ends."""
        if self.tail == "pad":
            return -(-self.samples // self.num_replicas) * self.num_replicas
        if self.tail == "drop":
            remaining = max(self.samples - self.offset, 0)
            return self.offset + remaining // self.global_batch * self.global_batch
        return self.samples

    def _permutation(self) -> torch.Tensor:
        order = torch.arange(self.samples)
        if self._sampler is not None:
            order = _drawn(self._sampler, self.seed, self.epoch)
        elif self.shuffle:
            generator = torch.Generator().manual_seed(self.seed + self.epoch)
            order = torch.randperm(self.samples, generator=generator)
        short = self._end() - self.samples
        # Like torch's sampler: repeated from the beginning, several times if need be.
        return order if short <= 0 else order[torch.arange(self.samples + short) % self.samples]


def _drawn(sampler: Any, seed: int, epoch: int) -> torch.Tensor:
    """A sampler's indices: with the same random numbers on all ranks, and after a resume."""
    if hasattr(sampler, "set_epoch"):
        sampler.set_epoch(epoch)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    # The sampler's draws must not advance the generators that dropout uses.
    before = rng.capture(device)
    rng.seed_all(seed + epoch)
    if isinstance(generator := getattr(sampler, "generator", None), torch.Generator):
        generator.manual_seed(seed + epoch)
    indices = list(sampler)
    rng.restore(before, device)
    try:  # numbers of numpy and of torch, too
        indices = [] if isinstance(sampler, DistributedSampler) else [*map(index, indices)]
    except TypeError:
        indices = []
    if not indices or len(indices) != len(sampler):
        raise TypeError(
            f"sampler={type(sampler).__name__}: it must draw single indices, those of all ranks, as"
            " many as its length; run.batches() divides them, and makes the batches"
        )
    return torch.tensor(indices)


def strided(dataset: Sized, rank: int, world_size: int, batch_size: int) -> list[list[int]]:
    """This rank's batches for an evaluation: over all ranks, each sample exactly once.

    Every rank gets the same number of batches; the last one may be empty.
    """
    check_dataset(dataset)
    if batch_size < 1:
        raise ValueError(f"batch_size={batch_size}: it must be at least 1")
    mine = range(rank, len(dataset), world_size)
    # By the longest share, so that all ranks come to the same number of collectives.
    largest = -(-len(dataset) // world_size)
    return [list(mine[at : at + batch_size]) for at in range(0, largest, batch_size)]


def check_dataset(dataset: Sized) -> None:
    """Refuse a data set that is empty, or has no length by which ranks could divide it."""
    try:
        samples = len(dataset)
    except TypeError:
        raise TypeError(
            f"{type(dataset).__name__} has no length, so it cannot be divided among the ranks; give"
            " a map-style data set (with __len__ and __getitem__), or list(...) of it"
        ) from None
    if samples == 0:
        raise ValueError(f"the data set ({type(dataset).__name__}) is empty: check its path")


def global_size(
    batch_size: int | None, global_batch: int | None, world_size: int, max_ranks: int
) -> int:
    """The samples of all ranks in one batch; ValueError unless one size is given, and is valid."""
    if (batch_size is None) == (global_batch is None):
        raise ValueError(
            f"batch_size={batch_size}, global_batch={global_batch}: give exactly one of the two, "
            "the samples of one process or those of all together"
        )
    if batch_size is not None:
        if batch_size < 1:
            raise ValueError(f"batch_size={batch_size}: it must be at least 1")
        return batch_size * world_size
    if global_batch is None or global_batch < world_size:
        raise ValueError(
            f"global_batch={global_batch} is below the number of ranks, {world_size}: some would "
            f"have nothing to do; set it to {world_size} or more, or use fewer replicas"
        )
    if global_batch < max_ranks:
        raise ValueError(
            f"global_batch={global_batch} is below the {max_ranks} ranks that this elastic job may"
            f" come to have: set it to {max_ranks} or more, or lower replicas.elastic.max"
        )
    return global_batch


class Feed:
    """A data set with its sampler and its loader, for all epochs of a run.

    Attributes:
        sampler: who sees what.
    """

    def __init__(
        self,
        dataset: Any,
        settings: dict[str, Any],
        *,
        on_gpu: bool,
        on_phase: Callable[[str], None] | None = None,
        **sharding: Any,
    ) -> None:
        """A sampler and a loader.

        Args:
            dataset: a map-style data set.
            settings: the user's, for ShardSampler, and `loader_options` for DataLoader.
            on_gpu: batches go to a GPU, so their memory is pinned.
            on_phase: called with "compute" before a batch is awaited, and with "sync" when it is
                there: for a loop that has no other moment at which a step begins.
            sharding: more for ShardSampler: rank, world_size, seed, ...
        """
        of_sampler = {key: value for key, value in settings.items() if key != "loader_options"}
        self.sampler = ShardSampler(dataset, **sharding, **of_sampler)
        self._dataset, self._settings = dataset, settings
        self._batches = _Batches(self.sampler)
        # Not the default generator, which the model's dropout draws from: a run that resumes
        # within an epoch would differ from there on if an epoch's beginning moved it.
        self._generator = torch.Generator()
        # From pinned memory a copy to the GPU runs beside the computation.
        options = {"pin_memory": on_gpu, **settings["loader_options"]}
        self._loader = _Loader(
            dataset, batch_sampler=self._batches, generator=self._generator, **options
        )
        self._loader.on_phase = on_phase

    def serves(self, dataset: Any, settings: dict[str, Any]) -> bool:
        """Whether this feed is for that data set and those settings."""
        return dataset is self._dataset and settings == self._settings

    def loader(self, shards: list[BatchShard]) -> DataLoader[Any]:
        """The loader, which gives these shards next."""
        # The loader itself stays, and with it its workers.
        self._batches.shards = shards
        # Odd constants give nearby (seed, epoch, rank) workers' seeds that are far apart.
        sampler = self.sampler
        mixed = sampler.seed * 0x9E3779B1 + sampler.epoch * 0x85EBCA6B + sampler.rank
        self._generator.manual_seed(mixed & 0xFFFFFFFF)
        return self._loader


class _Loader(DataLoader[Any]):
    """A DataLoader that reports when a batch is awaited, and when it has come."""

    on_phase: Callable[[str], None] | None = None

    def __iter__(self) -> Any:
        batches = super().__iter__()
        return batches if self.on_phase is None else self._reporting(batches, self.on_phase)

    def _reporting(self, batches: Iterator[Any], on_phase: Callable[[str], None]) -> Iterator[Any]:
        on_phase("compute")
        for batch in batches:
            on_phase("sync")
            yield batch
            on_phase("compute")


class _Batches:
    """The samples of some shards as a DataLoader's batch sampler."""

    def __init__(self, sampler: ShardSampler) -> None:
        self._sampler = sampler
        self.shards: list[BatchShard] = []

    def __iter__(self) -> Iterator[list[int]]:
        return (self._sampler.indices(shard) for shard in self.shards)

    def __len__(self) -> int:
        return len(self.shards)


def move(batch: Any, device: torch.device) -> Any:
    """A batch with its tensors on the device, its shape of lists, tuples and dicts kept."""
    if device.type == "cpu":
        return batch
    if isinstance(batch, dict):  # also of a subclass, which is a leaf to torch
        return {key: move(value, device) for key, value in batch.items()}
    return tree_map_only(torch.Tensor, lambda part: part.to(device, non_blocking=True), batch)

"""Who sees which sample, and when: shards of an epoch that any number of ranks can take up.

An epoch is one permutation of the data set, the same on all ranks. It is cut into global batches,
and each rank takes every world_size-th sample of each. So the samples of a step depend neither on
the number of ranks nor on where a run was interrupted; one global offset says how far it is.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, cast

import torch
from torch.utils.data import DistributedSampler

if TYPE_CHECKING:
    from collections.abc import Iterator, Sized

__all__ = ["ShardSampler", "Share", "Tail", "check_dataset", "strided"]

Tail = Literal["pad", "short", "drop"]
"""What happens to an epoch that does not divide: see ShardSampler."""


@dataclass(frozen=True, slots=True)
class Share:
    """One rank's part of one global batch.

    Attributes:
        start: global offset of the batch in the epoch, in samples.
        end: global offset after it.
        count: this rank's samples; 0 where it only stands in (see ShardSampler.indices).
        scale: factor for the mean loss over this rank's samples, such that the mean of the
            gradients over the ranks, summed over the window, is the gradient of the mean loss over
            all of the window's samples.
        closes: the last batch of its window: the optimizer steps after it.
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

    - "pad": as the stock sampler, ceil(N/R) * R - N samples are seen twice; shares are equal.
    - "short": each sample is seen exactly once; shares of the last batch may differ by one.
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
        most_ranks: int = 0,
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
            most_ranks: so many may come to share the batch of all; 0: as many as now.

        Raises:
            ValueError: a size or the tail is invalid, or they leave no batch.
            TypeError: the data set has no length.
        """
        check_dataset(dataset)
        if tail not in ("pad", "short", "drop"):
            raise ValueError(f'tail={tail!r}: it is "pad", "short" or "drop"')
        if accumulate < 1:
            raise ValueError(f"accumulate={accumulate}: batches in a step, at least 1")
        self.global_batch = _global_batch(batch_size, global_batch, world_size, most_ranks)
        # The stock sampler asks for a Dataset and uses its length alone.
        super().__init__(
            cast("Any", dataset), num_replicas=world_size, rank=rank, shuffle=shuffle, seed=seed
        )
        self.accumulate, self.tail, self.samples = accumulate, tail, len(dataset)
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
        """Count batches as done: in the loop, since a loader's workers run ahead of it.

        Raises:
            RuntimeError: the epoch has no batch left.
        """
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
        """Where the run is: epoch, offset, and what they mean only together with."""
        return {
            "epoch": self.epoch,
            "offset": self.offset,
            "samples": self.samples,
            "seed": self.seed,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a saved state, with this number of ranks and this batch size.

        Raises:
            ValueError: the state is in mid-epoch and belongs to other data or another seed, so
                that no order could continue it.
        """
        seen = (state["samples"], state["seed"])
        if state["offset"] and seen != (self.samples, self.seed):
            raise ValueError(
                f"saved in mid-epoch with {seen[0]} samples and seed {seen[1]}, now there are "
                f"{self.samples} samples and seed {self.seed}: the epoch cannot be continued"
            )
        self.epoch, self.offset, self._order = int(state["epoch"]), int(state["offset"]), None
        self._is_over = False

    def __len__(self) -> int:
        """Samples that this rank has still to see in this epoch."""
        return sum(share.count for share in self.shares())

    def __iter__(self) -> Iterator[int]:
        """This rank's samples of the rest of the epoch, in the order of the batches.

        Raises:
            RuntimeError: the epoch is over, and set_epoch() did not begin another.
        """
        if self._is_over:
            raise RuntimeError(
                f"epoch {self.epoch} of this sampler is over: call sampler.set_epoch(epoch) at the "
                "start of each epoch; for a second pass over the data, take another sampler"
            )
        # Saved at the end of an epoch, a run resumes with none of its samples left: once.
        self._is_over = self.offset >= self._end()
        return (index for share in self.shares() if share.count for index in self.indices(share))

    def steps(self, start: int | None = None) -> int:
        """Optimizer steps from an offset to the end of the epoch; from here by default."""
        left = self._end() - (self.offset if start is None else start)
        return -(-max(left, 0) // (self.global_batch * self.accumulate))

    def shares(self) -> Iterator[Share]:
        """This rank's part of each batch that is left in the epoch."""
        end, start = self._end(), self.offset
        window = self.global_batch * self.accumulate
        while start < end:
            window_end = min(start + window, end)
            in_window = window_end - start
            while start < window_end:
                stop = min(start + self.global_batch, window_end)
                count = len(range(start + self.rank, stop, self.num_replicas))
                scale = count * self.num_replicas / in_window
                yield Share(start, stop, count, scale, stop == window_end)
                start = stop

    def leaves_out(self) -> bool:
        """Whether the epoch's last batch is too small for all ranks to have a sample of it."""
        return 0 < (self._end() - self.offset) % self.global_batch < self.num_replicas

    def indices(self, share: Share) -> list[int]:
        """The samples of a share; one to stand in where it is empty.

        A rank without samples must compute all the same, since the others wait for its gradients;
        its loss has the scale 0.
        """
        if self._order is None:
            self._order = self._permutation()
        if self.in_blocks:
            first = share.start + self.rank * share.count
            return cast("list[int]", self._order[first : first + share.count].tolist())
        picked = self._order[share.start + self.rank : share.end : self.num_replicas]
        return picked.tolist() if share.count else [int(self._order[0])]

    def _end(self) -> int:
        """Global offset at which the epoch ends."""
        if self.tail == "pad":
            return -(-self.samples // self.num_replicas) * self.num_replicas
        if self.tail == "drop":
            left = max(self.samples - self.offset, 0)
            return self.offset + left // self.global_batch * self.global_batch
        return self.samples

    def _permutation(self) -> torch.Tensor:
        order = torch.arange(self.samples)
        if self.shuffle:
            generator = torch.Generator().manual_seed(self.seed + self.epoch)
            order = torch.randperm(self.samples, generator=generator)
        short = self._end() - self.samples
        # As the stock sampler: repeated from the beginning, several times over if need be.
        return order if short <= 0 else order[torch.arange(self.samples + short) % self.samples]


def strided(dataset: Sized, rank: int, world_size: int, batch_size: int) -> list[list[int]]:
    """This rank's batches for an evaluation: over all ranks, each sample exactly once.

    Every rank gets the same number of batches, so that all of them walk in step; the last one may
    be empty.
    """
    check_dataset(dataset)
    if batch_size < 1:
        raise ValueError(f"batch_size={batch_size}: it must be at least 1")
    mine = range(rank, len(dataset), world_size)
    largest = -(-len(dataset) // world_size)
    return [list(mine[at : at + batch_size]) for at in range(0, largest, batch_size)]


def check_dataset(dataset: Sized) -> None:
    """Refuse a data set that cannot be divided over the ranks, or has nothing in it.

    Raises:
        ValueError: it is empty.
        TypeError: it has no length.
    """
    try:
        samples = len(dataset)
    except TypeError:
        raise TypeError(
            f"{type(dataset).__name__} has no length, so it cannot be divided over the ranks; give "
            "a map-style data set (with __len__ and __getitem__)"
        ) from None
    if samples == 0:
        raise ValueError(f"the data set ({type(dataset).__name__}) is empty: check its path")


def _global_batch(
    batch_size: int | None, global_batch: int | None, world_size: int, most_ranks: int
) -> int:
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
    if global_batch < most_ranks:
        raise ValueError(
            f"global_batch={global_batch} is below the {most_ranks} ranks that this elastic job may"
            f" come to have: set it to {most_ranks} or more, or lower replicas.elastic.max"
        )
    return global_batch

"""The way of a batch: from the data set, by the sampler's order, to the device."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import DataLoader

from k8sjob.runtime.data import ShardSampler

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from k8sjob.runtime.data import Share

__all__ = ["Feed", "move"]


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
        rank: int,
        world_size: int,
        accumulate: int,
        seed: int,
        on_gpu: bool,
        in_blocks: bool = False,
        on_phase: Callable[[str], None] | None = None,
    ) -> None:
        """A feed.

        Args:
            dataset: a map-style data set.
            settings: for ShardSampler, and `loader_options` for DataLoader.
            rank: 0 to world_size - 1.
            world_size: number of ranks.
            accumulate: batches in a window.
            seed: the same on all ranks.
            on_gpu: batches go to a GPU, so their memory is pinned.
            in_blocks: see ShardSampler.
            on_phase: told "compute" before a batch is awaited, and "sync" when it is there: for
                whoever has no other moment to say that a step begins.
        """
        own = {key: value for key, value in settings.items() if key != "loader_options"}
        self.sampler = ShardSampler(
            dataset,
            rank=rank,
            world_size=world_size,
            accumulate=accumulate,
            seed=seed,
            in_blocks=in_blocks,
            **own,
        )
        self._dataset, self._settings = dataset, settings
        self._shares: list[Share] = []
        # Not the default generator: that one belongs to the model's dropout, and beginning an epoch
        # must not move it, or a run that resumes in mid-epoch would differ from there on.
        self._generator = torch.Generator()
        options = {"pin_memory": on_gpu, **settings["loader_options"]}
        self._loader = _Loader(
            dataset, batch_sampler=_Indices(self), generator=self._generator, **options
        )
        self._loader.on_phase = on_phase

    def serves(self, dataset: Any, settings: dict[str, Any]) -> bool:
        """Whether this feed is for that data set and those settings."""
        return dataset is self._dataset and settings == self._settings

    def loader(self, shares: list[Share]) -> DataLoader[Any]:
        """The loader, to give these shares next."""
        self._shares = shares
        # Odd constants spread neighbouring (seed, epoch, rank) over the seeds of the workers.
        sampler = self.sampler
        mixed = sampler.seed * 0x9E3779B1 + sampler.epoch * 0x85EBCA6B + sampler.rank
        self._generator.manual_seed(mixed & 0xFFFFFFFF)
        return self._loader

    def indices(self) -> Iterator[list[int]]:
        """The samples of each share, made when the loader asks for them."""
        return (self.sampler.indices(share) for share in self._shares)

    def __len__(self) -> int:
        return len(self._shares)


class _Loader(DataLoader[Any]):
    """A DataLoader that tells of its batches."""

    on_phase: Callable[[str], None] | None = None

    def __iter__(self) -> Any:
        batches = super().__iter__()
        return batches if self.on_phase is None else self._told(batches, self.on_phase)

    def _told(self, batches: Iterator[Any], on_phase: Callable[[str], None]) -> Iterator[Any]:
        on_phase("compute")
        for batch in batches:
            on_phase("sync")
            yield batch
            on_phase("compute")


class _Indices:
    """A feed as a DataLoader's batch sampler."""

    def __init__(self, feed: Feed) -> None:
        self._feed = feed

    def __iter__(self) -> Iterator[list[int]]:
        return self._feed.indices()

    def __len__(self) -> int:
        return len(self._feed)


def move(batch: Any, device: torch.device) -> Any:
    """A batch with its tensors on the device, its shape of lists, tuples and dicts kept."""
    if device.type == "cpu":
        return batch
    if isinstance(batch, torch.Tensor):
        return batch.to(device, non_blocking=True)
    if isinstance(batch, dict):
        return {key: move(value, device) for key, value in batch.items()}
    if isinstance(batch, list | tuple):
        moved = [move(value, device) for value in batch]
        return type(batch)(*moved) if hasattr(batch, "_fields") else type(batch)(moved)
    return batch

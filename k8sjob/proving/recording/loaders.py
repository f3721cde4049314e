"""Facts about a DataLoader: its sizes, its sampler, and its data set, known by some samples.

With them the data of two runs can be compared. Reading samples changes the random state; the
caller restores it.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

from torch.utils import data

from k8sjob.proving.recording.sketch import digest, padding
from k8sjob.runtime.comm import rng

if TYPE_CHECKING:
    from collections.abc import Callable


class BaseData:
    """The data set under the subsets that a loader reads."""

    def __init__(self, loader: Any) -> None:
        self.dataset, self._maps = loader.dataset, list[Any]()
        while isinstance(self.dataset, data.Subset):
            self._maps.append(self.dataset.indices)
            self.dataset = self.dataset.dataset

    def index_of(self, index: int) -> int:
        """The index in it of a sample of the loader's data set."""
        for indices in self._maps:
            index = int(indices[index])
        return index


def describe(loader: Any) -> dict[str, Any]:
    """The fields of the `pass` event that a loader determines."""
    sampler = getattr(loader, "sampler", None)
    groups = getattr(loader, "batch_sampler", None)
    inner = getattr(groups, "sampler", None) or getattr(groups, "_sampler", None) or sampler
    base: Any = BaseData(loader).dataset
    fingerprint, _ = own_fingerprint = _fingerprint(base)
    if base is not loader.dataset:
        # A subset may be another one on each rank: then the script has divided the data itself.
        own_fingerprint = _fingerprint(loader.dataset)
    return {
        "length": _or_none(len, loader.dataset),
        "batches": _or_none(len, loader),
        "batch_size": getattr(loader, "batch_size", None),
        "drop_last": bool(getattr(loader, "drop_last", False)),
        "iterable": isinstance(loader.dataset, data.IterableDataset),
        "workers": loader.num_workers,
        "sampler": type(inner).__name__,
        "replicas": getattr(inner, "num_replicas", None),
        "shuffles": any(map(_shuffles, (inner, groups))),
        "data": fingerprint,
        "own": own_fingerprint[0] if own_fingerprint[1] else None,
        "epochs": _epochs(base) if loader.persistent_workers else {},
    }


def pads(loader: Any) -> list[float | None]:
    """The values that a loader pads tensors with, found by collating some samples."""
    if isinstance(loader.dataset, data.IterableDataset):
        return []
    with contextlib.suppress(Exception):  # a data set may be anything
        size = len(loader.dataset)
        # From the whole data set, as sorted data have samples of one length side by side.
        samples = [loader.dataset[at * (size - 1) // 15] for at in range(16)]
        return padding(samples, loader.collate_fn)
    return []


def _fingerprint(source: Any) -> tuple[int | None, bool]:
    """A data set, known by some of its samples; None: unknown.

    And whether it gives the same samples twice for the same random numbers.
    """
    if isinstance(source, data.IterableDataset):
        return None, False
    with contextlib.suppress(Exception):  # a data set may be anything
        size, digests = len(source), [list[int](), list[int]()]
        for samples in digests:
            for index in sorted({0, size // 3, size // 2, size - 1}):
                # So an augmentation gives the same sample in each run, and on each rank.
                rng.seed_all(index)
                samples.append(digest(source[index]))
        return digest([type(source).__name__, size, *digests[0]]), digests[0] == digests[1]
    return None, False


def _shuffles(sampler: Any) -> bool:
    """Whether a sampler is to give another order in each epoch."""
    # torch's DistributedSampler and those made like it.
    of_epoch = hasattr(sampler, "set_epoch") and getattr(sampler, "shuffle", True)
    return of_epoch or isinstance(sampler, data.RandomSampler)


def _epochs(source: Any) -> dict[str, int]:
    """The epoch that a data set keeps, of which persistent workers have a copy."""
    attributes = getattr(source, "__dict__", {})
    # By the name: there is no interface for it, and data sets with set_epoch() keep such a number.
    return {name: n for name, n in attributes.items() if "epoch" in name and type(n) is int}


def _or_none(function: Callable[[Any], Any], value: Any) -> Any:
    with contextlib.suppress(Exception):  # a loader without a length
        return function(value)
    return None

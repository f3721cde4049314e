"""The replay of all ranks' batches of another run, in one process that stands for all of them."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import torch

from k8sjob.runtime.prover.sketch import join, size_of

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from torch import Tensor


class StopReplay(BaseException):
    """The training has been seen for long enough."""


class Replay:
    """The record of another run.

    Attributes:
        parts: its ranks.
        rates: learning rates, by optimizer and step.
    """

    def __init__(self, folder: Path, parts: int) -> None:
        self.parts, self._folder = parts, folder
        self.rates: dict[tuple[int, int], list[float]] = {}
        self._sizes: dict[int, dict[int, int]] = {}
        self._sites: dict[int, int] = {}
        self._used: set[int] = set()
        for rank in range(parts):
            self._read(rank)

    def _read(self, rank: int) -> None:
        sizes: dict[tuple[int, ...], int] = {}
        file = self._folder / f"trace-{rank}.jsonl"
        for line in file.read_text().splitlines() if file.exists() else ():
            event = json.loads(line)
            if event["kind"] == "batch":
                loader = event["loader"]
                sizes[loader, event["number"], event["index"]] = event["size"]
                self._sites[loader] = loader
            elif event["kind"] == "backward":
                for loader, *at in event["batches"]:
                    size = sizes[loader, *at]
                    self._sizes.setdefault(loader, {}).setdefault(rank, size)
            elif event["kind"] == "step" and rank == 0:
                self.rates[event["optimizer"], event["step"]] = event["rates"]

    def loader(self, site: int) -> int:
        """The loader of that run that stands for the one made at this place of the code."""
        if site not in self._sites:
            unused = (other for other in self._sizes if other not in self._used)
            self._sites[site] = next(unused, site)
            self._used.add(self._sites[site])
        return self._sites[site]

    def batch_size(self, site: int) -> int | None:
        """The samples that all ranks together took in a batch of the loader made at this place."""
        sizes = self._sizes.get(self.loader(site))
        return sum(sizes.values()) if sizes else None

    def batches(self, number: int, at: int) -> Iterator[tuple[Any, None, None, None]] | None:
        """The joined batches of a pass over a loader; None: that loader was not trained on.

        Their samples have no indices.

        Raises:
            StopReplay: the loader was trained on, and not in this pass.
        """
        self._used.add(number)
        found: dict[int, list[tuple[int, Path]]] = {}
        for file in self._folder.glob(f"batch-*-{number}-{at}-*.pt"):
            _, rank, *_, index = file.stem.split("-")
            found.setdefault(int(index), []).append((int(rank), file))
        if found:
            return ((self._joined(sorted(found[i])), None, None, None) for i in sorted(found))
        if at and any(self._folder.glob(f"batch-*-{number}-0-*.pt")):
            raise StopReplay
        return None

    def _joined(self, files: list[tuple[int, Path]]) -> Any:
        parts = [torch.load(file, weights_only=False) for _, file in files]
        return join(parts, [size_of(part) for part in parts])

    def draws(self, batch: str) -> list[list[Tensor]]:
        """The random numbers that each rank drew for a batch."""
        files = [self._folder / f"draws-{rank}-{batch}.pt" for rank in range(self.parts)]
        return [torch.load(file) for file in files if file.exists()]

    def restore(self, file: str, values: dict[str, Tensor]) -> None:
        """Give a model the weights and buffers with which that run began."""
        if not (self._folder / file).exists():
            return
        with torch.no_grad():
            for name, value in torch.load(self._folder / file).items():
                target = values.get(name)
                if target is not None and target.shape == value.shape:
                    target.copy_(value)

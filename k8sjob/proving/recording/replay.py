"""The replay of all ranks' batches of another run, in one process that stands for all of them."""

from __future__ import annotations

import contextlib
import json
from typing import TYPE_CHECKING, Any

import torch

from k8sjob.forking.script import StopScript
from k8sjob.proving.recording.sketch import join

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from torch import Tensor


class Replay:
    """The record of another run.

    Attributes:
        parts: its ranks.
        joined: their batches are joined; if not, they come one after another.
        rates: learning rates, by optimizer and step.
    """

    def __init__(self, folder: Path, parts: int, *, joined: bool) -> None:
        self.parts, self.joined, self._folder = parts, joined, folder
        self.rates: dict[tuple[int, int], list[float | None]] = {}
        self._sizes: dict[int, dict[int, int]] = {}
        self._counts: dict[str, int] = {}
        self._sites: dict[int, int] = {}
        self._used: set[int] = set()
        for rank in range(parts):
            self._read(rank)

    def _read(self, rank: int) -> None:
        file = self._folder / f"trace-{rank}.jsonl"
        for line in file.read_text().splitlines() if file.exists() else ():
            event = json.loads(line)
            if event["kind"] == "batch":
                loader = event["loader"]
                # The name of the file in which the recorder keeps this batch.
                key = f"batch-{rank}-{loader}-{event['number']}-{event['index']}"
                self._counts[key] = event["size"]
                self._sites[loader] = loader
            elif event["kind"] == "backward":
                for loader, number, index in event["batches"]:
                    size = self._counts[f"batch-{rank}-{loader}-{number}-{index}"]
                    # The first batch that was trained on: later ones may be shorter.
                    self._sizes.setdefault(loader, {}).setdefault(rank, size)
            elif event["kind"] == "step" and rank == 0:
                rates = [group.get("lr") for group in event["options"]]
                self.rates[event["optimizer"], event["step"]] = rates

    def loader(self, site: int) -> int:
        """The loader of that run that stands for the one made at this place of the code."""
        if site not in self._sites:
            # The place of the code differs where one process takes another branch: then the next
            # loader in order.
            unused = (loader for loader in self._sizes if loader not in self._used)
            self._sites[site] = next(unused, site)
            self._used.add(self._sites[site])
        return self._sites[site]

    def batch_size(self, site: int) -> int | None:
        """The samples that all ranks together took in a batch of the loader made at this place."""
        sizes = self._sizes.get(self.loader(site)) if self.joined else None
        return sum(sizes.values()) if sizes else None

    def batches(
        self, number: int, at: int, pads: Callable[[], list[float | None]]
    ) -> Iterator[tuple[Any, int, None, None, None]] | None:
        """The batches of a pass over a loader; None: that loader was not trained on.

        Their samples have no indices. `pads` finds what the loader pads tensors with.

        Raises:
            StopScript: the loader was trained on, and not in this pass.
        """
        self._used.add(number)
        files: dict[int, list[tuple[int, Path]]] = {}
        for file in self._folder.glob(f"batch-*-{number}-{at}-*.pt"):
            _, rank, *_, index = file.stem.split("-")
            files.setdefault(int(index), []).append((int(rank), file))
        groups = [sorted(files[index]) for index in sorted(files)]
        if not self.joined:
            groups = [[file] for group in groups for file in group]
        if files:
            return ((*self._joined(group, pads), None, None, None) for group in groups)
        # The ranks had no such pass; what follows cannot be compared.
        if at and any(self._folder.glob(f"batch-*-{number}-0-*.pt")):
            raise StopScript
        return None

    def _joined(
        self, files: list[tuple[int, Path]], pads: Callable[[], list[float | None]]
    ) -> tuple[Any, int]:
        # The recorder has written them in this proof, and a batch may be of any class of the
        # script.
        parts = [torch.load(file, weights_only=False) for _, file in files]
        sizes = [self._counts[file.stem] for _, file in files]
        for find_pads in (list[float | None], pads):  # mostly no padding is needed
            with contextlib.suppress(LookupError):
                if len(parts) == 1:
                    return parts[0], sizes[0]
                return join(parts, sizes, iter(find_pads())), sum(sizes)
        reason = "batches of these shapes cannot be joined"
        raise StopScript(reason)

    def draws(self, loader: int, at: int, index: int) -> list[list[Tensor]]:
        """The random numbers that each rank drew for a batch."""
        ranks = [*range(self.parts)]
        if not self.joined:
            index, rank = divmod(index, self.parts)
            ranks = [rank]
        files = [self._folder / f"draws-{rank}-{loader}-{at}-{index}.pt" for rank in ranks]
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

"""An evaluation over all ranks: the means of the metrics over a data set."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import DataLoader

from k8sjob.runtime.data import move, strided

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch import Tensor

    from k8sjob.runtime.comm.process_group import Group
    from k8sjob.runtime.strategies.api import Strategy


def evaluate(
    strategy: Strategy,
    loss: Callable[..., Tensor],
    dataset: Any,
    *,
    batch_size: int,
    metrics: Mapping[str, Callable[..., Tensor]] | None,
    between: Callable[[], None],
    **loader_options: Any,
) -> dict[str, float]:
    """Mean loss and metrics over all samples; the same numbers on all ranks.

    The model is in eval mode meanwhile, and each of its modules in its own mode again afterwards.

    The strategy is settled: equal on all ranks. `between` is called before each batch, equally
    often on all ranks. For the other parameters see Run.evaluate.
    """
    mesh, model, group = strategy.mesh, strategy.model, strategy.mesh.group
    batches = strided(dataset, mesh.data_rank, mesh.data_size, batch_size)
    # A rank that has nothing left computes all the same: others may wait for its part of the model.
    loader = DataLoader(
        dataset, batch_sampler=[batch or [0] for batch in batches], **loader_options
    )
    measures = {"accuracy": accuracy} if metrics is None else dict(metrics)
    tally = _Tally(["loss", *measures], group)
    # A script may have frozen parts of its model in eval mode.
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with torch.no_grad():
            for batch, loaded in zip(batches, loader, strict=True):
                between()
                inputs, *targets = move(loaded, group.device)
                output = strategy.forward(inputs)
                # A placeholder, or a rank whose losses another rank of the same model reports.
                if not batch or not strategy.counts:
                    continue
                tally.add("loss", loss(output, *targets), len(batch))
                for name, metric in measures.items():
                    tally.add(name, metric(output, *targets), len(batch))
    finally:
        for module, training in modes:
            module.training = training
    return tally.means()


def accuracy(output: Any, *targets: Any) -> Tensor | None:
    """1 for each sample whose largest output is the target; None if that has no meaning."""
    if len(targets) != 1 or not isinstance(output, torch.Tensor):
        return None
    target = targets[0]
    classes = isinstance(target, torch.Tensor) and target.ndim == 1
    if output.ndim != 2 or not classes or target.is_floating_point():
        return None
    hits: Tensor = output.argmax(dim=1) == target
    return hits


class _Tally:
    """(sum, count) of each number, on the device until the end."""

    def __init__(self, names: list[str], group: Group) -> None:
        self._group, zero = group, torch.zeros((), dtype=torch.float64, device=group.device)
        self._sums = {name: zero.clone() for name in names}
        self._counts = dict.fromkeys(names, 0)

    def add(self, name: str, value: Tensor | None, samples: int) -> None:
        if value is None:
            return
        if value.ndim > 1 or (value.ndim == 1 and value.shape[0] != samples):
            raise ValueError(
                f"metric {name!r} gave {tuple(value.shape)} for {samples} samples: return their "
                "mean, or one value for each"
            )
        # A mean counts for all its samples.
        self._sums[name] += value.sum() if value.ndim else value * samples
        self._counts[name] += samples

    def means(self) -> dict[str, float]:
        """Over all ranks; a number that no rank has is left out."""
        total = self._group.sums([*map(float, self._sums.values()), *self._counts.values()])
        pairs = zip(total, total[len(self._sums) :], strict=False)
        return {
            name: value / count
            for name, (value, count) in zip(self._sums, pairs, strict=True)
            if count
        }

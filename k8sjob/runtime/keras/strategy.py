"""Keras models on torch: every rank has the whole model and a part of each batch.

Keras on torch knows of no other process. What it computes from a rank's own samples is made the
same on all ranks before Keras uses it: gradients before the optimizer sees them, statistics after
the step, metrics before a log is made of them.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.utils import get_total_norm
from torch.utils.data import DataLoader

from k8sjob.runtime.checkpoint import model_state
from k8sjob.runtime.checkpoint.format import gathered
from k8sjob.runtime.comm import rng
from k8sjob.runtime.comm.mesh import Mesh
from k8sjob.runtime.data import strided
from k8sjob.runtime.keras import model as keras_model
from k8sjob.runtime.keras.callback import Placement
from k8sjob.runtime.keras.model import TEST_BATCH, AsTorch, KerasOptimizer, Moved, Seeds
from k8sjob.runtime.strategies.api import Strategy, assemble
from k8sjob.runtime.strategies.step import forward, replicate

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from torch import Tensor
    from torch.optim import Optimizer

    from k8sjob.runtime.checkpoint.format import Stored
    from k8sjob.runtime.comm.process_group import Group
    from k8sjob.runtime.data import BatchShard
    from k8sjob.runtime.rank_context import RankContext
    from k8sjob.runtime.strategies.step import Loss, Options


def prepare(model: Any, loss: Loss, group: Group, options: Options) -> Strategy:
    """The row of the table: DistributedDataParallel over the model as torch calls it."""
    mesh, bf16 = Mesh(group), options["bf16"]
    view = AsTorch(model, group.device)

    def whole_loss(output: Any, *targets: Any) -> Tensor:
        """The loss, and what layers added to it in their last call: regularisers, add_loss()."""
        # Keras's fit adds them by itself; a loop of torch sees only the output.
        return sum(model.losses, start=loss(output, *targets))

    wrapped, step = replicate(view, whole_loss, group, bf16=bf16)
    seeds, moved = Seeds(model), Moved(model, mesh)
    seeds.part(mesh.data_rank)

    def backward(inputs: Any, targets: tuple[Any, ...], *, scale: float, sync: bool) -> Tensor:
        value = step(inputs, targets, scale=scale, sync=sync)
        # Statistics of batch normalization are averaged once in a step, as the gradients are.
        if sync:
            moved.average()
        return value

    def evaluated(inputs: Any) -> Any:
        return forward(view, inputs, bf16=bf16)

    def restore(optimizer: Optimizer, state: dict[str, Any]) -> None:
        model_state.restore(model, optimizer, state)
        seeds.part(mesh.data_rank)
        moved.begin()

    def check(optimizer: Optimizer) -> None:
        bound = [variable.path for variable in model.trainable_variables if variable.constraint]
        if bound and not isinstance(optimizer, KerasOptimizer):
            raise ValueError(
                f"{bound[0]} has a constraint, which {type(optimizer).__name__} of torch would not"
                " keep; use an optimizer of Keras"
            )

    return assemble(
        model,
        mesh,
        backward,
        bf16=bf16,
        wrapped=wrapped,
        forward=evaluated,
        restore=restore,
        ready=check,
    )


class ReplicatedModel(Placement):
    """All ranks have the whole model; see Placement."""

    def __init__(self, context: RankContext, model: Any) -> None:
        self.mesh = Mesh(context.group)
        self._context, self._model = context, model
        self._shard: BatchShard | None = None
        self._due: Callable[[], bool] = lambda: False

    def evaluation(self, data: Any, options: Mapping[str, Any]) -> tuple[list[Any], Any]:
        """Keras's own, over this rank's shard: each sample once over all ranks."""
        if len(data) < self.mesh.data_size:
            raise ValueError(
                f"{len(data)} samples to validate with, and {self.mesh.data_size} ranks: give each"
                " one"
            )
        # Without padding, so the ranks may have unequal numbers of samples.
        batches = strided(data, self.mesh.data_rank, self.mesh.data_size, TEST_BATCH)
        mine = [batch for batch in batches if batch]
        return [], DataLoader(data, batch_sampler=mine, **options)

    @contextmanager
    def fitting(self, due: Callable[[], bool]) -> Iterator[None]:
        """Average all gradients that the optimizer gets meanwhile."""
        optimizer, self._due = self._model.optimizer, due
        apply = optimizer.apply

        def apply_averaged(gradients: Iterable[Any], variables: Any = None) -> None:
            self._average(list(gradients))
            apply(gradients, variables)
            self._moved.average()

        # On the instance: a subclass would be what a saved model names as its optimizer.
        optimizer.apply = apply_averaged
        try:
            with keras_model.on(self._context.device):
                # Keras has made it on the device that it found first.
                self._model.to(self._context.device)
                yield
        finally:
            del optimizer.apply

    def begin(self, resume: Callable[[], None]) -> None:
        """Rank 0's weights for all; each rank's own sequences of random numbers."""
        seeds, optimizer = Seeds(self._model), self._model.optimizer
        resume()
        # Also after a checkpoint was read: what it does not have, as metrics, must be equal too.
        for variable in [*self._model.variables, *optimizer.variables]:
            variable.assign(self._context.group.broadcast(variable.value))
        seeds.part(self._context.rank)
        self._moved = Moved(self._model, self.mesh)
        rng.seed_all(self._context.seed, self._context.rank)

    def expect(self, shard: BatchShard | None) -> None:
        """The weight of this rank's gradients."""
        self._shard = shard

    def _average(self, gradients: list[Tensor | None]) -> None:
        if self._shard is None:
            raise RuntimeError("the optimizer was called outside of a step of job.fit()")
        present = [gradient for gradient in gradients if gradient is not None]
        with self._context.group.waiting(), torch.no_grad():
            for gradient in present:
                # A share of a short batch counts by its samples: scale is size * ranks / samples of
                # all.
                gradient.mul_(self._shard.scale)
            self.mesh.average(present)
            self.norm = get_total_norm(present) if self._due() else None

    def reduce_metrics(self) -> None:
        """Reduce over all ranks by each variable's `aggregation`, else as sums; in float64."""
        variables = self._model.metrics_variables
        flat = [self._addend(variable).flatten() for variable in variables]
        if not flat:
            return
        total = self._context.group.all_reduce(torch.cat(flat))
        for variable, part in zip(
            variables, torch.split(total, [part.numel() for part in flat]), strict=True
        ):
            variable.assign(part.view(variable.shape))

    def _addend(self, variable: Any) -> Tensor:
        """This rank's summand of the sum over the ranks."""
        value: Tensor = variable.value.detach().double()
        # Keras's word for how copies of a variable become one.
        if variable.aggregation == "mean":
            return value / self._context.group.world_size
        if variable.aggregation == "only_first_replica" and self._context.rank:
            return torch.zeros_like(value)
        return value

    def check(self) -> None:
        """Weights that differ; machines of several kinds may round in their own ways."""
        group, weights = self._context.group, self._model.weights
        sums = [variable.value.detach().double().sum() for variable in weights]
        # A sum of each weight first: few bytes, and where all are equal nothing more is sent.
        ranks = group.gather(torch.stack(sums).cpu())
        apart = torch.stack(
            [~torch.isclose(result, ranks[0], rtol=0, atol=0, equal_nan=True) for result in ranks]
        )
        for place in apart.any(dim=0).nonzero().flatten().tolist():
            mine = weights[place].value.detach()
            close = torch.isclose(mine, group.broadcast(mine), rtol=1e-3, atol=1e-5, equal_nan=True)
            if int(group.all_reduce((~close.all()).int(), "max")):
                raise RuntimeError(
                    f"{weights[place].path} differs between the ranks: something other than"
                    " model.optimizer changes it, such as a second optimizer or a callback; use"
                    " job.prepare, or your own loop"
                )

    def read(self, variable: Any) -> Tensor:
        """The whole of it."""
        value: Tensor = variable.value.detach()
        return value

    def write(self, variable: Any, value: Tensor | Stored) -> None:
        """The whole of it."""
        variable.assign(gathered(value).to(variable.value.device))

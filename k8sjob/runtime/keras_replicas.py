"""`model.fit` where every rank has the whole model, and a share of each batch.

Keras on torch knows of no other process. Whatever it computes from a rank's own share is made the
same on all ranks where Keras would use it: gradients before the optimizer sees them, statistics
after the step, metrics before a log is made of them.
"""

from __future__ import annotations

from contextlib import contextmanager
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.utils import get_total_norm
from torch.utils.data import DataLoader

from k8sjob.runtime import keras_model, rng
from k8sjob.runtime.data import strided
from k8sjob.runtime.keras_model import Moved, Seeds
from k8sjob.runtime.keras_together import TEST_BATCH
from k8sjob.runtime.mesh import Mesh

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from torch import Tensor

    from k8sjob.runtime.data import Share
    from k8sjob.runtime.job import Job
    from k8sjob.runtime.shards import Stored

__all__ = ["Replicas"]


class Replicas:
    """See keras_together.Holding."""

    parted = False
    feeding: Mapping[str, Any] = MappingProxyType({})

    def __init__(self, job: Job, model: Any) -> None:
        self.mesh = Mesh(job.group)
        self.norm: Tensor | None = None
        self._job, self._model = job, model
        self._share: Share | None = None
        self._due: Callable[[], bool] = lambda: False

    def evaluation(self, data: Any, options: Mapping[str, Any]) -> tuple[list[Any], Any]:
        """Keras's own, over this rank's share: each sample once over all ranks."""
        if len(data) < self.mesh.data_size:
            raise ValueError(
                f"{len(data)} samples to validate with, and {self.mesh.data_size} ranks: give each"
                " one"
            )
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
            with keras_model.on(self._job.device):
                self._model.to(self._job.device)
                yield
        finally:
            del optimizer.apply

    def begin(self, resume: Callable[[], None]) -> None:
        """Rank 0's weights for all; each rank's own sequences of random numbers."""
        seeds, optimizer = Seeds(self._model), self._model.optimizer
        resume()
        for variable in [*self._model.variables, *optimizer.variables]:
            variable.assign(self._job.group.broadcast(variable.value))
        seeds.part(self._job.rank)
        self._moved = Moved(self._model, self._job.group)
        rng.seed_all(self._job.seed, self._job.rank)

    def expect(self, share: Share | None) -> None:
        """The weight of this rank's gradients."""
        self._share = share

    def _average(self, gradients: list[Tensor | None]) -> None:
        if self._share is None:
            raise RuntimeError("the optimizer was called outside of a step of job.fit()")
        present = [gradient for gradient in gradients if gradient is not None]
        with self._job.group.waiting(), torch.no_grad():
            for gradient in present:
                gradient.mul_(self._share.scale)
            self.mesh.average(present)
            self.norm = get_total_norm(present) if self._due() else None

    def reduce_metrics(self) -> None:
        """Over all ranks, as the `aggregation` of each variable says, else sums; in float64."""
        variables = self._model.metrics_variables
        flat = [self._share_in(variable).flatten() for variable in variables]
        if not flat:
            return
        total = self._job.group.all_reduce(torch.cat(flat))
        for variable, part in zip(
            variables, torch.split(total, [part.numel() for part in flat]), strict=True
        ):
            variable.assign(part.view(variable.shape))

    def _share_in(self, variable: Any) -> Tensor:
        """What this rank adds to the sum over the ranks."""
        value: Tensor = variable.value.detach().double()
        if variable.aggregation == "mean":
            return value / self._job.world_size
        if variable.aggregation == "only_first_replica" and self._job.rank:
            return torch.zeros_like(value)
        return value

    def check(self) -> None:
        """Weights that differ; machines of several kinds may round in their own ways."""
        group, weights = self._job.group, self._model.weights
        sums = [variable.value.detach().double().sum() for variable in weights]
        ranks = group.gather(torch.stack(sums).cpu())
        apart = torch.stack(
            [~torch.isclose(one, ranks[0], rtol=0, atol=0, equal_nan=True) for one in ranks]
        )
        for place in apart.any(dim=0).nonzero().flatten().tolist():
            mine = weights[place].value.detach()
            close = torch.isclose(mine, group.broadcast(mine), rtol=1e-3, atol=1e-5, equal_nan=True)
            if int(group.all_reduce((~close.all()).int(), "max")):
                raise RuntimeError(
                    f"{weights[place].path} differs between the ranks: something beside"
                    " model.optimizer changes it, as a second optimizer or a callback; use"
                    " job.prepare, or a loop of your own"
                )

    def read(self, variable: Any) -> Tensor:
        """The whole of it."""
        value: Tensor = variable.value.detach()
        return value

    def write(self, variable: Any, value: Tensor | Stored) -> None:
        """The whole of it."""
        whole = value if isinstance(value, torch.Tensor) else value.whole()
        variable.assign(whole.to(variable.value.device))

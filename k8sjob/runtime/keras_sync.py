"""What keeps the ranks of `model.fit` together: a callback, and gradients that are averaged.

Keras on torch knows of no other process. Whatever it computes from a rank's own share is made the
same on all ranks where Keras would use it: gradients before the optimizer sees them, statistics
after the step, metrics before a log is made of them, and the wish to stop before it is obeyed.
"""

from __future__ import annotations

import math
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

import keras
import torch
from torch.nn.utils import get_total_norm

from k8sjob.contract import EventKind
from k8sjob.runtime import rng
from k8sjob.runtime.keras_model import Moved, Seeds
from k8sjob.runtime.mesh import Mesh
from k8sjob.runtime.progress import Progress
from k8sjob.runtime.training import Stopped

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from torch import Tensor

    from k8sjob.runtime.data import Share
    from k8sjob.runtime.feed import Feed
    from k8sjob.runtime.job import Job
    from k8sjob.runtime.saves import Saved

__all__ = ["KIND", "Together"]

KIND: Final = "k8sjob/fit/1"
"""Tells the checkpoint of a fit, of this form, from others."""


class Together(keras.callbacks.Callback):  # type: ignore[misc]  # keras has no types
    """The last of the callbacks of a fit on each rank."""

    def __init__(
        self, job: Job, feed: Feed, *, epochs: int, test_batches: int, saved: Saved | None
    ) -> None:
        """Wire up a rank.

        Args:
            job: the rank's view of its job.
            feed: the training data.
            epochs: in all, for the progress.
            test_batches: of this rank in an evaluation; 0 without one.
            saved: what to go on from.
        """
        super().__init__()
        self._job, self._feed, self._epochs, self._saved = job, feed, epochs, saved
        self._test_batches = test_batches
        self._mesh = Mesh(job.group)
        self._progress = Progress(job.group, job.reporter, job.waiting)
        self._asks = False
        self._steps = saved.step if saved else 0
        self._shares: list[Share] = []
        self._share: Share | None = None
        self._seen, self._sum = 0, 0.0
        self._norm: Tensor | None = None

    @contextmanager
    def around(self, optimizer: Any, others: Iterable[Any]) -> Iterator[None]:
        """Average all gradients that the optimizer gets meanwhile.

        Args:
            optimizer: the model's.
            others: the user's callbacks, the same on all ranks; those that look at batches may
                stop in mid-epoch.
        """
        self._asks = any(_looks_at_batches(other) for other in others)
        apply = optimizer.apply

        def apply_averaged(gradients: Iterable[Any], variables: Any = None) -> None:
            self._average(list(gradients))
            apply(gradients, variables)
            self._moved.average()

        # On the instance: a subclass would be what a saved model names as its optimizer.
        optimizer.apply = apply_averaged
        try:
            yield
        finally:
            del optimizer.apply

    def _average(self, gradients: list[Tensor | None]) -> None:
        if self._share is None:
            raise RuntimeError("the optimizer was called outside of a step of job.fit()")
        present = [gradient for gradient in gradients if gradient is not None]
        self._job.group.on_phase("sync")
        with torch.no_grad():
            for gradient in present:
                gradient.mul_(self._share.scale)
            self._mesh.average(present)
            self._norm = get_total_norm(present) if self._progress.due else None
        self._job.group.on_phase("compute")

    # --- training -------------------------------------------------------------------------------

    def on_train_begin(self, logs: Any = None) -> None:  # noqa: ARG002 - Keras's signature
        """All ranks begin with rank 0's weights, or those of a checkpoint."""
        variables, seeds = self._variables(), Seeds(self.model)
        if self._saved is not None:
            _restore(variables, self._saved)
        for variable in variables:
            variable.assign(self._job.group.broadcast(variable.value))
        seeds.part(self._job.rank)
        self._moved = Moved(self.model, self._job.group)
        rng.seed_all(self._job.seed, self._job.rank)
        if self._saved is not None:
            self._saved.restore_random()

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:  # noqa: ARG002 - see above
        """A new order of the samples."""
        self._feed.sampler.set_epoch(epoch)
        self._shares = list(self._feed.sampler.shares())
        self._feed.loader(self._shares)
        self._seen, self._sum = 0, 0.0
        self._progress.begin(epoch, self._epochs, len(self._shares), 0)

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:  # noqa: ARG002 - see above
        """What this rank's batch weighs."""
        self._share = self._shares[batch]
        self._job.beat(self._steps)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Report; agree to stop, by a callback or by a signal."""
        self._report(self._shares[batch].count, (logs or {}).get("loss", math.nan))
        self._share, self._steps = None, self._steps + 1
        if self._asks:
            self._agree()
        if self.model.stop_training or batch + 1 == len(self._shares):
            self._reduce_metrics()
        if not self._job.lookout.passes():
            reason = self._job.lookout.reason
            at = {"epoch": self._feed.sampler.epoch, "step": self._steps}
            self._job.reporter.emit(EventKind.STOPPING, signal=reason, **at)
            raise Stopped(reason)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Agree to stop, make sure of equal ranks, report, save."""
        self._agree()
        self._check_equal()
        numbers = {name: value for name, value in (logs or {}).items() if isinstance(value, float)}
        self._job.log(epoch=epoch + 1, **numbers)
        if self._job.saves is not None:
            state = {
                "epoch": epoch + 1,
                "variables": [variable.value.detach() for variable in self._variables()],
            }
            self._job.saves.store(KIND, self._steps, state, epoch=epoch + 1)

    # --- evaluation -----------------------------------------------------------------------------

    def on_test_batch_end(self, batch: int, logs: Any = None) -> None:  # noqa: ARG002 - see above
        """The metrics of all ranks, once this one has seen its share."""
        self._job.beat(self._steps)
        if batch + 1 == self._test_batches:
            self._reduce_metrics()

    # --- the ranks ------------------------------------------------------------------------------

    def _variables(self) -> list[Any]:
        """What a checkpoint holds: the model's weights and seeds, and the optimizer's variables."""
        metrics = {id(variable) for variable in self.model.metrics_variables}
        own = [variable for variable in self.model.variables if id(variable) not in metrics]
        return [*own, *self.model.optimizer.variables]

    def _agree(self) -> None:
        """What one rank's callbacks decided, all ranks do."""
        asked = torch.tensor(int(self.model.stop_training))
        self.model.stop_training = bool(self._job.group.all_reduce(asked, "max"))

    def _report(self, count: int, mean: float) -> None:
        """A batch's own loss, from the mean over the epoch so far that Keras tells."""
        self._seen += count
        total, before = mean * self._seen, self._sum
        self._sum = total
        self._progress.add(torch.tensor((total - before) / max(count, 1)), count)
        self._progress.step(self._norm)

    def _reduce_metrics(self) -> None:
        """Put the sums over all ranks where Keras reads its metrics from; float64 meanwhile."""
        variables = self.model.metrics_variables
        flat = [variable.value.detach().double().flatten() for variable in variables]
        if not flat:
            return
        total = self._job.group.all_reduce(torch.cat(flat))
        for variable, part in zip(
            variables, torch.split(total, [part.numel() for part in flat]), strict=True
        ):
            variable.assign(part.view(variable.shape))

    def _check_equal(self) -> None:
        """Find what was trained apart; machines of several kinds may round in their own ways."""
        group, weights = self._job.group, self.model.weights
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


def _looks_at_batches(callback: Any) -> bool:
    plain = keras.callbacks.Callback
    names = ("on_train_batch_begin", "on_train_batch_end", "on_batch_begin", "on_batch_end")
    methods = ((getattr(callback, name), getattr(plain, name)) for name in names)
    # A LambdaCallback has functions of its own on the instance.
    return any(getattr(method, "__func__", None) is not default for method, default in methods)


def _restore(variables: list[Any], saved: Saved) -> None:
    found = saved.state["variables"]
    then, now = ([tuple(item.shape) for item in items] for items in (found, variables))
    if then != now:
        raise ValueError(
            f"{saved.path} does not fit this model and optimizer: {len(then)} variables there and"
            f" {len(now)} here, or other shapes; resume with the code that saved it, or begin anew"
            " with an empty checkpoint.dir"
        )
    for variable, value in zip(variables, found, strict=True):
        variable.assign(value.to(variable.value.device))

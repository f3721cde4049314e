"""What keeps the ranks of `model.fit` together: the callback that comes last.

It reports, saves, and lets all ranks stop at the same step. How the ranks hold one model is not its
business: each has all of it (keras_replicas), or its pieces (keras_mesh).
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Final, Protocol

import keras
import torch

from k8sjob.contract import EventKind
from k8sjob.runtime import full_state
from k8sjob.runtime.checkpoint import FROM_SCRATCH
from k8sjob.runtime.progress import Progress
from k8sjob.runtime.training import Stopped

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from contextlib import AbstractContextManager

    from torch import Tensor

    from k8sjob.runtime.data import Share
    from k8sjob.runtime.feed import Feed
    from k8sjob.runtime.job import Job
    from k8sjob.runtime.mesh import Mesh
    from k8sjob.runtime.saves import Saved

__all__ = ["KIND", "TEST_BATCH", "Callbacks", "Holding", "Together"]

KIND: Final = "k8sjob/fit/2"
"""Tells the checkpoint of a fit, of this form, from others."""
TEST_BATCH: Final = 256
"""Samples of one rank in one batch of an evaluation."""


class Holding(Protocol):
    """How the ranks hold one Keras model."""

    @property
    def mesh(self) -> Mesh:
        """The ranks, and which of them divide the data."""

    @property
    def parted(self) -> bool:
        """Whether ranks have different parts."""

    @property
    def feeding(self) -> Mapping[str, Any]:
        """How the ranks share the samples; settings of Feed."""

    @property
    def norm(self) -> Tensor | None:
        """That of the last step's gradients, where it was measured."""

    def evaluation(self, data: Any, options: Mapping[str, Any]) -> tuple[list[Any], Any]:
        """How the ranks evaluate after an epoch.

        Args:
            data: a map-style data set.
            options: for DataLoader.

        Returns:
            (callbacks that come first, what Keras is to evaluate with by itself, or None).
        """

    def fitting(self, due: Callable[[], bool]) -> AbstractContextManager[None]:
        """While Keras fits.

        Args:
            due: whether the gradients' norm of the next step is to be measured.
        """

    def begin(self, resume: Callable[[], None]) -> None:
        """Before the first step, the model is built: the same weights for all, and random numbers.

        Args:
            resume: puts a checkpoint's values, if there is one, into the variables.
        """

    def expect(self, share: Share | None) -> None:
        """What this rank's next batch weighs; None: no step is under way."""

    def reduce_metrics(self) -> None:
        """Put those of all ranks where Keras reads its metrics from."""

    def check(self) -> None:
        """Find what was trained apart."""

    def read(self, variable: Any) -> Tensor:
        """What this rank has of a variable; a DTensor where that is a piece."""

    def write(self, variable: Any, value: Any) -> None:
        """Put a tensor of a checkpoint, or a shards.Stored, into a variable."""


class Callbacks(keras.callbacks.CallbackList):  # type: ignore[misc]  # keras has no types
    """The user's callbacks and Together, which does not make a step wait for its loss.

    Keras would turn the numbers of every step into Python's, before it calls the first of them.
    """

    def __init__(self, callbacks: Sequence[Any], together: Together, **params: Any) -> None:
        super().__init__([*callbacks, together], add_history=True, **params)
        self._together = together

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """To those that look at batches."""
        if self._together.asks:
            super().on_train_batch_end(batch, logs)
        else:
            self._together.on_train_batch_end(batch, logs)


class Together(keras.callbacks.Callback):  # type: ignore[misc]  # keras has no types
    """The last of the callbacks of a fit on each rank.

    Attributes:
        asks: whether another one looks at batches.
    """

    def __init__(
        self,
        job: Job,
        feed: Feed,
        holding: Holding,
        *,
        epochs: int,
        test_batches: int,
        saved: Saved | None,
        others: Iterable[Any],
    ) -> None:
        """Wire up a rank.

        Args:
            job: the rank's view of its job.
            feed: the training data.
            holding: how it holds the model.
            epochs: in all, for the progress.
            test_batches: of this rank in an evaluation of Keras's own; 0 without one.
            saved: what to go on from.
            others: the user's callbacks, the same on all ranks; those that look at batches may
                stop in mid-epoch.
        """
        super().__init__()
        self._job, self._feed, self._epochs, self._saved = job, feed, epochs, saved
        self._holding, self._test_batches = holding, test_batches
        self._progress = Progress(job.group, job.reporter, job.waiting)
        self.asks = any(_looks_at_batches(other) for other in others)
        self._steps = saved.step if saved else 0
        self._shares: list[Share] = []
        self._seen, self._told, self._sum = 0, 0, 0.0

    def due(self) -> bool:
        """Whether the step that comes now is one to report."""
        return self._progress.due

    # --- training -------------------------------------------------------------------------------

    def on_train_begin(self, logs: Any = None) -> None:  # noqa: ARG002 - Keras's signature
        """All ranks begin with one model's weights, or those of a checkpoint."""
        self._holding.begin(self._resume)
        if self._saved is not None:
            self._saved.restore_random(self._holding.mesh.data_rank)

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:  # noqa: ARG002 - see above
        """A new order of the samples."""
        self._feed.sampler.set_epoch(epoch)
        self._shares = list(self._feed.sampler.shares())
        self._feed.loader(self._shares)
        self._seen, self._told, self._sum = 0, 0, 0.0
        self._progress.begin(epoch, self._epochs, len(self._shares), 0)

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:  # noqa: ARG002 - see above
        """What this rank's batch weighs."""
        self._job.beat(self._steps)
        self._holding.expect(self._shares[batch])

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Report; agree to stop, by a callback or by a signal."""
        self._report(self._shares[batch].count, (logs or {}).get("loss", math.nan))  # so far
        self._holding.expect(None)
        self._steps += 1
        if self.asks:
            self._agree()
        if self.model.stop_training or batch + 1 == len(self._shares):
            self._holding.reduce_metrics()
        if not self._job.stop_coordinator.passes():
            reason = self._job.stop_coordinator.reason
            at = {"epoch": self._feed.sampler.epoch, "step": self._steps}
            self._job.reporter.emit(EventKind.STOPPING, signal=reason, **at)
            raise Stopped(reason)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Agree to stop, make sure of equal ranks, report, save."""
        self._agree()
        self._holding.check()
        numbers = {name: value for name, value in (logs or {}).items() if isinstance(value, float)}
        self._job.log(epoch=epoch + 1, **numbers)
        self._save(epoch + 1)

    # --- evaluation -----------------------------------------------------------------------------

    def on_test_batch_end(self, batch: int, logs: Any = None) -> None:  # noqa: ARG002 - see above
        """The metrics of all ranks, once this one has seen its share."""
        self._job.beat(self._steps)
        if batch + 1 == self._test_batches:
            self._holding.reduce_metrics()

    # --- the ranks ------------------------------------------------------------------------------

    def _agree(self) -> None:
        """What one rank's callbacks decided, all ranks do."""
        asked = torch.tensor(int(self.model.stop_training))
        self.model.stop_training = bool(self._job.group.all_reduce(asked, "max"))

    def _report(self, count: int, mean: Any) -> None:
        """The loss since the last report, from the mean over the epoch so far that Keras tells.

        Between reports that is not looked at: a device may still compute it.
        """
        self._seen += count
        if self._progress.due and self._holding.mesh.has_data:
            total, samples = float(mean) * self._seen, self._seen - self._told
            recent = (total - self._sum) / max(samples, 1)
            self._progress.add(torch.tensor(recent), samples)
            self._told, self._sum = self._seen, total
        self._progress.step(self._holding.norm)

    # --- saving and resuming --------------------------------------------------------------------

    def _variables(self) -> Mapping[str, Sequence[Any]]:
        """What a checkpoint holds: the model's weights and seeds, and the optimizer's variables."""
        metrics = {id(variable) for variable in self.model.metrics_variables}
        own = [variable for variable in self.model.variables if id(variable) not in metrics]
        return {"model": own, "optimizer": self.model.optimizer.variables}

    def _save(self, epoch: int) -> None:
        saves, mesh = self._job.saves, self._holding.mesh
        if saves is None:
            return
        parts = {
            kind: dict(zip(_names(variables), map(self._holding.read, variables), strict=True))
            for kind, variables in self._variables().items()
        }
        state, stream = {"epoch": epoch}, mesh.data_rank
        if saves.divides(parted=self._holding.parted):
            describes = mesh.data_rank == 0
            saves.store_parts(
                KIND, self._steps, state, parts, describes=describes, stream=stream, epoch=epoch
            )
        else:
            held = full_state.whole(parts, keep=self._job.is_main)
            saves.store(KIND, self._steps, state, held=held, stream=stream, epoch=epoch)

    def _resume(self) -> None:
        if self._saved is None:
            return
        for kind, variables in self._variables().items():
            # By their order: names count the models that a process has made.
            found = list(self._saved.state[kind].values())
            then, now = ([tuple(item.shape) for item in items] for items in (found, variables))
            if then != now:
                raise ValueError(
                    f"{self._saved.path} does not fit this {kind}: {len(then)} variables there and"
                    f" {len(now)} here, or other shapes; resume with the code that saved it, or"
                    f" {FROM_SCRATCH}"
                )
            for variable, value in zip(variables, found, strict=True):
                self._holding.write(variable, value)


def _names(variables: Sequence[Any]) -> list[str]:
    """Keras's paths; a number behind those that are there already."""
    seen: dict[str, int] = {}
    names = []
    for variable in variables:
        count = seen[variable.path] = seen.get(variable.path, 0) + 1
        names.append(variable.path if count == 1 else f"{variable.path}_{count}")
    return names


def _looks_at_batches(callback: Any) -> bool:
    plain = keras.callbacks.Callback
    names = ("on_train_batch_begin", "on_train_batch_end", "on_batch_begin", "on_batch_end")
    methods = ((getattr(callback, name), getattr(plain, name)) for name in names)
    # A LambdaCallback has functions of its own on the instance.
    return any(getattr(method, "__func__", None) is not default for method, default in methods)

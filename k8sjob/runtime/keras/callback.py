"""Callback of `model.fit` that keeps the ranks together: it reports, saves, and stops them."""

from __future__ import annotations

import math
from contextlib import nullcontext
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

import keras
import torch

from k8sjob.contract import EventKind
from k8sjob.runtime.checkpoint import model_state
from k8sjob.runtime.checkpoint.store import FROM_SCRATCH
from k8sjob.runtime.progress import ProgressReporter
from k8sjob.runtime.rank_context import Stopped

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from contextlib import AbstractContextManager

    from torch import Tensor

    from k8sjob.runtime.checkpoint.writer import Saved
    from k8sjob.runtime.comm.mesh import Mesh
    from k8sjob.runtime.data import BatchShard, Feed
    from k8sjob.runtime.rank_context import RankContext

KIND: Final = "k8sjob/fit/2"
"""Tells the checkpoint of a fit, of this form, from others."""


class Placement:
    """The placement of one Keras model on the ranks: each has all of it, or a part.

    Attributes:
        mesh: the ranks, and which of them divide the data.
        feeding: how the ranks divide the samples; settings of Feed.
        norm: of the last step's gradients, where it was measured.
    """

    mesh: Mesh
    feeding: Mapping[str, Any] = MappingProxyType({})
    norm: Tensor | None = None

    @property
    def sharded(self) -> bool:
        """Whether ranks have different parts."""
        return False

    def evaluation(self, data: Any, options: Mapping[str, Any]) -> tuple[list[Any], Any]:
        """(callbacks that come first, data for Keras's own evaluation, or None)."""
        raise NotImplementedError

    def fitting(
        self,
        due: Callable[[], bool],  # noqa: ARG002 - of the parts that override it
    ) -> AbstractContextManager[None]:
        """While Keras fits; due() says whether the norm of the next step is to be measured."""
        return nullcontext()

    def begin(self, resume: Callable[[], None]) -> None:
        """Set equal weights and random numbers, before the first step or resume()."""

    def expect(self, shard: BatchShard | None) -> None:
        """Set the weight of this rank's next batch; None: no step is under way."""

    def reduce_metrics(self) -> None:
        """Put the metrics of all ranks where Keras reads them."""

    def check(self) -> None:
        """Refuse weights that were trained apart."""

    def read(self, variable: Any) -> Tensor:
        """This rank's value of a variable; a DTensor if that is a part."""
        raise NotImplementedError

    def write(self, variable: Any, value: Any) -> None:
        """Put a tensor of a checkpoint, or a Stored one, into a variable."""


class Callbacks(keras.callbacks.CallbackList):  # type: ignore[misc]  # keras has no types
    """The user's callbacks and JobCallback, which does not make a step wait for its loss.

    Keras would turn the numbers of every step into Python's, before it calls the first of them.
    """

    # JobCallback is the last: those of the user see the logs first and may ask to stop.
    def __init__(self, callbacks: Sequence[Any], callback: JobCallback, **params: Any) -> None:
        super().__init__([*callbacks, callback], add_history=True, **params)
        self._callback = callback

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """To those that look at batches."""
        # Python's numbers of the logs would make the host wait for the device at every step.
        if self._callback.asks:
            super().on_train_batch_end(batch, logs)
        else:
            self._callback.on_train_batch_end(batch, logs)


class JobCallback(keras.callbacks.Callback):  # type: ignore[misc]  # keras has no types
    """The last of the callbacks of a fit on each rank.

    Attributes:
        asks: whether another one looks at batches.
        history: Keras's, of all epochs, also of earlier starts.
    """

    def __init__(
        self,
        context: RankContext,
        feed: Feed,
        placement: Placement,
        *,
        epochs: int,
        test_batches: int,
        saved: Saved | None,
        callbacks: Iterable[Any],
    ) -> None:
        """Callback of one rank.

        `test_batches` are those of this rank in an evaluation of Keras's own; 0 without one.
        `callbacks` are the user's callbacks, the same on all ranks; those that look at batches may
        stop within an epoch.
        """
        super().__init__()
        self._context, self._feed, self._epochs, self._saved = context, feed, epochs, saved
        self._placement, self._test_batches = placement, test_batches
        self._progress = ProgressReporter(context.group, context.reporter, context.waiting)
        # Over all of the user's callbacks, not only this rank's: all ranks must take part in the
        # same collectives.
        self.asks = any(_looks_at_batches(callback) for callback in callbacks)
        self._steps = saved.step if saved else 0
        earlier = saved.state.get("history", {}) if saved else {}
        self.history: dict[str, list[Any]] = {name: list(earlier[name]) for name in earlier}
        self._shards: list[BatchShard] = []
        self._seen, self._reported, self._sum = 0, 0, 0.0

    def due(self) -> bool:
        """Whether the step that comes now is one to report."""
        return self._progress.due

    # --- training -------------------------------------------------------------------------------

    def on_train_begin(self, logs: Any = None) -> None:  # noqa: ARG002 - Keras's signature
        """All ranks begin with one model's weights, or those of a checkpoint."""
        self._placement.begin(self._resume)
        if self._saved is not None and self._context.checkpointer is not None:
            stream = self._placement.mesh.data_rank
            self._context.checkpointer.restore_random(self._saved, stream)

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:  # noqa: ARG002 - see above
        """A new order of the samples."""
        self._feed.sampler.set_epoch(epoch)
        self._shards = list(self._feed.sampler.shards())
        # The loader that Keras has: its sampler gives the batches of this epoch from now on.
        self._feed.loader(self._shards)
        self._seen, self._reported, self._sum = 0, 0, 0.0
        self._progress.begin(epoch, self._epochs, len(self._shards), 0)

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:  # noqa: ARG002 - see above
        """Set the weight of this rank's batch."""
        self._context.beat(self._steps)
        self._placement.expect(self._shards[batch])

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Report; agree to stop, by a callback or by a signal."""
        # Keras's loss is the mean over the epoch so far.
        self._report(self._shards[batch].count, (logs or {}).get("loss", math.nan))
        self._placement.expect(None)
        self._steps += 1
        if self.asks:
            self._agree()
        # Before Keras makes the epoch's logs: those are to be of all ranks.
        if self.model.stop_training or batch + 1 == len(self._shards):
            self._placement.reduce_metrics()
        if not self._context.stop_coordinator.passes():
            reason = self._context.stop_coordinator.reason
            at = {"epoch": self._feed.sampler.epoch, "step": self._steps}
            self._context.reporter.emit(EventKind.STOPPING, signal=reason, **at)
            # All ranks get here at the same step.
            raise Stopped(reason)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Agree to stop, make sure of equal ranks, report, save."""
        self._agree()
        self._placement.check()
        # F1Score and others give arrays, which an event has no place for.
        numbers = {name: value for name, value in (logs or {}).items() if isinstance(value, float)}
        self._context.log(epoch=epoch + 1, **numbers)
        for name, value in (logs or {}).items():
            plain = value.tolist() if hasattr(value, "tolist") else value  # of F1Score: a list
            self.history.setdefault(name, []).append(plain)
        self._save(epoch + 1)

    # --- evaluation -----------------------------------------------------------------------------

    def on_test_batch_end(self, batch: int, logs: Any = None) -> None:  # noqa: ARG002 - see above
        """The metrics of all ranks, once this one has seen its shard."""
        self._context.beat(self._steps)
        # Once, after the last batch: the ranks may have unequal numbers of batches.
        if batch + 1 == self._test_batches:
            self._placement.reduce_metrics()

    # --- the ranks ------------------------------------------------------------------------------

    def _agree(self) -> None:
        """Apply on all ranks what one rank's callbacks decided."""
        asked = torch.tensor(int(self.model.stop_training))
        self.model.stop_training = bool(self._context.group.all_reduce(asked, "max"))

    def _report(self, count: int, mean: Any) -> None:
        """The loss since the last report, from the mean over the epoch so far that Keras tells.

        Between reports that is not looked at: a device may still compute it.
        """
        self._seen += count
        # The loss of the samples since the last report follows from two means over the epoch.
        if self._progress.due and self._placement.mesh.model_rank == 0:
            total, samples = float(mean) * self._seen, self._seen - self._reported
            recent = (total - self._sum) / max(samples, 1)
            self._progress.add(torch.tensor(recent), samples)
            self._reported, self._sum = self._seen, total
        self._progress.step(self._placement.norm)

    # --- saving and resuming --------------------------------------------------------------------

    def _variables(self) -> Mapping[str, Sequence[Any]]:
        """The variables of a checkpoint: the model's weights and seeds, and the optimizer's."""
        # Metrics are reset in each epoch, and a checkpoint is written at the end of an epoch.
        metrics = {id(variable) for variable in self.model.metrics_variables}
        of_model = [variable for variable in self.model.variables if id(variable) not in metrics]
        return {"model": of_model, "optimizer": self.model.optimizer.variables}

    def _save(self, epoch: int) -> None:
        checkpointer, mesh = self._context.checkpointer, self._placement.mesh
        if checkpointer is None:
            return
        parts = {
            kind: dict(zip(_names(variables), map(self._placement.read, variables), strict=True))
            for kind, variables in self._variables().items()
        }
        checkpointer.save(
            KIND,
            self._steps,
            {"epoch": epoch, "history": self.history},
            whole=lambda: model_state.whole(parts, keep=self._context.is_main),
            parts=lambda: parts,
            sharded=self._placement.sharded,
            describes=mesh.data_rank == 0,
            rng_stream=mesh.data_rank,
            epoch=epoch,
        )

    def _resume(self) -> None:
        if self._saved is None:
            return
        for kind, variables in self._variables().items():
            # By order: names contain the number of models that a process has made.
            stored = list(self._saved.state[kind].values())
            then, now = ([tuple(item.shape) for item in items] for items in (stored, variables))
            if then != now:
                raise ValueError(
                    f"{self._saved.path} does not fit this {kind}: {len(then)} variables there and"
                    f" {len(now)} here, or other shapes; resume with the code that saved it, or"
                    f" {FROM_SCRATCH}"
                )
            for variable, value in zip(variables, stored, strict=True):
                self._placement.write(variable, value)


def _names(variables: Sequence[Any]) -> list[str]:
    """Keras's paths, with a number after repeated ones."""
    # Layers without a name of their own may share a path.
    counts: dict[str, int] = {}
    names = []
    for variable in variables:
        count = counts[variable.path] = counts.get(variable.path, 0) + 1
        names.append(variable.path if count == 1 else f"{variable.path}_{count}")
    return names


def _looks_at_batches(callback: Any) -> bool:
    plain = keras.callbacks.Callback
    names = ("on_train_batch_begin", "on_train_batch_end", "on_batch_begin", "on_batch_end")
    methods = ((getattr(callback, name), getattr(plain, name)) for name in names)
    # A LambdaCallback has functions of its own on the instance.
    return any(getattr(method, "__func__", None) is not default for method, default in methods)

"""`model.fit` of Keras on all ranks: it trains one model, as it would in one process."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import keras
import torch
from torch.utils.data import TensorDataset

from k8sjob.contract import EventKind
from k8sjob.runtime.checkpoint import FROM_SCRATCH
from k8sjob.runtime.feed import Feed
from k8sjob.runtime.keras_checks import check, check_feed
from k8sjob.runtime.keras_replicas import Replicas
from k8sjob.runtime.keras_together import KIND, Callbacks, Together

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from k8sjob.runtime.data import Tail
    from k8sjob.runtime.job import Job
    from k8sjob.runtime.keras_together import Holding

__all__ = ["fit"]

_WRITERS: Final = (
    keras.callbacks.CSVLogger,
    keras.callbacks.ModelCheckpoint,
    keras.callbacks.ProgbarLogger,
    keras.callbacks.RemoteMonitor,
    keras.callbacks.TensorBoard,
)
"""Callbacks that write, and so are rank 0's alone. All others decide, and decide the same."""


def fit(
    job: Job,
    model: Any,
    train: Any,
    *,
    epochs: int,
    sizes: Mapping[str, int | None],
    validation: Any,
    callbacks: Sequence[Any],
    shuffle: bool,
    tail: Tail,
    loader_options: Mapping[str, Any],
) -> Any:
    """See Job.fit.

    Args:
        job: the rank's view of its job.
        model: compiled.
        train: the training data.
        epochs: in all.
        sizes: batch_size and global_batch.
        validation: data to evaluate with after each epoch, or None.
        callbacks: of Keras.
        shuffle: a new order each epoch.
        tail: see data.ShardSampler.
        loader_options: for DataLoader.
    """
    check(job, model, callbacks)
    holding = _holding(job, model)
    settings = {
        **sizes,
        "shuffle": shuffle,
        "tail": tail,
        "most_ranks": job.most_ranks,
        "loader_options": loader_options,
    }
    feed = Feed(
        _dataset(train),
        settings,
        rank=holding.mesh.data_rank,
        world_size=holding.mesh.data_size,
        accumulate=1,
        seed=job.seed,
        on_gpu=job.device.type == "cuda",
        **holding.feeding,
    )
    check_feed(feed)
    saved = job.saves.newest(KIND) if job.saves else None
    own = [one for one in callbacks if job.is_main or not isinstance(one, _WRITERS)]
    held_out = None
    if validation is not None:
        first, held_out = holding.evaluation(_dataset(validation), loader_options)
        own = [*first, *own]
    together = Together(
        job,
        feed,
        holding,
        epochs=epochs,
        test_batches=0 if held_out is None else len(held_out),
        saved=saved,
        others=callbacks,
    )
    job.begin()
    try:
        with holding.fitting(together.due):
            history = model.fit(
                feed.loader(list(feed.sampler.shares())),
                epochs=epochs,
                initial_epoch=_resume(job, saved, epochs),
                validation_data=held_out,
                callbacks=Callbacks(own, together, model=model, epochs=epochs, verbose=0),
                shuffle=False,  # the feed does
                verbose=0,
            )
        job.end()
    finally:
        job.pause()  # a save is not waited for: of a rank that is lost nothing comes
    return history


def _holding(job: Job, model: Any) -> Holding:
    if job.config.strategy != "keras_mesh":
        return Replicas(job, model)
    from k8sjob.runtime.keras_pieces import Pieces  # needs a Keras that can distribute

    return Pieces(job, model)


def _resume(job: Job, saved: Any, epochs: int) -> int:
    """The first epoch to train, counted from 0."""
    if saved is None:
        return 0
    epoch: int = saved.state["epoch"]
    job.reporter.emit(EventKind.RESUMED, path=saved.path, epoch=epoch, step=saved.step)
    if epoch >= epochs:
        job.reporter.warn(
            f"all {epochs} epochs were done before: nothing is left to train; raise the number, or"
            f" {FROM_SCRATCH}"
        )
    return epoch


def _dataset(data: Any) -> Any:
    """A map-style data set; arrays become one."""
    if isinstance(data, tuple | list) and all(hasattr(part, "shape") for part in data):
        return TensorDataset(*(torch.as_tensor(part) for part in data))
    return data

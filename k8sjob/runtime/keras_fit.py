"""`model.fit` of Keras on all ranks: it trains one model, as it would in one process."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import keras
import torch
from torch.utils.data import DataLoader, TensorDataset

from k8sjob import compat
from k8sjob.contract import EventKind
from k8sjob.runtime import keras_model
from k8sjob.runtime.data import strided
from k8sjob.runtime.feed import Feed
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

_TEST_BATCH: Final = 256
"""Samples of one rank in one batch of an evaluation."""

_INSTEAD: Final = {
    "accumulate": "gradient_accumulation_steps of the optimizer",
    "clip_norm": "global_clipnorm of the optimizer",
    "bf16": 'keras.mixed_precision.set_global_policy("mixed_bfloat16")',
}
"""Settings of the step, which is Keras's own here, and Keras's words for them."""


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
    _check(job, model, callbacks)
    divided = job.config.strategy == "keras_mesh"
    holding = _pieces(job, model) if divided else Replicas(job, model)
    settings = {**sizes, "shuffle": shuffle, "tail": tail, "loader_options": loader_options}
    feed = Feed(
        _dataset(train),
        settings,
        rank=holding.mesh.data_rank,
        world_size=holding.mesh.data_size,
        accumulate=1,
        seed=job.seed,
        on_gpu=job.device.type == "cuda",
        # A mask is one of the whole batch: its rows are the same samples in every mesh.
        in_blocks=divided,
        on_phase=(lambda phase: job.group.on_phase(phase)) if divided else None,  # noqa: PLW0108 - it is another one once training begins
    )
    _check_feed(feed, divided=divided)
    saved = job.saves.newest(KIND) if job.saves else None
    own = [one for one in callbacks if job.is_main or not isinstance(one, _WRITERS)]
    held_out = None
    if validation is not None and divided:
        own.insert(0, _evaluation(job, _dataset(validation), loader_options))
    elif validation is not None:
        held_out = _validation(job, _dataset(validation), loader_options)
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
            return model.fit(
                feed.loader(list(feed.sampler.shares())),
                epochs=epochs,
                initial_epoch=_resume(job, saved, epochs),
                validation_data=held_out,
                callbacks=Callbacks(own, together, model=model, epochs=epochs, verbose=0),
                shuffle=False,  # the feed does
                verbose=0,
            )
    finally:
        job.end()


def _pieces(job: Job, model: Any) -> Holding:
    from k8sjob.runtime.keras_pieces import Pieces  # needs a Keras that can distribute

    return Pieces(job, model)


def _evaluation(job: Job, data: Any, loader_options: Mapping[str, Any]) -> Any:
    from k8sjob.runtime.keras_pieces import Evaluation

    return Evaluation(job, data, loader_options, _TEST_BATCH)


def _check_feed(feed: Feed, *, divided: bool) -> None:
    """Refuse batches that Keras could not compute on all ranks."""
    sampler = feed.sampler
    if not sampler.steps():
        raise ValueError(
            f"{sampler.samples} samples, global_batch={sampler.global_batch} and"
            f' tail={sampler.tail!r} leave no batch; make global_batch smaller, or take tail="pad"'
        )
    if sampler.leaves_out():
        raise ValueError(
            f'tail="{sampler.tail}" leaves some ranks without a sample in the last step, and Keras'
            ' computes no gradient of nothing: use tail="pad" or "drop"'
        )
    ranks = sampler.num_replicas
    if divided and any(
        share.count * ranks != share.end - share.start for share in sampler.shares()
    ):
        below = sampler.global_batch // ranks * ranks
        raise ValueError(
            f"global_batch={sampler.global_batch} and tail={sampler.tail!r} leave batches that do"
            f" not divide by mesh axis data={ranks}; set global_batch to {below} or"
            f' {below + ranks}, and tail to "pad" or "drop"'
        )


def _resume(job: Job, saved: Any, epochs: int) -> int:
    """The first epoch to train, counted from 0."""
    if saved is None:
        return 0
    epoch: int = saved.state["epoch"]
    job.reporter.emit(EventKind.RESUMED, path=saved.path, epoch=epoch, step=saved.step)
    if epoch >= epochs:
        job.reporter.warn(
            f"all {epochs} epochs were done before: nothing is left to train; raise the number, or"
            f" empty {job.checkpoint_dir} to begin anew"
        )
    return epoch


def _check(job: Job, model: Any, callbacks: Sequence[Any]) -> None:
    """Refuse what would go wrong without a word, or with one that nobody understands."""
    name, kind = type(model).__name__, job.config.strategy
    if not isinstance(model, keras.Model):
        raise TypeError(f"job.fit() takes a keras.Model, not a {name}; torch models: job.prepare")
    if kind not in {"ddp", "keras", "keras_mesh"}:
        raise ValueError(f"strategy.kind: {kind}, but {name} is a Keras model; use keras")
    wanted = compat.keras_backend(kind, job.config.options) or "torch"
    if problem := keras_model.refuse(model, backend=wanted):
        raise ValueError(problem)
    if model.compiled and model.steps_per_execution != 1:
        raise ValueError(
            f"{name} is compiled with steps_per_execution={model.steps_per_execution}, and"
            " job.fit() reports and stops between single steps; leave it out"
        )
    if job.saves is not None and job.fitted not in {None, id(model)}:
        raise ValueError(
            f"job.fit() has trained another model in this session, and {job.checkpoint_dir} holds"
            " one run; train the second in a job of its own, or leave checkpoint.dir out"
        )
    job.fitted = id(model)
    if not model.compiled:
        raise ValueError(f"{name} is not compiled: call model.compile(optimizer=..., loss=...)")
    if any(isinstance(one, keras.callbacks.BackupAndRestore) for one in callbacks):
        raise ValueError("BackupAndRestore: job.fit() saves and resumes by itself; take it out")
    if kind == "keras_mesh":
        _check_divided(job, callbacks)
    else:
        _check_replicated(job, model)


def _check_divided(job: Job, callbacks: Sequence[Any]) -> None:
    if job.config.options.get("layout"):
        for one in callbacks:
            for option in ("restore_best_weights", "histogram_freq"):
                if getattr(one, option, 0):
                    raise ValueError(
                        f"{type(one).__name__}({option}={getattr(one, option)}): no rank has the"
                        " whole model; leave it out"
                    )
    if any(isinstance(one, keras.callbacks.ModelCheckpoint) for one in callbacks):
        raise ValueError(
            "ModelCheckpoint: no rank has the whole model; take it out, set checkpoint.dir (every"
            " epoch is saved), and write a file of Keras's own by job.save_model(model, path)"
        )


def _check_replicated(job: Job, model: Any) -> None:
    name = type(model).__name__
    for option, value in job.config.options.items():
        instead = _INSTEAD.get(option, "nothing like it")
        raise ValueError(
            f"strategy.{option}: {value}, but job.fit() leaves the step to Keras; use {instead}"
        )
    if model.jit_compile:
        raise ValueError(f"{name} is compiled with jit_compile=True; leave it out")
    if getattr(model.loss, "reduction", None) == "sum":
        raise ValueError(
            f'the loss of {name} has reduction="sum", and the ranks average gradients; use its'
            " default, the mean, and a larger learning rate"
        )


def _dataset(data: Any) -> Any:
    """A map-style data set; arrays become one."""
    if isinstance(data, tuple | list) and all(hasattr(part, "shape") for part in data):
        return TensorDataset(*(torch.as_tensor(part) for part in data))
    return data


def _validation(job: Job, data: Any, loader_options: Mapping[str, Any]) -> DataLoader[Any]:
    """This rank's share, each sample once over all ranks."""
    batches = [batch for batch in strided(data, job.rank, job.world_size, _TEST_BATCH) if batch]
    if len(data) < job.world_size:
        raise ValueError(
            f"{len(data)} samples to validate with, and {job.world_size} ranks: give each one"
        )
    return DataLoader(data, batch_sampler=batches, **loader_options)

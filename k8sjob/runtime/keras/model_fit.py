"""`model.fit` of Keras on all ranks: it trains one model, as it would in one process."""

from __future__ import annotations

import math
import weakref
from typing import TYPE_CHECKING, Any, Final

import keras
import torch
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.data import Dataset, Subset, TensorDataset

from k8sjob import strategies
from k8sjob.contract import EventKind
from k8sjob.runtime.checkpoint.store import FROM_SCRATCH
from k8sjob.runtime.data import Feed
from k8sjob.runtime.keras import model as keras_model
from k8sjob.runtime.keras.callback import KIND, Callbacks, JobCallback
from k8sjob.runtime.keras.strategy import ReplicatedModel
from k8sjob.temporary import temporary_folder

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from k8sjob.runtime.keras.callback import Placement
    from k8sjob.runtime.rank_context import RankContext

_WRITERS: Final = (
    keras.callbacks.CSVLogger,
    keras.callbacks.ModelCheckpoint,
    keras.callbacks.ProgbarLogger,
    keras.callbacks.RemoteMonitor,
    keras.callbacks.TensorBoard,
)
"""Callbacks that write, and so run only on rank 0. All others decide, and decide the same."""


def fit(
    context: RankContext,
    model: Any,
    train: Any,
    settings: dict[str, Any],
    *,
    epochs: int,
    validation: Any,
    callbacks: Sequence[Any],
    class_weight: Mapping[int, float] | None,
    validation_split: float,
) -> Any:
    """See Job.fit; `settings` are those of its arguments that Feed takes."""
    _check(context, model, callbacks)
    loader_options = settings["loader_options"]
    # Unknown arguments go to the DataLoader, and these are Keras's.
    for name in sorted(_INSTEAD.keys() & loader_options.keys()):
        raise TypeError(f"job.fit({name}=): {_INSTEAD[name]}")
    train = _dataset(train)
    if validation_split and validation is None:  # as Keras decides
        cut = int(len(train) * (1 - validation_split))  # as Keras rounds
        train, validation = Subset(train, range(cut)), Subset(train, range(cut, len(train)))
    if class_weight:
        train = _Weighted(train, class_weight)
    placement = _placement(context, model)
    feed = Feed(
        train,
        {**settings, "max_ranks": context.max_ranks},
        rank=placement.mesh.data_rank,
        world_size=placement.mesh.data_size,
        accumulate=1,
        seed=context.seed,
        on_gpu=context.device.type == "cuda",
        **placement.feeding,
    )
    _check_feed(feed)
    saved = context.checkpointer.newest(KIND) if context.checkpointer else None
    # Writers on rank 0 alone: others would overwrite its files.
    on_rank = [user for user in callbacks if context.is_main or not isinstance(user, _WRITERS)]
    held_out = None
    if validation is not None:
        first, held_out = placement.evaluation(_dataset(validation), loader_options)
        on_rank = [*first, *on_rank]
    callback = JobCallback(
        context,
        feed,
        placement,
        epochs=epochs,
        test_batches=0 if held_out is None else len(held_out),
        saved=saved,
        callbacks=callbacks,
    )
    context.begin()
    try:
        with placement.fitting(callback.due):
            history: Any = model.fit(
                # Of the first epoch; on_epoch_begin() gives this loader the batches of each epoch.
                feed.loader(list(feed.sampler.shards())),
                epochs=epochs,
                initial_epoch=_resume(context, saved, epochs),
                validation_data=held_out,
                callbacks=Callbacks(on_rank, callback, model=model, epochs=epochs, verbose=0),
                shuffle=False,  # the feed does
                verbose=0,
            )
        context.end()
    finally:
        context.pause()  # a save is not waited for: of a rank that is lost nothing comes
    # Keras's own begins with this start; the callback's has the epochs of earlier starts, too.
    history.history = callback.history
    history.epoch = list(range(len(callback.history.get("loss", ()))))
    return history


def predict(context: RankContext, model: Any, data: Any, batch_size: int) -> Any:
    """See Job.predict."""
    if context.config.strategy == "keras_mesh":
        raise ValueError(
            "job.predict: no rank has the whole model; write job.save_model(model, path), and after"
            " the session keras.models.load_model(path).predict(x)"
        )
    count, ranks = len(tree_leaves(data)[0]), context.group.world_size
    context.calls.check("job.predict", f"{count} samples")
    first, last = (number * count // ranks for number in (context.rank, context.rank + 1))
    # A rank without samples predicts one too: it shows the shape of what it has none of.
    rows = slice(first, max(last, first + 1))
    output = model.predict(
        tree_map(lambda part: part[rows], data), batch_size=batch_size, verbose=0
    )

    def whole(part: Any) -> Any:
        return torch.cat(context.group.gather(torch.as_tensor(part[: last - first]))).numpy()

    return tree_map(whole, output)


def _placement(context: RankContext, model: Any) -> Placement:
    if context.config.strategy != "keras_mesh":
        return ReplicatedModel(context, model)
    from k8sjob.runtime.keras.mesh import ShardedModel  # needs keras.distribution

    return ShardedModel(context, model)


def _resume(context: RankContext, saved: Any, epochs: int) -> int:
    """The first epoch to train, counted from 0."""
    if saved is None:
        return 0
    epoch: int = saved.state["epoch"]
    context.reporter.emit(EventKind.RESUMED, path=saved.path, epoch=epoch, step=saved.step)
    if epoch >= epochs:
        context.reporter.warn(
            f"all {epochs} epochs were done before: nothing is left to train; raise the number, or"
            f" {FROM_SCRATCH}"
        )
    return epoch


_INSTEAD: Final = {
    "initial_epoch": "it resumes by itself, from checkpoint.dir; leave it out",
    "sample_weight": "make it the third part of the data: train=(x, y, sample_weight)",
    "steps_per_epoch": "an epoch is all of `train`; for less, give torch.utils.data.Subset",
    "validation_data": "it is called validation",
    "validation_freq": "it validates after each epoch; leave it out",
    "validation_steps": "it validates with all samples; leave it out",
    "validation_batch_size": "it has no effect on the result; leave it out",
    "verbose": "progress is reported by itself; leave it out",
}
"""Arguments of Keras's fit that job.fit does not have, and what to write."""


class _Weighted(Dataset[Any]):
    """A data set whose samples have the weights of their classes, besides their own."""

    # class -> weight; classes that are not in it have 1.
    def __init__(self, data: Any, weights: Mapping[int, float]) -> None:
        self._data, self._weights = data, weights

    def __len__(self) -> int:
        return len(self._data)

    def __getitem__(self, index: int) -> Any:
        inputs, target, *weights = self._data[index]
        label = torch.as_tensor(target)
        weight = self._weights.get(int(label.argmax() if label.numel() > 1 else label), 1.0)
        return inputs, target, torch.tensor(math.prod(map(float, weights), start=weight))


def _dataset(data: Any) -> Any:
    """A map-style data set; arrays become one."""
    if isinstance(data, tuple | list) and all(hasattr(part, "shape") for part in data):
        return TensorDataset(*(torch.as_tensor(part) for part in data))
    batches = isinstance(data, keras.utils.PyDataset)
    if batches or not (hasattr(data, "__getitem__") and hasattr(data, "__len__")):
        raise TypeError(
            f"job.fit() takes arrays, or a data set whose items are samples, not a"
            f" {type(data).__name__}; give (x, y), such as numpy.stack of all samples, or write"
            " your own loop: job.prepare and run.batches take iterables"
        )
    return data


_KERAS_EQUIVALENT: Final = {
    "accumulate": "use gradient_accumulation_steps of the optimizer",
    "clip_norm": "use global_clipnorm of the optimizer",
    "bf16": 'use keras.mixed_precision.set_global_policy("mixed_bfloat16")',
}
"""Settings of the step, which is Keras's own here, and Keras's words for them."""


def _check(context: RankContext, model: Any, callbacks: Sequence[Any]) -> None:
    """Refuse what would go wrong silently, or with an error that nobody understands."""
    name, kind = type(model).__name__, context.config.strategy
    if not isinstance(model, keras.Model):
        raise TypeError(f"job.fit() takes a keras.Model, not a {name}; torch models: job.prepare")
    if kind not in {"ddp", "keras", "keras_mesh"}:
        raise ValueError(f"strategy.kind: {kind}, but {name} is a Keras model; use keras")
    backend = strategies.keras_backend(kind) or "torch"
    if problem := keras_model.refuse(model, backend=backend):
        raise ValueError(problem)
    if model.compiled and model.steps_per_execution != 1:
        raise ValueError(
            f"{name} is compiled with steps_per_execution={model.steps_per_execution}, and"
            " job.fit() reports and stops between single steps; leave it out"
        )
    # A weak reference, so that the session does not keep the model in memory.
    if context.checkpointer and context.fitted is not None and context.fitted() is not model:
        raise ValueError(
            "job.fit() has trained another model in this session, and"
            f" {context.checkpoint_dir} holds one run; train the second in another job, or remove"
            " checkpoint.dir"
        )
    context.fitted = weakref.ref(model)
    if not model.compiled:
        raise ValueError(f"{name} is not compiled: call model.compile(optimizer=..., loss=...)")
    if any(isinstance(callback, keras.callbacks.BackupAndRestore) for callback in callbacks):
        raise ValueError("BackupAndRestore: job.fit() saves and resumes by itself; remove it")
    if kind == "keras_mesh":
        _check_divided(context, callbacks)
    else:
        _check_replicated(context, model)


def _check_divided(context: RankContext, callbacks: Sequence[Any]) -> None:
    if context.config.options.get("layout"):
        for callback in callbacks:
            for option in ("restore_best_weights", "histogram_freq"):
                if setting := getattr(callback, option, 0):
                    raise ValueError(
                        f"{type(callback).__name__}({option}={setting}): no rank has the whole"
                        " model; leave it out"
                    )
    if any(isinstance(callback, keras.callbacks.ModelCheckpoint) for callback in callbacks):
        raise ValueError(
            "ModelCheckpoint: no rank has the whole model; remove it, set checkpoint.dir (every"
            " epoch is saved), and write a file of Keras's own with job.save_model(model, path)"
        )


def _check_replicated(context: RankContext, model: Any) -> None:
    name = type(model).__name__
    for option, value in context.config.options.items():
        instead = _KERAS_EQUIVALENT.get(option, "remove it")
        raise ValueError(
            f"strategy.{option}: {value}, but job.fit() leaves the step to Keras; {instead}"
        )
    if model.jit_compile:
        raise ValueError(f"{name} is compiled with jit_compile=True; leave it out")
    # The mean of the ranks' sums is the sum divided by the number of ranks.
    if getattr(model.loss, "reduction", None) == "sum":
        raise ValueError(
            f'the loss of {name} has reduction="sum", and the ranks average gradients; use its'
            " default, the mean, and a larger learning rate"
        )


def _check_feed(feed: Feed) -> None:
    """Refuse batches that Keras could not compute on all ranks."""
    sampler = feed.sampler
    if sampler.leaves_out():
        raise ValueError(
            f'tail="{sampler.tail}" leaves some ranks without a sample in the last step, and Keras'
            ' computes no gradient of an empty batch: use tail="pad" or "drop"'
        )
    ranks = sampler.num_replicas
    if sampler.in_blocks and any(
        shard.count * ranks != shard.end - shard.start for shard in sampler.shards()
    ):
        below = sampler.global_batch // ranks * ranks
        raise ValueError(
            f"global_batch={sampler.global_batch} and tail={sampler.tail!r} leave batches that do"
            f" not divide by mesh axis data={ranks}; set global_batch to {below} or"
            f' {below + ranks}, and tail to "pad" or "drop"'
        )


_SUFFIX: Final = ".keras"


def save_model(context: RankContext, model: Any, path: Path) -> None:
    """See Job.save_model."""
    if context.config.strategy == "keras_mesh":  # elsewhere rank 0 has the whole model
        context.calls.check("job.save_model")
    if path.suffix != _SUFFIX:
        raise ValueError(f"{path}: Keras saves a whole model under a name that ends with {_SUFFIX}")
    if context.config.strategy == "keras_mesh":
        from k8sjob.runtime.keras.mesh import undivided  # needs keras.distribution

        with undivided(context, model) as copy:
            if copy is not None:
                _write(copy, path)
    elif context.is_main:
        _write(model, path)


def _write(model: Any, path: Path) -> None:
    """Write it whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with temporary_folder("keras", str(path.parent)) as folder:
        draft = folder / path.name
        model.save(draft)
        draft.replace(path)

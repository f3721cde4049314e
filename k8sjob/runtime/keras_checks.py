"""What `job.fit` refuses before it begins."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any, Final

import keras

from k8sjob import compat
from k8sjob.runtime import keras_model

if TYPE_CHECKING:
    from collections.abc import Sequence

    from k8sjob.runtime.feed import Feed
    from k8sjob.runtime.job import Job

__all__ = ["check", "check_feed"]

_INSTEAD: Final = {
    "accumulate": "gradient_accumulation_steps of the optimizer",
    "clip_norm": "global_clipnorm of the optimizer",
    "bf16": 'keras.mixed_precision.set_global_policy("mixed_bfloat16")',
}
"""Settings of the step, which is Keras's own here, and Keras's words for them."""


def check(job: Job, model: Any, callbacks: Sequence[Any]) -> None:
    """Refuse what would go wrong without a word, or with one that nobody understands.

    Args:
        job: the rank's view of its job.
        model: what is to be trained.
        callbacks: the user's.

    Raises:
        TypeError: it is no model of Keras.
        ValueError: it cannot be trained under the job's strategy.
    """
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
    if job.saves is not None and job.fitted is not None and job.fitted() is not model:
        raise ValueError(
            f"job.fit() has trained another model in this session, and {job.checkpoint_dir} holds"
            " one run; train the second in a job of its own, or leave checkpoint.dir out"
        )
    job.fitted = weakref.ref(model)
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


def check_feed(feed: Feed) -> None:
    """Refuse batches that Keras could not compute on all ranks.

    Raises:
        ValueError: there is such a batch.
    """
    sampler = feed.sampler
    if sampler.leaves_out():
        raise ValueError(
            f'tail="{sampler.tail}" leaves some ranks without a sample in the last step, and Keras'
            ' computes no gradient of nothing: use tail="pad" or "drop"'
        )
    ranks = sampler.num_replicas
    if sampler.in_blocks and any(
        share.count * ranks != share.end - share.start for share in sampler.shares()
    ):
        below = sampler.global_batch // ranks * ranks
        raise ValueError(
            f"global_batch={sampler.global_batch} and tail={sampler.tail!r} leave batches that do"
            f" not divide by mesh axis data={ranks}; set global_batch to {below} or"
            f' {below + ranks}, and tail to "pad" or "drop"'
        )

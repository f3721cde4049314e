"""Training runs: epochs, batches and steps of a loop, with saving and resuming between them."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, Final

import torch
from torch.nn.modules.batchnorm import _BatchNorm

from k8sjob import strategies
from k8sjob.contract import EventKind
from k8sjob.runtime import recipes
from k8sjob.runtime.checkpoint.store import FROM_SCRATCH
from k8sjob.runtime.comm import rng
from k8sjob.runtime.data import Feed, check_dataset, move
from k8sjob.runtime.evaluation import evaluate
from k8sjob.runtime.keras import model as keras_model
from k8sjob.runtime.progress import ProgressReporter
from k8sjob.runtime.rank_context import RankContext, Stopped
from k8sjob.runtime.strategies import strategy
from k8sjob.runtime.strategies.step import scale_gradients
from k8sjob.runtime.stream import StreamFeed, is_stream

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from torch import Tensor, nn

    from k8sjob.contract import RuntimeConfig
    from k8sjob.runtime.data import BatchShard, Tail

_KIND: Final = "k8sjob/run/1"
"""Tells a run's checkpoint, of this form, from others."""


class Run:
    """A model in training, as `job.prepare` returns it.

    Attributes:
        model: the bare model.
        optimizer: its optimizer.
        scheduler: the learning rate's schedule; None without one.
        epoch: the epoch that runs, counted from 0.
        steps: optimizer steps done since the very first start.
        state: the script's own dict of plain values and tensors, saved and resumed too.
    """

    def __init__(
        self,
        context: RankContext,
        build: Callable[[], nn.Module] | nn.Module,
        *,
        loss: Callable[..., Tensor],
        optimizer: Any,
        scheduler: Any,
        schedule_by: str,
    ) -> None:
        """See Job.prepare."""
        config = context.config
        if config.strategy == "keras_mesh":
            raise ValueError(
                "strategy.kind: keras_mesh leaves the step to Keras: compile the model and call"
                " job.fit, or use kind: keras, which divides only the data"
            )
        _check_first(context)
        model = build if isinstance(build, torch.nn.Module) else build()
        _check_model(model)
        count = sum(1 for _ in model.parameters())
        context.calls.check("job.prepare", f"{type(model).__name__} of {count} parameters")
        kind = _kind_for(model, config)
        row = strategies.STRATEGIES[kind]
        options = row.settings(config.options)
        if row.warning:
            context.reporter.warn(f"strategy.kind: {kind}: {row.warning}")
        prepared = strategy(kind, model, loss, context.group, options)
        self.model = prepared.model
        self.optimizer = recipes.make_optimizer(optimizer, prepared.model)
        if prepared.parts is None and config.checkpoint_format == "sharded":
            raise ValueError(
                f"checkpoint.format: sharded, but under strategy.kind: {kind} no rank has some of"
                " the state; leave checkpoint.format at auto"
            )
        prepared.ready(self.optimizer)
        self.scheduler = recipes.make_scheduler(scheduler, self.optimizer, schedule_by)
        # From here on ranks differ: each part of the data has its own dropout masks.
        rng.seed_all(context.seed, prepared.rng_stream)
        self._context, self._strategy, self._loss = context, prepared, loss
        self._schedule_by, self._numbers = schedule_by, dict[str, float]()
        self._by_samples = kind == "parameter_server" or "micro_batches" in options
        self._accumulate, self._largest_norm = options["accumulate"], options.get("clip_norm")
        self.epoch, self.steps, self.state = 0, 0, dict[str, Any]()
        self._progress = ProgressReporter(context.group, context.reporter, context.waiting)
        self._epochs: int | None = None
        self._feed: Feed | None = None
        self._position: dict[str, Any] = {"epoch": 0, "offset": 0}
        self._shard: BatchShard | None = None
        self._weights: list[float | None] = []  # of the batches of this step
        self._warns, self._stream_steps = context.group.world_size > 1, 0
        self._begun = False
        self._saved_at: tuple[int, int] | None = None
        context.unfinished = True

    @property
    def loss(self) -> float:
        """Mean training loss of the epoch over all ranks, as last reported; nan before.

        Reports come about once a second and with the epoch's last step, so after the batches it is
        the whole epoch's. Costs nothing, and any rank may ask.
        """
        return self._progress.loss

    # --- the loop -------------------------------------------------------------------------------

    def epochs(self, count: int) -> Iterator[int]:
        """The epochs that are left of `count`: resumes, saves, and ends early when asked to stop.

        Args:
            count: epochs in all, also those of earlier starts.

        Yields:
            The epoch's number, counted from 0.

        Raises:
            Stopped: all ranks were asked to stop, and the run is saved.
            RuntimeError: the loop ended without one optimizer step, in this start or an earlier.
        """
        if self._epochs is not None:
            raise RuntimeError("run.epochs() was called before: a run has one loop")
        if count < 1:
            raise ValueError(f"epochs({count}): there must be at least one epoch")
        self._context.calls.check("run.epochs", str(count))
        self._epochs = count
        self._context.begin()
        self._resume()
        if self._position["epoch"] >= count:
            self._context.reporter.warn(
                f"all {count} epochs were done before: nothing is left to train; raise the number, "
                f"or {FROM_SCRATCH}"
            )
        try:
            for epoch in range(self._position["epoch"], count):
                # A stop between two epochs is saved at the beginning of the later one.
                self.epoch, self._begun = epoch, False
                self._point()
                yield epoch
                self._end_epoch()
            if not self.steps:
                raise RuntimeError(
                    f"run.epochs({count}) ended without one optimizer step: nothing was trained; "
                    "give each batch of run.batches(...) to run.step(...)"
                )
            self._save()
            self._context.end()
        finally:
            self._context.unfinished = False
            self._context.pause()  # a save is not waited for: of a rank that is lost nothing comes

    def batches(
        self,
        dataset: Any,
        *,
        batch_size: int | None = None,
        global_batch: int | None = None,
        shuffle: bool = True,
        tail: Tail = "pad",
        drop_last: bool = False,
        sampler: Any = None,
        sharded: bool = False,
        **loader_options: Any,
    ) -> Iterator[Any]:
        """This rank's batches of the epoch, on its device; once in each epoch.

        Args:
            dataset: a map-style data set, the same on all ranks; or an iterable of samples, of
                which each rank takes its part; or, without a size, an iterable of batches.
            batch_size: samples of one process in one batch; or
            global_batch: samples of all processes in one batch.
            shuffle: a new order each epoch.
            tail: what happens to samples that do not divide: see data.ShardSampler; those of an
                iterable are never repeated.
            drop_last: tail="drop", in DataLoader's words.
            sampler: draws the indices of an epoch, those of all ranks.
            sharded: an iterable has only this rank's samples, and may end before the others'.
            loader_options: for DataLoader: num_workers, collate_fn, pin_memory, ...

        Yields:
            What the loader makes of a batch, tensors moved to the device.
        """
        if self._epochs is None:
            raise RuntimeError("run.batches() belongs inside `for epoch in run.epochs(...)`")
        if self._begun:
            raise RuntimeError(
                f"run.batches() was called before in epoch {self.epoch}: call it once per epoch;"
                " join the data sets (torch.utils.data.ConcatDataset), or write your own loop"
            )
        self._begun = True
        sizes = {"batch_size": batch_size, "global_batch": global_batch}
        tail = "drop" if drop_last else tail
        if is_stream(dataset):
            if sampler is not None or "batch_sampler" in loader_options:
                raise TypeError("a sampler draws indices, which an iterable has not: leave it out")
            settings = {"sharded": sharded, "drops": tail == "drop"}
            batches = self._from_stream(dataset, sizes | loader_options, **settings)
        else:
            options = {"shuffle": shuffle, "tail": tail, "sampler": sampler}
            options |= {"max_ranks": self._context.max_ranks, "loader_options": loader_options}
            batches = self._from_feed(self._feed_for(dataset, **sizes, **options))
        for self._shard, batch in batches:
            self._context.beat(self.steps)
            yield move(batch, self._context.device)
            # step() has taken the shard, unless the loop left it out.
            if self._shard is not None:
                raise RuntimeError(
                    "a batch was not given to run.step(): call it once for each batch, on every "
                    "rank, or the ranks wait for each other forever"
                )

    def _from_feed(self, feed: Feed) -> Iterator[tuple[BatchShard, Any]]:
        sampler = feed.sampler
        shown = f"{sampler.samples} samples, {sampler.global_batch} in a batch of all ranks"
        self._context.calls.check("run.batches", shown)
        shards = self._begin_epoch(feed)
        batches = iter(feed.loader(shards))
        opening = True
        for shard in shards:
            if opening:
                self._between_steps()
            opening = shard.closes
            yield shard, next(batches)

    def _from_stream(
        self, source: Any, options: dict[str, Any], *, sharded: bool, drops: bool
    ) -> Iterator[tuple[BatchShard, Any]]:
        seed = self._context.seed + self.epoch
        options = {"pin_memory": self._context.device.type == "cuda", **options}
        if hasattr(source, "set_epoch"):
            source.set_epoch(self.epoch)
        mesh = self._strategy.mesh
        feed = StreamFeed(source, mesh, options, sharded=sharded, drops=drops, seed=seed)
        self._context.calls.check("run.batches", f"batches of {feed.form}")
        if self._position["offset"] and self._position.get("form") != feed.form:
            self._restart_epoch("saved within an epoch of other data, or of other batches")
        self._position |= {"samples": 0, "seed": self._context.seed, "form": feed.form}
        offset = self._position["offset"]
        self._begin_progress(self._stream_steps, -(-offset // self._accumulate))
        # A stream has no length: the batches of a step are known only once all ranks have reported.
        for window in feed.windows(offset, self._accumulate):
            if not all(shard.count for shard, _ in window):
                self._check_norms('use tail="drop"')
            self._between_steps()
            yield from window
        self._stream_steps = self._progress.finish()

    def step(self, inputs: Any, *targets: Any, weight: float | Tensor | None = None) -> Tensor:
        """Train on one batch: forward, backward, and the optimizer when its window is full.

        Args:
            inputs: what the model takes: a tensor, a tuple of arguments or a dict of them.
            targets: what the loss takes after the model's output.
            weight: over how much the loss is a mean, such as the batch's tokens that count; None:
                over its samples. The batches of a step, on all ranks, are weighted by this.

        Returns:
            This rank's mean loss over the batch, detached, on its device.
        """
        shard = self._shard
        if shard is None:
            raise RuntimeError(
                "run.step() belongs inside run.batches(), once for each batch; batches made on the"
                " fly come from a generator: run.batches(my_batches(), sharded=True)"
            )
        if weight is None:
            self._context.calls.note("run.step")
        else:  # the ranks add their weights up, and one that has none would not come to that
            self._context.calls.check_often("run.step", "weight=")
        units = None if weight is None else float(weight) if shard.count else 0.0
        self._weigh(units, targets)
        scale = shard.scale if units is None else units
        loss = self._strategy.backward(inputs, targets, scale=scale, sync=shard.closes)
        self._shard = None
        if self._strategy.counts:
            self._progress.add(loss, shard.count, units)
        if shard.closes:
            if self._weights[0] is not None:
                mesh, own_weight = self._strategy.mesh, sum(filter(None, self._weights))
                # Filled in there: a tensor that is copied to the GPU would wait for it.
                device, kind = self._context.device, torch.float64
                weight_of_all = self._context.group.all_reduce(
                    torch.full((), own_weight, dtype=kind, device=device)
                )
                # Every rank of a copy of the model has the same weight, which is to count once.
                factor = mesh.data_size * mesh.model_size / weight_of_all
                scale_gradients(self.optimizer, factor.where(weight_of_all > 0, 0.0))
            self._weights.clear()
            # The norm costs a pass over all gradients, so it is taken only where it is used.
            norm = None
            if self._largest_norm is not None or self._progress.due:
                norm = self._strategy.clip(self.optimizer, self._largest_norm)
            self.optimizer.step()
            self.optimizer.zero_grad()
            if self.scheduler is not None and self._schedule_by == "step":
                self.scheduler.step()
            self.steps += 1
            # Only whole steps count: a window that was cut off is repeated after a resume.
            self._position["offset"] = shard.end
            self._progress.step(norm)
        return loss

    def _weigh(self, weight: float | None, targets: tuple[Any, ...]) -> None:
        """Keep the weight of a batch; warn once where one is missing."""
        self._weights.append(weight)
        if weight is not None and self._by_samples:
            raise ValueError("run.step(weight=) is not for this strategy.kind; use another")
        if (weight is None) != (self._weights[0] is None):
            raise ValueError("run.step(weight=) must be given for all batches of a step, or none")
        looks = self._warns and weight is None and (not self.steps or self._progress.due)
        if looks and (remark := recipes.loss_remark(self._loss, targets)):
            self._warns = False
            self._context.reporter.warn(f"a step depends on the number of ranks: the loss {remark}")

    def evaluate(
        self,
        dataset: Any,
        *,
        batch_size: int = 256,
        metrics: Mapping[str, Callable[..., Tensor]] | None = None,
        prefix: str = "eval_",
        **loader_options: Any,
    ) -> dict[str, float]:
        """Loss and metrics over a data set, each sample counted exactly once over all ranks.

        Args:
            dataset: a map-style data set, the same on all ranks.
            batch_size: samples of one process in one batch; it does not change the result.
            metrics: name -> f(output, *targets), either one value for each sample or their mean.
                None: the accuracy, where the output is (N, classes) and the target N integers.
            prefix: before each name in the result.
            loader_options: for DataLoader.

        Returns:
            `{prefix}loss` and the metrics, the same numbers on all ranks.
        """
        check_dataset(dataset)
        shown = f"{len(dataset)} samples, batch_size={batch_size}"
        self._context.calls.check("run.evaluate", shown)
        self._strategy.settle()
        results = evaluate(
            self._strategy,
            self._loss,
            dataset,
            batch_size=batch_size,
            metrics=metrics,
            between=self._point,
            **loader_options,
        )
        numbers = {f"{prefix}{name}": value for name, value in results.items()}
        self._numbers |= {**numbers, "epoch": results["loss"]}
        return numbers

    # --- between the steps ----------------------------------------------------------------------

    def _feed_for(self, dataset: Any, **settings: Any) -> Feed:
        """The same feed in every epoch, so that a loader can keep its workers."""
        if self._feed is None or not self._feed.serves(dataset, settings):
            self._feed = Feed(
                dataset,
                settings,
                rank=self._strategy.mesh.data_rank,
                world_size=self._strategy.mesh.data_size,
                accumulate=self._accumulate,
                seed=self._context.seed,
                on_gpu=self._context.device.type == "cuda",
            )
        return self._feed

    def _begin_epoch(self, feed: Feed) -> list[BatchShard]:
        sampler = feed.sampler
        try:
            # The run's position counts, which may be that of a checkpoint.
            sampler.load_state_dict({**sampler.state_dict(), **self._position, "epoch": self.epoch})
        except ValueError as error:
            self._restart_epoch(str(error))
            sampler.load_state_dict({**sampler.state_dict(), **self._position})
        self._position |= {"samples": sampler.samples, "seed": sampler.seed}
        steps = sampler.steps(0)
        self._begin_progress(steps, steps - sampler.steps())
        shards = list(sampler.shards())
        if sampler.leaves_out():
            self._check_norms(f'use tail="pad" or "drop" in place of "{sampler.tail}"')
        return shards

    def _check_norms(self, remedy: str) -> None:
        """Refuse batch normalization on ranks that have no sample in a step."""
        if any(isinstance(module, _BatchNorm) for module in self.model.modules()):
            raise ValueError(
                "some ranks have no sample in a step, and the model has batch normalization, which"
                f" needs one: {remedy}"
            )

    def _restart_epoch(self, reason: str) -> None:
        self._context.reporter.warn(f"{reason}; epoch {self.epoch} starts again")
        self._position = {"epoch": self.epoch, "offset": 0}

    def _begin_progress(self, steps: int, done: int) -> None:
        loss, count = self._position.pop("loss", 0.0), self._position.pop("count", 0.0)
        self._progress.begin(self.epoch, self._epochs or 1, steps, done, loss=loss, count=count)
        # An evaluation of the script's own may have left the model in eval mode.
        if not self.model.training:
            self.model.train()

    def _between_steps(self) -> None:
        """The point between two steps, where a checkpoint may be saved."""
        every = self._context.config.checkpoint_every
        if isinstance(every, int) and self.steps and self.steps % every == 0:
            self._save()
        self._point()

    def _end_epoch(self) -> None:
        numbers = {"epoch": self.loss, "loss": self.loss, **self._numbers}
        recipes.end_epoch(self.scheduler, self._schedule_by, numbers)
        self._numbers = {}
        self._position = {"epoch": self.epoch + 1, "offset": 0}
        if self._context.config.checkpoint_every == "epoch":
            self._save()

    def _point(self) -> None:
        """A point that all ranks pass equally often: where they may stop together."""
        self._context.beat(self.steps)
        if self._context.stop_coordinator.passes():
            return
        reason = self._context.stop_coordinator.reason
        self._context.reporter.emit(
            EventKind.STOPPING, signal=reason, epoch=self._position["epoch"], step=self.steps
        )
        self._save()
        raise Stopped(reason)

    # --- saving and resuming --------------------------------------------------------------------

    def _save(self) -> None:
        """Begin a checkpoint unless this very point is saved; all ranks take part."""
        point = (self.steps, self._position["epoch"])
        if self._context.checkpointer is None or point == self._saved_at:
            return
        self._saved_at = point
        # The sums of the epoch so far are saved with the position: they must not miss steps.
        self._progress.settle()
        position = dict(self._position)
        if position["offset"]:
            position["loss"], position["count"] = self._progress.sums
        state = {
            "position": position,
            "scheduler": None if self.scheduler is None else self.scheduler.state_dict(),
            "state": self.state,
        }
        strategy = self._strategy
        self._context.checkpointer.save(
            _KIND,
            self.steps,
            state,
            whole=partial(strategy.capture, self.optimizer),
            parts=partial(strategy.parts, self.optimizer) if strategy.parts else None,
            sharded=strategy.sharded,
            describes=strategy.mesh.data_rank == 0,
            rng_stream=strategy.rng_stream,
            epoch=position["epoch"],
        )

    def _resume(self) -> None:
        checkpointer = self._context.checkpointer
        saved = checkpointer.newest(_KIND) if checkpointer else None
        if checkpointer is None or saved is None:
            return
        state = saved.state
        try:
            self._strategy.restore(self.optimizer, state)
            if self.scheduler is not None and state["scheduler"] is not None:
                self.scheduler.load_state_dict(state["scheduler"])
        except (RuntimeError, ValueError, KeyError) as error:
            raise ValueError(
                f"{saved.path} does not fit this model and optimizer: resume with the code that "
                f"saved it, or {FROM_SCRATCH}; {error}"
            ) from error
        self._position, self.steps, self.state = state["position"], saved.step, state["state"]
        self._saved_at = (self.steps, self._position["epoch"])
        self._context.reporter.emit(
            EventKind.RESUMED, path=saved.path, epoch=self._position["epoch"], step=self.steps
        )
        # Last, as all of the above may draw random numbers.
        checkpointer.restore_random(saved, self._strategy.rng_stream)


def _check_first(context: RankContext) -> None:
    """Refuse a run that would take turns with the one before, or resume from its checkpoints."""
    if context.unfinished or (context.checkpointer and context.unfinished is not None):
        raise ValueError(
            "job.prepare() was called before: another run begins after the epochs of that one, and"
            " without checkpoint.dir, which holds one run; for models that train together, as of a"
            f" GAN, {recipes.OWN_LOOP}"
        )


def _check_model(model: Any) -> None:
    if problem := keras_model.refuse(model):
        raise ValueError(problem)
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"build() returned a {type(model).__name__}, not a torch.nn.Module")
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ValueError(
            f"{type(model).__name__} has no parameters to train: check that its layers are "
            "attributes of the module (lists need nn.ModuleList) and require gradients"
        )


def _kind_for(model: nn.Module, config: RuntimeConfig) -> str:
    """The job's strategy; a Keras model is trained as one under ddp too."""
    kind, name = config.strategy, type(model).__name__
    if not keras_model.is_keras(model):
        if kind == "keras":
            raise ValueError(f"strategy.kind: keras, but {name} is not a Keras model; use ddp")
        return kind
    if kind not in {"ddp", "keras"}:
        raise ValueError(f"strategy.kind: {kind}, but {name} is a Keras model; use keras")
    alien = config.options.keys() - strategies.STRATEGIES["keras"].options.keys()
    if alien:
        raise ValueError(f"strategy.{min(alien)}: not for a Keras model ({name}); leave it out")
    return "keras"

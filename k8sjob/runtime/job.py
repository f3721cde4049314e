"""`Job`: what a training script can ask of its rank, and do with the other ranks."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from k8sjob.runtime.data import ShardSampler, Tail
from k8sjob.runtime.rank_context import mapped_path
from k8sjob.runtime.training_run import Run

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
    from pathlib import Path

    from torch import Tensor, nn
    from torch.optim import Optimizer

    from k8sjob.runtime.comm.process_group import Reduction
    from k8sjob.runtime.rank_context import RankContext


class Job:
    """This process's place in the job, and what it can do together with the other ranks.

    Attributes:
        rank: 0 to world_size - 1, over all nodes.
        world_size: number of processes of the job.
        local_rank: 0 to the number of this node's processes - 1.
        device: where to put the model: this process's GPU, or the CPU.
        is_main: whether this is rank 0, the one that writes files.
        seed: the session's seed.
        checkpoint_dir: where checkpoints go, on this machine; None if they are off.
        config: the job's settings as the container sees them.
    """

    def __init__(self, context: RankContext) -> None:
        self._context, self._group, group = context, context.group, context.group
        self._calls, self._checkpointer = context.calls, context.checkpointer
        self.rank, self.world_size = group.rank, group.world_size
        self.local_rank = context.env.local_rank
        self.device, self.is_main, self.seed = group.device, context.is_main, context.seed
        self.checkpoint_dir, self.config = context.checkpoint_dir, context.config
        self._in_main_first = False

    # --- training -------------------------------------------------------------------------------

    def prepare(
        self,
        build: Callable[[], nn.Module] | nn.Module,
        *,
        loss: Callable[..., Tensor],
        optimizer: tuple[Callable[..., Optimizer], Mapping[str, Any]]
        | Callable[[Any], Optimizer]
        | Optimizer,
        scheduler: tuple[Callable[..., Any], Mapping[str, Any]]
        | Callable[[Optimizer], Any]
        | None = None,
        schedule_by: str = "epoch",
    ) -> Run:
        """A training run under the job's strategy.

        Args:
            build: a class or function that makes the model; called with the same random numbers on
                all ranks. A finished module will do.
            loss: loss(output, *targets) -> the mean over the batch, a scalar.
            optimizer: (class, arguments), or a function of the parameters; for a Keras model also
                one of Keras's. A finished one will do where the model is finished too, and the
                strategy keeps its parameters (ddp).
            scheduler: (class, arguments), or a function of the optimizer; or a finished one.
            schedule_by: when the scheduler steps, "epoch" or "step". ReduceLROnPlateau judges an
                epoch by the loss of its last run.evaluate(), or else by run.loss; or by the number
                of this name, as "eval_accuracy".

        Raises:
            ValueError: the model has nothing to train.
        """
        return Run(
            self._context,
            build,
            loss=loss,
            optimizer=optimizer,
            scheduler=scheduler,
            schedule_by=schedule_by,
        )

    def fit(
        self,
        model: Any,
        train: Any,
        *,
        epochs: int,
        batch_size: int | None = None,
        global_batch: int | None = None,
        validation: Any = None,
        callbacks: Sequence[Any] = (),
        shuffle: bool = True,
        tail: Tail = "pad",
        class_weight: Mapping[int, float] | None = None,
        validation_split: float = 0.0,
        **loader_options: Any,
    ) -> Any:
        """`model.fit` of Keras on all ranks, as one process would do it with the global batch.

        Resumes from the last whole epoch, and saves each one.

        Args:
            model: a compiled Keras model; on the torch backend, or under keras_mesh on that which
                the job.yaml says, and then made inside of the session.
            train: a map-style data set of (inputs, targets) or (inputs, targets, weights), or a
                tuple of such arrays; the same on all ranks.
            epochs: in all, also those of earlier starts.
            batch_size: samples of one process in one batch; or
            global_batch: samples of all processes in one batch.
            validation: the same as `train`, to evaluate with after each epoch.
            callbacks: of Keras. Keras's own callbacks that write run only on rank 0, all others on
                every rank, where they see the same numbers.
            shuffle: a new order each epoch.
            tail: what happens to samples that do not divide: "pad" or "drop", see ShardSampler.
            class_weight: class -> weight of its samples; of targets that are class numbers.
            validation_split: this part of `train`, at its end, is for the validation.
            loader_options: for DataLoader: num_workers, collate_fn, ...

        Returns:
            Keras's History of all epochs, also of earlier starts, the same on all ranks.

        Raises:
            ValueError: the model or the job's settings cannot be trained this way.
            Stopped: all ranks were asked to stop.
        """
        from k8sjob.runtime.keras.model_fit import fit  # imports keras

        self._calls.check("job.fit", f"epochs={epochs}")
        settings = {"batch_size": batch_size, "global_batch": global_batch, "shuffle": shuffle}
        return fit(
            self._context,
            model,
            train,
            settings | {"tail": tail, "loader_options": loader_options},
            epochs=epochs,
            validation=validation,
            callbacks=callbacks,
            class_weight=class_weight,
            validation_split=validation_split,
        )

    def predict(self, model: Any, data: Any, *, batch_size: int = 256) -> Any:
        """`model.predict` of Keras over all ranks, each sample once; all ranks call it.

        Args:
            model: what job.fit trained; not under keras_mesh, where no rank has all of it.
            data: an array of the inputs, or a list or dict of arrays, the same on all ranks.
            batch_size: samples of one process in one batch; it does not change the result.

        Returns:
            What model.predict returns for all samples, in their order, on every rank.
        """
        from k8sjob.runtime.keras.model_fit import predict  # imports keras

        return predict(self._context, model, data, batch_size)

    def save_model(self, model: Any, path: str | os.PathLike[str]) -> None:
        """Write a Keras model as `model.save` does, put together from all ranks; rank 0 writes it.

        All ranks call it. Of a model that is divided (strategy.kind: keras_mesh) the optimizer's
        state stays behind: checkpoint.dir has it.

        Args:
            model: what job.fit or job.prepare trained.
            path: of the file on rank 0, a path of the job.yaml (see job.path); it ends with .keras.

        Raises:
            ValueError: the file is of another kind.
            OSError: it cannot be written; one that was there before is as it was.
        """
        from k8sjob.runtime.keras.model_fit import save_model  # imports keras

        save_model(self._context, model, self.path(path))

    def sampler(
        self,
        dataset: Sized,
        *,
        batch_size: int | None = None,
        global_batch: int | None = None,
        shuffle: bool = True,
        tail: Tail = "pad",
    ) -> ShardSampler:
        """This rank's sampler, for a loop written by hand: see ShardSampler."""
        return ShardSampler(
            dataset,
            rank=self.rank,
            world_size=self.world_size,
            batch_size=batch_size,
            global_batch=global_batch,
            shuffle=shuffle,
            seed=self.seed,
            tail=tail,
            max_ranks=self._context.max_ranks,
        )

    # --- together with the other ranks ----------------------------------------------------------

    def log(self, **values: Any) -> None:
        """Report numbers of this moment, as `epoch=3, accuracy=0.9`; rank 0's are shown."""
        self._context.log(**values)

    def reduce(self, **pairs: tuple[float | Tensor, float | Tensor]) -> dict[str, float]:
        """Means over all ranks: each name's (sum, count), added up in float64 and divided.

        Returns:
            name -> sum / count, the same on all ranks; nan where the count is 0.
        """
        # One message for all names, in the order of the call, which the check compares.
        flat = [float(number) for pair in pairs.values() for number in pair]
        self._calls.check_often("job.reduce", ", ".join(pairs))
        total = self._group.sums(flat)
        return {
            name: total[2 * at] / total[2 * at + 1] if total[2 * at + 1] else float("nan")
            for at, name in enumerate(pairs)
        }

    def all_reduce(self, tensor: Tensor, op: Reduction = "sum") -> Tensor:
        """The sum, maximum or minimum over the ranks, element by element; a new tensor."""
        self._calls.check_often("job.all_reduce", f"{op} of {_of(tensor)}")
        return self._group.all_reduce(tensor, op)

    def gather(self, tensor: Tensor, to: int | None = None) -> list[Tensor]:
        """The tensors of all ranks, by rank; the first dimension may differ.

        Args:
            tensor: of the same type on all ranks.
            to: the rank that gets them, the list of the others is empty; None: every rank, which
                elsewhere is called all_gather.
        """
        self._calls.check_often("job.gather", f"{_of(tensor, rows=False)}, to={to}")
        return self._group.gather(tensor, to)

    def broadcast(self, tensor: Tensor, source: int = 0) -> Tensor:
        """One rank's tensor on all ranks; a new tensor."""
        self._calls.check_often("job.broadcast", f"{_of(tensor)}, source={source}")
        return self._group.broadcast(tensor, source)

    def barrier(self) -> None:
        """Wait until all ranks are here."""
        self._calls.check_often("job.barrier")
        self._group.barrier()

    @contextmanager
    def main_first(self) -> Iterator[None]:
        """Rank 0 does the block, the others when it is done: for a download to a shared volume."""
        if self._in_main_first:  # rank 0 has done this one as well when the others come to it
            yield
            return
        call = self._calls.note("job.main_first")
        # The others wait before the block, rank 0 after it: both are one call.
        if not self.is_main:
            self._calls.wait(call)
        self._in_main_first = True
        try:
            yield
        finally:
            self._in_main_first = False
        if self.is_main:
            self._calls.wait(call)

    # --- files ----------------------------------------------------------------------------------

    def path(self, mount: str | os.PathLike[str]) -> Path:
        """The real path of a path in the job.yaml: the same in a pod, a folder under `k8sjob run`.

        Args:
            mount: the mount path of a volume, checkpoint.dir, or a path below one of them.
        """
        return mapped_path(mount)

    def save(self, step: int, state: dict[str, Any]) -> None:
        """Save the state of a loop written by hand; all ranks call it.

        The state is copied before this returns, and written while the loop continues. Rank 0's
        state is written, and distributed tensors (of FSDP2 or tensor parallelism) are written
        whole: each rank writes its part where all ranks see the folder.

        Args:
            step: what "newest" goes by.
            state: dicts, lists and tuples of tensors and plain values: state_dict()s, numbers.

        Raises:
            ValueError: there is no checkpoint.dir, or the ranks' tensors make up no whole ones.
            TypeError: something in it could not be loaded again without running code.
            OSError: the ranks' parts cannot be saved there. A file that cannot be written later
                is only a warning.
        """
        if self._checkpointer is None:
            raise ValueError("job.save() needs checkpoint.dir; set it")
        self._calls.check("job.save", f"step={step}")
        self._checkpointer.save_state(step, state)

    def load(self, like: dict[str, Any] | None = None) -> dict[str, Any] | None:
        """The newest state that save() wrote, on all ranks, which all call it; None: there is none.

        Args:
            like: a state as save() takes it. Saved tensors are divided as the distributed tensors
                at the same place in it, and a rank reads only its part; all others are whole, and
                on the CPU.
        """
        if self._checkpointer is None:
            return None
        self._calls.check("job.load")
        return self._checkpointer.load_state(like)

    def should_stop(self) -> bool:
        """Whether to save and leave now: the same answer on all ranks, for a loop written by hand.

        Call it equally often on all ranks, once a step. After True, save and call
        `raise SystemExit(143)`.
        """
        context = self._context
        context.begin()
        # A loop written by hand has no other moment at which a step is counted.
        context.beat(context.step + 1)
        return not context.stop_coordinator.passes()

    def beat(self, step: int, phase: str = "compute") -> None:
        """Report progress to the watchdog during a long part of the script's own code.

        Args:
            step: the same number on all ranks for the same step.
            phase: "sync" before waiting for the others, else anything.
        """
        self._context.beat(step, phase)


def _of(tensor: Tensor, *, rows: bool = True) -> str:
    """A tensor's type and shape; without `rows` the length of its first dimension is left open."""
    sizes = [str(size) for size in tensor.shape]
    shape = ", ".join(sizes if rows else ["*", *sizes[1:]][: len(sizes)])
    return f"{str(tensor.dtype).removeprefix('torch.')}[{shape}]"

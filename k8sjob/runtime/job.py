"""A rank's view of its job: who it is, what it trains, and what it does with the others."""

from __future__ import annotations

from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

import torch

from k8sjob import compat
from k8sjob.contract import EventKind
from k8sjob.runtime import config as settings
from k8sjob.runtime import keras_model, keras_optimizer, own_state, rng
from k8sjob.runtime.call_order import LEAVING, CallOrder, CallOrderError
from k8sjob.runtime.checkpoint import Checkpoints
from k8sjob.runtime.data import ShardSampler, Tail
from k8sjob.runtime.env import is_elastic, max_ranks
from k8sjob.runtime.errors import PeerLost, first_line, lateness, peer_loss
from k8sjob.runtime.health import Computing, Waiting
from k8sjob.runtime.saves import Saves
from k8sjob.runtime.strategies import strategy
from k8sjob.runtime.training import Run
from k8sjob.runtime.watchdog import Hung, Watchdog

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Iterator, Mapping, Sequence, Sized

    from torch import Tensor, nn
    from torch.optim import Optimizer

    from k8sjob.contract import RuntimeConfig
    from k8sjob.runtime.env import DistEnv
    from k8sjob.runtime.process_group import Group, Reduction
    from k8sjob.runtime.report import Reporter
    from k8sjob.runtime.stop import StopCoordinator

__all__ = ["Job"]

_LAST_SAVE_S: Final = 3.0
"""Seconds in which nothing more is written of a checkpoint before a rank that fails leaves it."""


class Job:
    """This process's place in the job, and what it can do together with the other ranks.

    Attributes:
        rank: 0 to world_size - 1, over all nodes.
        world_size: number of processes of the job.
        local_rank: 0 to the number of this node's processes - 1.
        device: where to put the model: this process's GPU, or the CPU.
        is_main: whether this is rank 0, the one that writes files.
        seed: the session's seed.
        config: the job's settings.
        checkpoint_dir: where checkpoints go, on this machine; None where they are off.
        group: the ranks' collectives.
        reporter: rank 0's voice.
        stop_coordinator: how the ranks stop together.
        saves: the job's checkpoints; None where they are off.
        calls: the order of the ranks' collective calls.
        waiting: how long this rank was with the others.
        training: whether training has begun.
        reached: the last numbers given to log().
        most_ranks: the most ranks that an elastic job may come to have; 0 for others.
        fitted: the model that fit() trains, as a weak reference.
    """

    def __init__(
        self,
        env: DistEnv,
        config: RuntimeConfig,
        group: Group,
        *,
        stop_coordinator: StopCoordinator,
        reporter: Reporter,
        seed: int,
    ) -> None:
        self.rank, self.world_size, self.local_rank = group.rank, group.world_size, env.local_rank
        self.device, self.is_main, self.seed = group.device, group.rank == 0, seed
        self.config, self.group, self.reporter = config, group, reporter
        folder = config.checkpoint_dir
        self.checkpoint_dir = None if folder is None else self.path(folder)
        self.stop_coordinator = stop_coordinator
        # The host of a GPU only queues what is computed: whatever it waits for is the others'.
        self.waiting = Waiting() if self.device.type == "cuda" else Waiting(Computing())
        self.training = False
        self.reached: dict[str, Any] = {}
        self.fitted: Callable[[], Any] | None = None
        self.most_ranks = max_ranks(env.local_world_size)
        self._env, self._step = env, 0
        self._in_main_first = False
        self.saves = None
        if self.checkpoint_dir is not None:
            checkpoints = Checkpoints(self.checkpoint_dir, config.checkpoint_keep)
            self.saves = Saves(
                checkpoints,
                group,
                reporter,
                form=config.checkpoint_format,
                must_share=is_elastic(),
                beat=lambda: self.beat(self._step, "checkpoint"),
            )
        first = env.world_size - self.world_size
        self.calls = CallOrder(group, first, config.collective_timeout, stop_coordinator.alert)
        met = group.rendezvous if group.world_size > 1 else None
        self._watchdog = Watchdog(
            met.again() if met else None,
            env,
            ranks=range(first, env.world_size),
            timeout=config.hang_timeout,
            patience=config.collective_timeout,
            agent_file=settings.heartbeat_file(),
            error_file=settings.error_file(),
            publish=self.calls.publish,
        )
        group.on_phase = lambda phase: self.beat(self._step, phase)

    # --- training -------------------------------------------------------------------------------

    def prepare(
        self,
        build: Callable[[], nn.Module] | nn.Module,
        *,
        loss: Callable[..., Tensor],
        optimizer: tuple[Callable[..., Optimizer], Mapping[str, Any]] | Callable[[Any], Optimizer],
        scheduler: tuple[Callable[..., Any], Mapping[str, Any]]
        | Callable[[Optimizer], Any]
        | None = None,
        schedule_by: Literal["epoch", "step"] = "epoch",
    ) -> Run:
        """A training run under the job's strategy.

        Args:
            build: a class or function that makes the model; called with the same random numbers on
                all ranks. A finished module will do.
            loss: loss(output, *targets) -> the mean over the batch, a scalar.
            optimizer: (class, arguments), or a function of the parameters; for a Keras model also
                one of Keras's.
            scheduler: (class, arguments), or a function of the optimizer.
            schedule_by: when the scheduler steps.

        Raises:
            ValueError: the model has nothing to train.
        """
        if self.config.strategy == "keras_mesh":
            raise ValueError(
                "strategy.kind: keras_mesh leaves the step to Keras: compile the model and call"
                " job.fit, or take kind: keras, which divides the data alone"
            )
        model = build if isinstance(build, torch.nn.Module) else build()
        if problem := keras_model.refuse(model):
            raise ValueError(problem)
        if not isinstance(model, torch.nn.Module):
            raise TypeError(f"build() gave a {type(model).__name__}, not a torch.nn.Module")
        if not any(parameter.requires_grad for parameter in model.parameters()):
            raise ValueError(
                f"{type(model).__name__} has no parameters to train: check that its layers are "
                "attributes of the module (lists need nn.ModuleList) and require gradients"
            )
        self.calls.check("job.prepare", _in_words(model))
        kind = self._kind_for(model)
        options = compat.STRATEGIES[kind].settings(self.config.options)
        if warning := compat.STRATEGIES[kind].warning:
            self.reporter.warn(f"strategy.kind: {kind}: {warning}")
        prepared = strategy(kind, model, loss, self.group, options)
        parameters = prepared.model.parameters()
        made = keras_optimizer.adopt(optimizer, model) or _made(optimizer, parameters)
        if scheduler is not None and isinstance(made, keras_optimizer.KerasOptimizer):
            raise ValueError(
                "scheduler: an optimizer of Keras has its own; give it learning_rate="
                "keras.optimizers.schedules...., or use one of torch.optim"
            )
        if prepared.parts is None and self.config.checkpoint_format == "sharded":
            raise ValueError(
                f"checkpoint.format: sharded, but under strategy.kind: {kind} no rank has some of"
                " the state; leave checkpoint.format at auto"
            )
        prepared.ready(made)
        schedule = None if scheduler is None else _made(scheduler, made)
        # From here on ranks differ: each share of the data has its own dropout masks.
        rng.seed_all(self.seed, prepared.stream)
        return Run(
            self,
            prepared,
            loss,
            optimizer=made,
            scheduler=schedule,
            schedule_by=schedule_by,
            options=options,
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
            callbacks: of Keras. Those of Keras's own that write run on rank 0 alone, all others on
                every rank, where they see the same numbers.
            shuffle: a new order each epoch.
            tail: what happens to samples that do not divide: "pad" or "drop", see ShardSampler.
            loader_options: for DataLoader: num_workers, collate_fn, ...

        Returns:
            Keras's History of the epochs of this start, the same on all ranks.

        Raises:
            ValueError: the model or the job's settings cannot be trained this way.
            Stopped: all ranks were asked to stop.
        """
        from k8sjob.runtime.keras_fit import fit

        self.calls.check("job.fit", f"epochs={epochs}")
        return fit(
            self,
            model,
            train,
            epochs=epochs,
            sizes={"batch_size": batch_size, "global_batch": global_batch},
            validation=validation,
            callbacks=callbacks,
            shuffle=shuffle,
            tail=tail,
            loader_options=loader_options,
        )

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
        from k8sjob.runtime.keras_saving import save_model

        if self.config.strategy == "keras_mesh":  # elsewhere rank 0 has the whole model
            self.calls.check("job.save_model")
        save_model(self, model, self.path(path))

    def _kind_for(self, model: nn.Module) -> str:
        """The job's strategy; a Keras model is trained as one under ddp too.

        Raises:
            ValueError: the two do not go together.
        """
        kind, name = self.config.strategy, type(model).__name__
        if not keras_model.is_keras(model):
            if kind == "keras":
                raise ValueError(f"strategy.kind: keras, but {name} is no Keras model; use ddp")
            return kind
        if kind not in {"ddp", "keras"}:
            raise ValueError(f"strategy.kind: {kind}, but {name} is a Keras model; use keras")
        alien = self.config.options.keys() - compat.STRATEGIES["keras"].options.keys()
        if alien:
            raise ValueError(f"strategy.{min(alien)}: not for a Keras model ({name}); leave it out")
        return "keras"

    def sampler(
        self,
        dataset: Sized,
        *,
        batch_size: int | None = None,
        global_batch: int | None = None,
        shuffle: bool = True,
        tail: Tail = "pad",
    ) -> ShardSampler:
        """This rank's sampler, for a loop of one's own: see data.ShardSampler."""
        return ShardSampler(
            dataset,
            rank=self.rank,
            world_size=self.world_size,
            batch_size=batch_size,
            global_batch=global_batch,
            shuffle=shuffle,
            seed=self.seed,
            tail=tail,
            most_ranks=self.most_ranks,
        )

    # --- together with the other ranks ----------------------------------------------------------

    def log(self, **values: Any) -> None:
        """Report numbers of this moment, as `epoch=3, accuracy=0.9`; rank 0's are shown."""
        self.reached.update(values)
        self.reporter.emit(EventKind.METRICS, **values)

    def reduce(self, **pairs: tuple[float | Tensor, float | Tensor]) -> dict[str, float]:
        """Means over all ranks: each name's (sum, count), added up in float64 and divided.

        Returns:
            name -> sum / count, the same on all ranks; nan where the count is 0.
        """
        flat = [float(number) for pair in pairs.values() for number in pair]
        self.calls.check_often("job.reduce", ", ".join(pairs))
        total = self.group.sums(flat)
        return {
            name: total[2 * at] / total[2 * at + 1] if total[2 * at + 1] else float("nan")
            for at, name in enumerate(pairs)
        }

    def all_reduce(self, tensor: Tensor, op: Reduction = "sum") -> Tensor:
        """The sum, maximum or minimum over the ranks, element by element; a new tensor."""
        self.calls.check_often("job.all_reduce", f"{op} of {_of(tensor)}")
        return self.group.all_reduce(tensor, op)

    def gather(self, tensor: Tensor, to: int | None = None) -> list[Tensor]:
        """The tensors of all ranks, by rank; the first dimension may differ.

        Args:
            tensor: of the same type on all ranks.
            to: the rank that gets them, the list of the others is empty; None: every rank, which
                elsewhere is called all_gather.
        """
        self.calls.check_often("job.gather", f"{_of(tensor, rows=False)}, to={to}")
        return self.group.gather(tensor, to)

    def broadcast(self, tensor: Tensor, source: int = 0) -> Tensor:
        """One rank's tensor on all ranks; a new tensor."""
        self.calls.check_often("job.broadcast", f"{_of(tensor)}, source={source}")
        return self.group.broadcast(tensor, source)

    def barrier(self) -> None:
        """Wait until all ranks are here."""
        self.calls.check_often("job.barrier")
        self.group.barrier()

    @contextmanager
    def main_first(self) -> Iterator[None]:
        """Rank 0 does the block, the others when it is done: for a download to a shared volume."""
        if self._in_main_first:  # rank 0 has done this one as well when the others come to it
            yield
            return
        call = self.calls.note("job.main_first")
        if not self.is_main:
            self.calls.wait(call)
        self._in_main_first = True
        try:
            yield
        finally:
            self._in_main_first = False
        if self.is_main:
            self.calls.wait(call)

    # --- files ----------------------------------------------------------------------------------

    def path(self, mount: str | os.PathLike[str]) -> Path:
        """Where a path of the job.yaml is: itself in a pod, its stand-in under `k8sjob run`.

        Args:
            mount: the mount path of a volume, checkpoint.dir, or a path below one of them.
        """
        wanted = Path(mount)
        for known, here in sorted(settings.mapped_paths().items(), key=lambda pair: -len(pair[0])):
            if wanted.is_relative_to(known):
                return Path(here) / wanted.relative_to(known)
        return wanted

    def save(self, step: int, state: dict[str, Any]) -> None:
        """Save a state of one's own loop; all ranks call it.

        What is in it is copied before this returns, and written while the loop goes on. Rank 0's
        state is written, and of distributed tensors (FSDP2's, tensor parallel ones) the whole: by
        each rank its part, where all see the folder.

        Args:
            step: what "newest" goes by.
            state: dicts, lists and tuples of tensors and plain values: state_dict()s, numbers.

        Raises:
            ValueError: there is no checkpoint.dir, or the ranks' tensors make up no whole ones.
            TypeError: something in it could not be loaded again without running code.
            OSError: what the ranks have cannot be saved there in parts. Where a file cannot be
                written, that is told, and the loop goes on.
        """
        if self.saves is None:
            raise ValueError("checkpoint.dir is not set, so job.save() has no place: set it")
        self.calls.check("job.save", f"step={step}")
        own_state.save(self.saves, self.group, step, state)

    def load(self, like: dict[str, Any] | None = None) -> dict[str, Any] | None:
        """The newest state that save() wrote, on all ranks, which all call it; None: there is none.

        Args:
            like: a state as save() takes it, whose distributed tensors tell how those of the saved
                one are to be divided; of these a rank reads its part alone. What is no distributed
                tensor there is whole, and on the CPU.
        """
        if self.saves is None:
            return None
        self.calls.check("job.load")
        return own_state.load(self.saves, self.reporter, like)

    def should_stop(self) -> bool:
        """Whether to save and leave now: the same answer on all ranks, for a loop of one's own.

        Call it equally often on all ranks, once a step. After True, save and call
        `raise SystemExit(143)`.
        """
        self.begin()
        self._step += 1
        self.beat(self._step)
        return not self.stop_coordinator.passes()

    # --- for the runtime's own modules ------------------------------------------------------------

    def begin(self) -> None:
        """Training begins: from now on progress is watched, and a stop waits for all ranks."""
        self.training = True
        self._watchdog.begin()

    def end(self) -> None:
        """Training is over, and its last checkpoint written: what comes now may take its time."""
        if self.saves is not None:
            self.saves.settle()
        self.pause()

    def pause(self) -> None:
        """Training goes no further: what comes now may take its time."""
        self._watchdog.pause()

    def part(self) -> None:
        """Leave together: nobody closes a connection that another still reads from."""
        self.end()
        try:
            self.calls.check(LEAVING)
            self._watchdog.beat(self._step, "sync")
            self.stop_coordinator.finish(self.config.collective_timeout, self._watchdog.close)
        except PeerLost as lost:
            hung = self._accuse(lost)
            self._watchdog.close()
            self.stop_coordinator.close()
            if hung:
                raise hung from lost
            raise
        except CallOrderError as error:
            self.fail(error)
            raise
        self.group.destroy()

    def fail(self, error: BaseException) -> Hung | None:
        """Leave alone: the others are told, and wait for nothing from here.

        Returns:
            Where the error says only that this rank waited in vain: for whom.
        """
        hung = self._accuse(error)
        self.stop_coordinator.warn_others(
            f"rank {self._env.rank} failed: {first_line(hung or error)}"
        )
        if self.saves is not None:
            self.saves.settle(_LAST_SAVE_S)
        self.end()
        self._watchdog.close()
        self.stop_coordinator.close()
        if self.world_size == 1:  # a notebook goes on; among several, nccl could wait for the dead
            self.group.destroy()
        return hung

    def _accuse(self, error: BaseException) -> Hung | None:
        """Who is to blame for a collective that failed because ranks did not come to it."""
        if isinstance(error, SystemExit | KeyboardInterrupt):
            return None
        late = lateness(error)
        said = peer_loss(error) if late is None else late
        return (
            None if said is None else self._watchdog.find_hang(said, error, late=late is not None)
        )

    def beat(self, step: int, phase: str = "compute") -> None:
        """Tell the watchdog that this rank makes progress.

        Args:
            step: the same number on all ranks for the same step.
            phase: "sync" before waiting for the others, else anything.
        """
        self._step = step
        self.waiting.phase(phase)
        self._watchdog.beat(step, phase)
        if self.saves is not None:
            self.saves.poll()


def _in_words(model: nn.Module) -> str:
    """What ranks that train the same model have in common."""
    return f"{type(model).__name__} of {sum(1 for _ in model.parameters())} parameters"


def _of(tensor: Tensor, *, rows: bool = True) -> str:
    """A tensor's type and shape; without `rows` the length of its first dimension is left open."""
    sizes = [str(size) for size in tensor.shape]
    shape = ", ".join(sizes if rows else ["*", *sizes[1:]][: len(sizes)])
    return f"{str(tensor.dtype).removeprefix('torch.')}[{shape}]"


def _made(recipe: Any, subject: Any) -> Any:
    """What (class, arguments) or a function makes of a subject."""
    if isinstance(recipe, tuple):
        maker, arguments = recipe
        return maker(subject, **arguments)
    return recipe(subject)

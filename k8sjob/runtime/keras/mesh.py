"""Keras models over the axes data and model: keras.distribution, set from the job's settings.

Keras divides the variables as they are made, and computes with the whole batch and the whole model
as if they were in one place, so losses and metrics are those of all samples. JAX's compiler works
out what each device does. A step is Keras's own: so the loop is job.fit, and there is no prepare
here.
"""

from __future__ import annotations

import sys
from contextlib import contextmanager
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final

import keras
import torch
from keras import distribution
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.utils._pytree import tree_map_only
from torch.utils.data import DataLoader
from torch.utils.dlpack import from_dlpack

from k8sjob.runtime.base.env import copy_environ
from k8sjob.runtime.base.errors import EnvError
from k8sjob.runtime.checkpoint import model_state
from k8sjob.runtime.comm import rng
from k8sjob.runtime.comm.mesh import Mesh
from k8sjob.runtime.keras.callback import Placement
from k8sjob.runtime.keras.model import TEST_BATCH
from k8sjob.runtime.strategies import layout

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from torch import Tensor

    from k8sjob.runtime.checkpoint.format import Stored
    from k8sjob.runtime.comm.process_group import Group
    from k8sjob.runtime.data import BatchShard
    from k8sjob.runtime.rank_context import RankContext
    from k8sjob.runtime.strategies.layout import Axes


class Layouts(distribution.LayoutMap):  # type: ignore[misc]  # keras has no types
    """The job's layout map: `asked` paths of variables and outputs, and keys `used` by them."""

    def __init__(self, mesh: Any, axes: Mapping[str, Axes]) -> None:
        super().__init__(mesh)
        self.axes = axes
        # A dict for its order: these names are in a message.
        self.asked: dict[str, None] = {}
        self.used: set[str] = set()
        for key, each in axes.items():
            self[key] = tuple(each)

    def __getitem__(self, path: str) -> Any:
        """The layout of a variable or an output; None if it has none."""
        self.asked[path] = None
        key = layout.key_for(path, self.axes)
        if key is None:
            return None
        self.used.add(key)
        return self._layout_map[key]


class JobDistribution(distribution.ModelParallel):  # type: ignore[misc]  # keras has no types
    """The layout of each variable and batch, for Keras.

    Attributes:
        ranks: by the axes.
        whole_batches: whether all ranks have the same samples at the moment.
    """

    def __init__(self, group: Group, options: Mapping[str, Any]) -> None:
        self.ranks, self.whole_batches = Mesh(group, options["model"]), False
        shape = (self.ranks.data_size, self.ranks.model_size)
        # A single process would divide over all virtual devices of the CPU otherwise.
        devices = distribution.list_devices()[: group.world_size]
        mesh = distribution.DeviceMesh(shape, ["data", "model"], devices)
        self._layouts = Layouts(mesh, options["layout"])
        # By id: Keras's variables compare their elements with ==, and so have no hash.
        self._asked_for: set[int] = set()
        # No sharding by Keras: Feed gives each rank its own samples.
        super().__init__(layout_map=self._layouts, batch_dim_name="data", auto_shard_dataset=False)

    def get_data_layout(self, data_shape: Sequence[int]) -> Any:
        """A batch is divided along data, unless it has too few samples for that."""
        if self.whole_batches:
            return distribution.TensorLayout([None] * len(data_shape), self.device_mesh)
        return super().get_data_layout(data_shape)

    def get_variable_layout(self, variable: Any) -> Any:
        """That of the job, else the same on all ranks."""
        self._asked_for.add(id(variable))
        axis_layout = super().get_variable_layout(variable)
        layout.check_axes(variable.path, axis_layout.axes, len(variable.shape))
        sizes = {"data": self.ranks.data_size, "model": self.ranks.model_size}
        for dim, axis in enumerate(axis_layout.axes):
            if axis is not None:
                layout.check_size(variable.path, dim, variable.shape[dim], axis, sizes[axis])
        return axis_layout

    def made(self, variables: Sequence[Any]) -> bool:
        """Whether all of these were made since this was set."""
        return self._asked_for.issuperset(map(id, variables))

    def check_used(self, variables: Sequence[Any]) -> None:
        """Refuse a key of the layout that fits no variable or output of a built model."""
        outputs = [path for path in self._layouts.asked if path.endswith("/output")]
        paths = [*(variable.path for variable in variables), *outputs]
        layout.check_used(self._layouts.axes, self._layouts.used, paths)


@contextmanager
def distributed(group: Group, options: Mapping[str, Any]) -> Iterator[None]:
    """Models that are made meanwhile are divided; EnvError if Keras cannot."""
    if (current := keras.backend.backend()) != "jax":
        raise EnvError(
            f"Keras computes with {current}, and strategy.kind: keras_mesh with jax; set"
            " KERAS_BACKEND=jax before `import keras` (`k8sjob run` and the pods do), seen"
            f" {copy_environ().get('KERAS_BACKEND')!r}"
        )
    before = distribution.distribution()
    distribution.set_distribution(JobDistribution(group, options))
    try:
        yield
    finally:
        distribution.set_distribution(before)


_UNSIGNED: Final = {torch.uint16: torch.int32, torch.uint32: torch.int64}
"""Types that torch stores and hardly computes with, and what a checkpoint has instead."""


class ShardedModel(Placement):
    """Each rank has the parts of its place on the mesh; see Placement."""

    def __init__(self, context: RankContext, model: Any) -> None:
        distributed = distribution.distribution()
        if not isinstance(distributed, JobDistribution):
            raise ValueError(  # noqa: TRY004 - of a setting, not of an argument
                f"keras.distribution was set by the script, to {type(distributed).__name__}, and"
                " strategy.kind: keras_mesh sets it from the job.yaml; remove set_distribution() or"
                " keras.utils.clear_session() from the session"
            )
        self._distribution, self.mesh = distributed, distributed.ranks
        self._context, self._model = context, model
        # The same samples in the same rows of a batch, whatever the mesh: masks go by rows.
        self.feeding = {"in_blocks": True, "on_phase": context.group.on_phase}

    @cached_property
    def sharded(self) -> bool:
        """Whether some variable is divided along an axis."""
        return any(isinstance(self.read(variable), DTensor) for variable in self._model.variables)

    def evaluation(self, data: Any, options: Mapping[str, Any]) -> tuple[list[Any], Any]:
        """One of our own."""
        return [EvaluationCallback(self._context, data, options)], None

    def begin(self, resume: Callable[[], None]) -> None:
        """All ranks made the model with the same random numbers; refuse one made elsewhere."""
        self._distribution.check_used(self._model.weights)
        if not self._distribution.made(self._model.weights):
            raise ValueError(
                f"{type(self._model).__name__} was made before `with runtime.session()`, which is"
                " what divides it; make it inside"
            )
        resume()
        # Keras takes its seeds from Python's numbers, and all ranks must compute with the same
        # ones; torch's are for the samples.
        rng.seed_all(self._context.seed)
        torch.manual_seed(rng.of_rank(self._context.seed, self.mesh.data_rank))

    def expect(self, shard: BatchShard | None) -> None:
        """End a step; see fit.fit for its beginning, which is when its batch has come."""
        if shard is None:
            self._context.group.on_phase("compute")

    # --- the pieces of a variable -----------------------------------------------------------------

    def read(self, variable: Any) -> Tensor:
        """This rank's piece, a DTensor; plain where all ranks have the same."""
        local, divided = _of_jax(variable.value)
        # The states of Keras's seed generators are unsigned.
        local = local.to(_UNSIGNED.get(local.dtype, local.dtype))
        sizes = {"data": self.mesh.data_size, "model": self.mesh.model_size}
        # Mesh.devices has only the axes with several ranks.
        along = {axis: dim for axis, dim in divided.items() if sizes[axis] > 1}
        if not along:
            return local
        axes = [axis for axis, size in sizes.items() if size > 1]
        shape = torch.Size(variable.shape)
        return DTensor.from_local(
            local,
            self.mesh.devices,
            [Shard(along[axis]) if axis in along else Replicate() for axis in axes],
            run_check=False,
            shape=shape,
            # torch takes shape and stride together; the stride is that of the whole tensor,
            # contiguous.
            stride=torch.empty(shape, device="meta").stride(),
        )

    def write(self, variable: Any, value: Tensor | Stored) -> None:
        """The piece that belongs here."""
        piece = model_state.part(value, self.read(variable))
        local = piece.to_local() if isinstance(piece, DTensor) else piece
        variable.assign(_jax_array(local, like=variable.value))


def _of_jax(value: Any) -> tuple[Tensor, dict[str, int]]:
    """The part of an array that is here, in host memory, and the divided dimension by axis."""
    jax = sys.modules["jax"]
    # By way of the host, since torch may be built without CUDA.
    host = jax.local_devices(backend="cpu")[0]
    local = from_dlpack(jax.device_put(value.addressable_data(0), host))
    spec = getattr(value.sharding, "spec", ())
    return local, {axis: dim for dim, axis in enumerate(spec) if axis is not None}


def _jax_array(local: Tensor, *, like: Any) -> Any:
    """An array of all ranks, of which this one has `local`."""
    jax = sys.modules["jax"]
    raw, _ = _of_jax(like)
    (device,) = like.addressable_data(0).devices()
    # A copy: the array takes the tensor's memory over.
    whole = jax.numpy.from_dlpack(local.to(raw.dtype, copy=True).contiguous())
    arrays = [jax.device_put(whole, device)]
    return jax.make_array_from_single_device_arrays(like.shape, like.sharding, arrays)


class EvaluationCallback(keras.callbacks.Callback):  # type: ignore[misc]  # keras has no types
    """The first of the callbacks: adds the numbers of the held-out samples to an epoch's.

    Keras's own evaluation divides each batch by the axis data; the last samples, fewer than its
    ranks, are computed by all of them.
    """

    def __init__(self, context: RankContext, dataset: Any, options: Mapping[str, Any]) -> None:
        """Divide the data over the ranks."""
        super().__init__()
        self._context, self._distribution = context, distribution.distribution()
        mesh = self._distribution.ranks
        # The last samples are too few for one on each rank along data.
        surplus = len(dataset) % mesh.data_size
        together = len(dataset) - surplus
        mine = range(mesh.data_rank, together, mesh.data_size)
        batches = [list(mine[at : at + TEST_BATCH]) for at in range(0, len(mine), TEST_BATCH)]
        self._divided = len(batches)
        if surplus:
            batches.append(list(range(together, len(dataset))))
        self._loader: DataLoader[Any] = DataLoader(dataset, batch_sampler=batches, **options)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:  # noqa: ARG002 - Keras's signature
        """Evaluate, each sample once."""
        model = self.model
        model.reset_metrics()
        # test_on_batch would reset the metrics at each batch, and this is one evaluation. Keras's
        # own __setattr__ is passed by, as it tracks what it sets as a part of the model.
        object.__setattr__(model, "reset_metrics", lambda: None)
        try:
            for number, batch in enumerate(self._loader):
                with self._context.group.waiting():
                    self._distribution.whole_batches = number >= self._divided
                    model.test_on_batch(*tree_map_only(torch.Tensor, torch.Tensor.numpy, batch))
        finally:
            object.__delattr__(model, "reset_metrics")
            self._distribution.whole_batches = False
        metrics = model.get_metrics_result()
        logs |= {f"val_{name}": float(value) for name, value in metrics.items()}


@contextmanager
def undivided(context: RankContext, model: Any) -> Iterator[Any]:
    """A plain copy of a divided model on rank 0, as its own config makes it; None elsewhere.

    All ranks call it. Nothing is divided meanwhile: else rank 0 would wait for the others.
    """
    # All ranks gather, and rank 0 keeps the weights; the model on the mesh stays as it is.
    pieces = ShardedModel(context, model)
    weights: Sequence[Tensor] = [
        model_state.whole(pieces.read(variable), keep=context.is_main) for variable in model.weights
    ]
    before, random = distribution.distribution(), rng.capture(context.device)
    distribution.set_distribution(None)
    try:
        yield _copy(model, weights, context.reporter.warn) if context.is_main else None
    finally:
        distribution.set_distribution(before)
        rng.restore(random, context.device)  # a copy's layers draw seeds, which the others do not


def _copy(model: Any, weights: Sequence[Tensor], warn: Callable[[str], None]) -> Any:
    # The script's own classes need not be registered with Keras: they are here.
    classes = [type(layer) for layer in model._flatten_layers()]  # noqa: SLF001 - no public form
    classes += [model.loss, *(type(metric) for metric in model.metrics)] if model.compiled else []
    named = {class_.__name__: class_ for class_ in classes if hasattr(class_, "__name__")}
    with keras.saving.custom_object_scope(named):
        copy = type(model).from_config(model.get_config())
        if not copy.built:
            copy.build_from_config(model.get_build_config())
        # numpy has no bfloat16.
        plain = [weight.float() if weight.dtype == torch.bfloat16 else weight for weight in weights]
        copy.set_weights([weight.numpy() for weight in plain])
        try:
            copy.compile_from_config(model.get_compile_config() if model.compiled else {})
        except (TypeError, ValueError) as error:  # after all the training: the weights are there
            warn(f"the model is saved without what compile() gave it: {error}")
    return copy

"""A Keras model over the axes data and model: keras.distribution, from the job's settings.

Keras divides the variables as they are made, and computes with the whole batch and the whole model
as if they were in one place; what each device does of it the compiler works out (JAX), or DTensor
(torch, from Keras 3.16 on). A step is Keras's own: so the loop is job.fit, and there is no prepare
here.
"""

from __future__ import annotations

import os
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import keras
from keras import distribution

from k8sjob.runtime import layout
from k8sjob.runtime.errors import EnvError
from k8sjob.runtime.mesh import Mesh

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from k8sjob.runtime.layout import Axes
    from k8sjob.runtime.process_group import Group

__all__ = ["Divided", "distributed"]


class Layouts(distribution.LayoutMap):  # type: ignore[misc]  # keras has no types
    """The job's layout map, which remembers what Keras asked it for.

    Attributes:
        axes: by key, as the job has them.
        asked: paths of variables and outputs.
        used: keys that one of them has.
    """

    def __init__(self, mesh: Any, axes: Mapping[str, Axes]) -> None:
        super().__init__(mesh)
        self.axes = axes
        self.asked: dict[str, None] = {}
        self.used: set[str] = set()
        for key, each in axes.items():
            self[key] = tuple(each)

    def __getitem__(self, path: str) -> Any:
        """The layout of a variable or an output; None where it has none.

        Raises:
            ValueError: several keys match.
        """
        self.asked[path] = None
        key = layout.key_for(path, self.axes)
        if key is None:
            return None
        self.used.add(key)
        return self._layout_map[key]


class Divided(distribution.ModelParallel):  # type: ignore[misc]  # keras has no types
    """What Keras asks where a tensor belongs.

    Attributes:
        ranks: by the axes.
        whole_batches: whether all ranks have the same samples at the moment.
    """

    def __init__(self, group: Group, options: Mapping[str, Any]) -> None:
        self.ranks, self.whole_batches = Mesh(group, options["model"]), False
        shape = (self.ranks.data_size, self.ranks.model_size)
        devices = _devices(group.world_size)
        mesh = distribution.DeviceMesh(shape, ["data", "model"], devices)
        self._layouts = Layouts(mesh, options["layout"])
        self._asked_for: set[int] = set()
        super().__init__(layout_map=self._layouts, batch_dim_name="data", auto_shard_dataset=False)

    def get_data_layout(self, data_shape: Sequence[int]) -> Any:
        """A batch is divided along data, unless it has too few samples for that."""
        if self.whole_batches:
            return distribution.TensorLayout([None] * len(data_shape), self.device_mesh)
        return super().get_data_layout(data_shape)

    def get_variable_layout(self, variable: Any) -> Any:
        """That of the job, else the same on all ranks.

        Raises:
            ValueError: it does not fit the variable.
        """
        self._asked_for.add(id(variable))
        found = super().get_variable_layout(variable)
        layout.check_axes(variable.path, found.axes, len(variable.shape))
        sizes = {"data": self.ranks.data_size, "model": self.ranks.model_size}
        for dim, axis in enumerate(found.axes):
            if axis is not None:
                layout.check_size(variable.path, dim, variable.shape[dim], axis, sizes[axis])
        return found

    def made(self, variables: Sequence[Any]) -> bool:
        """Whether all of these were made since this was set."""
        return self._asked_for.issuperset(map(id, variables))

    def check_used(self, variables: Sequence[Any]) -> None:
        """Refuse a key of the layout that fits nothing.

        Args:
            variables: of the model, which is built by now.

        Raises:
            ValueError: there is such a key.
        """
        outputs = [path for path in self._layouts.asked if path.endswith("/output")]
        known = [*(variable.path for variable in variables), *outputs]
        layout.check_used(self._layouts.axes, self._layouts.used, known)


def _devices(world_size: int) -> list[str]:
    """Each rank's device, by rank; one process alone takes the first."""
    try:
        devices: list[str] = distribution.list_devices()
    except (AttributeError, NotImplementedError) as error:
        raise EnvError(_too_old()) from error
    return devices[:1] if world_size == 1 else devices


def _too_old() -> str:
    return (
        f"Keras {keras.__version__} has no distribution on {keras.backend.backend()}; install Keras"
        " 3.16 or later, or leave strategy.keras_backend out for JAX"
    )


@contextmanager
def distributed(group: Group, options: Mapping[str, Any]) -> Iterator[None]:
    """Models that are made meanwhile are divided.

    Raises:
        EnvError: Keras computes with something else, or cannot distribute with it.
    """
    wanted, found = options["keras_backend"], keras.backend.backend()
    if found != wanted:
        raise EnvError(
            f"Keras computes with {found}, and strategy.keras_backend is {wanted}; set"
            f" KERAS_BACKEND={wanted} before `import keras` (`k8sjob run` and the pods do), seen"
            f" {os.environ.get('KERAS_BACKEND')!r}"
        )
    before = distribution.distribution()
    distribution.set_distribution(Divided(group, options))
    try:
        yield
    finally:
        distribution.set_distribution(before)

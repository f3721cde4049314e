"""A Keras model on torch: data parallel, with what Keras keeps beside the parameters held equal."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from k8sjob.runtime import full_state
from k8sjob.runtime.keras_model import AsTorch, Moved, Seeds, penalised
from k8sjob.runtime.keras_optimizer import KerasOptimizer
from k8sjob.runtime.mesh import Mesh
from k8sjob.runtime.replicas import replicate
from k8sjob.runtime.step import forward
from k8sjob.runtime.strategies import Strategy, assemble

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch import Tensor
    from torch.optim import Optimizer

    from k8sjob.runtime.process_group import Group

__all__ = ["prepare"]


def prepare(
    model: Any, loss: Callable[..., Tensor], group: Group, options: Mapping[str, Any]
) -> Strategy:
    """The row of the table: DistributedDataParallel over the model as torch calls it."""
    mesh, bf16 = Mesh(group), options["bf16"]
    view = AsTorch(model, group.device)
    wrapped, step = replicate(view, penalised(model, loss), group, bf16=bf16)
    seeds, moved = Seeds(model), Moved(model, group)
    seeds.part(mesh.data_rank)

    def backward(inputs: Any, targets: tuple[Any, ...], *, scale: float, sync: bool) -> Tensor:
        value = step(inputs, targets, scale=scale, sync=sync)
        if sync:
            moved.average()
        return value

    def evaluated(inputs: Any) -> Any:
        return forward(view, inputs, bf16=bf16)

    def restore(optimizer: Optimizer, state: dict[str, Any]) -> None:
        full_state.restore(model, optimizer, state)
        seeds.part(mesh.data_rank)
        moved.begin()

    def check(optimizer: Optimizer) -> None:
        bound = [variable.path for variable in model.trainable_variables if variable.constraint]
        if bound and not isinstance(optimizer, KerasOptimizer):
            raise ValueError(
                f"{bound[0]} has a constraint, which {type(optimizer).__name__} of torch would not"
                " keep; use an optimizer of Keras"
            )

    return assemble(
        model,
        mesh,
        backward,
        bf16=bf16,
        wrapped=wrapped,
        forward=evaluated,
        restore=restore,
        ready=check,
    )

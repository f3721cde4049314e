"""Pipeline: the model is cut into stages, one a rank, and each batch into micro-batches.

While one stage works on a micro-batch, the others work on those before and behind it. Activations
go forward and gradients back between neighbours; a shorter last batch needs nothing of its own.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, Final, cast

import torch

from k8sjob.runtime import chain, stage_state
from k8sjob.runtime.blocks import prepare_layers
from k8sjob.runtime.gradients import synchronise
from k8sjob.runtime.mesh import Mesh, equalise
from k8sjob.runtime.neighbours import Neighbours
from k8sjob.runtime.step import autocast, call, forward, mean_loss
from k8sjob.runtime.strategies import Strategy, assemble, clipping

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from torch import Tensor, nn

    from k8sjob.runtime.process_group import Group

__all__ = ["gpipe", "one_f_one_b", "prepare"]

_EVALUATION: Final = -1
"""Instead of a micro-batch's number."""


def prepare(
    model: nn.Module, loss: Callable[..., Tensor], group: Group, options: Mapping[str, Any]
) -> Strategy:
    """The row of the table: stages along model, averaged gradients along data."""
    stages = chain.stages(model, options["splits"])
    mesh, bf16 = Mesh(group, len(stages)), options["bf16"]
    stage, last = mesh.model_rank, mesh.model_rank == len(stages) - 1
    equalise(model, group)
    whole = stage_state.names(model)
    prepare_layers(model, options)
    chain.keep_stage(model, stages[stage])
    neighbours = Neighbours(mesh)
    schedule = gpipe if options["schedule"] == "gpipe" else one_f_one_b

    def backward(inputs: Any, targets: tuple[Any, ...], *, scale: float, sync: bool) -> Tensor:
        with group.waiting():
            batch = _Batch(inputs, targets, options["micro_batches"])
            order = list(schedule(stage, len(stages), len(batch.sizes)))
            run = partial(_forward, model, loss, neighbours, bf16=bf16)
            value = _run(order, run, neighbours, batch, scale=scale)
            if sync:
                synchronise(model, mesh)
        return value

    def evaluated(inputs: Any) -> Any:
        if not neighbours.first:
            inputs = neighbours.take_input(_EVALUATION)
        output = forward(model, inputs, bf16=bf16)
        if not last:
            neighbours.give_output(output, _EVALUATION)
            neighbours.settle()
        return output if last else None

    return assemble(
        model,
        mesh,
        backward,
        forward=evaluated,
        settle=partial(stage_state.equalise_buffers, model, mesh),
        clip=clipping(mesh.process_group("model"), parted=True),
        capture=partial(stage_state.capture, model, whole, mesh),
        parts=partial(stage_state.parts, model, whole),
        parted=len(stages) > 1,
        restore=partial(stage_state.restore, model, whole),
        ready=stage_state.check,
        counts=last,
        stream=group.rank,
    )


def gpipe(_stage: int, _stages: int, micro_batches: int) -> Iterator[tuple[str, int]]:
    """All forward passes, then all backward passes: ("forward" or "backward", micro-batch)."""
    yield from (("forward", number) for number in range(micro_batches))
    yield from (("backward", number) for number in range(micro_batches))


def one_f_one_b(stage: int, stages: int, micro_batches: int) -> Iterator[tuple[str, int]]:
    """As soon as there is a gradient it is used, so that a stage keeps at most `stages` batches."""
    ahead = min(stages - stage - 1, micro_batches)
    yield from (("forward", number) for number in range(ahead))
    for number in range(ahead, micro_batches):
        yield "forward", number
        yield "backward", number - ahead
    yield from (("backward", number) for number in range(micro_batches - ahead, micro_batches))


class _Batch:
    """A batch in micro-batches; sizes differ by one at most."""

    def __init__(self, inputs: Any, targets: tuple[Any, ...], most: int) -> None:
        tensors = inputs if isinstance(inputs, dict) else dict(enumerate(_tuple(inputs)))
        count = next(iter(tensors.values())).shape[0]
        parts = min(most, count)
        self._inputs = {key: torch.tensor_split(value, parts) for key, value in tensors.items()}
        self._targets = [torch.tensor_split(value, parts) for value in targets]
        self._named = isinstance(inputs, dict)
        first = next(iter(self._inputs.values()))
        self.sizes = [part.shape[0] for part in first]

    def inputs(self, number: int) -> Any:
        parts = {key: value[number] for key, value in self._inputs.items()}
        return parts if self._named else tuple(parts.values())

    def targets(self, number: int) -> tuple[Tensor, ...]:
        return tuple(target[number] for target in self._targets)


def _run(
    order: Sequence[tuple[str, int]],
    forth: Callable[[Any, tuple[Tensor, ...]], Tensor],
    neighbours: Neighbours,
    batch: _Batch,
    *,
    scale: float,
) -> Tensor:
    """This stage's part of a step; returns the mean loss."""
    losses: list[Tensor] = []
    loss = None
    kept: dict[int, tuple[Any, Tensor]] = {}
    for action, number in order:
        part = batch.sizes[number] / sum(batch.sizes)
        if action == "forward":
            inputs = batch.inputs(number) if neighbours.first else neighbours.take_input(number)
            output = forth(inputs, batch.targets(number))
            if neighbours.last:
                losses.append(output.detach().to(neighbours.device, torch.float64) * part)
                output = output * (part * scale)
            else:
                neighbours.give_output(output, number)
            kept[number] = inputs, output
        else:
            inputs, output = kept.pop(number)
            closes, gradient = (action, number) == order[-1], None
            if not neighbours.last:
                gradient, loss = neighbours.take_gradient(output, last=closes)
            elif closes:
                loss = torch.stack(losses).sum()
            torch.autograd.backward(output, gradient)
            if not neighbours.first:
                neighbours.give_gradient(inputs.grad, loss)
    neighbours.settle()
    return cast("Tensor", loss)


def _forward(
    model: nn.Module,
    loss: Callable[..., Tensor],
    neighbours: Neighbours,
    inputs: Any,
    targets: tuple[Tensor, ...],
    *,
    bf16: bool,
) -> Tensor:
    """What this stage gives: the loss on the last one, else what the next one takes."""
    with autocast(neighbours.device, bf16=bf16):
        output = call(model, inputs)
        return mean_loss(loss, output, targets) if neighbours.last else cast("Tensor", output)


def _tuple(inputs: Any) -> tuple[Any, ...]:
    return tuple(inputs) if isinstance(inputs, tuple | list) else (inputs,)

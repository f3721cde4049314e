"""Tensor parallel: a layout says which parameters are divided over the axis model of the mesh.

A layer with such parameters takes its input whole and computes with torch's DTensor; its output is
gathered again, unless the layout leaves it divided for the layers behind it. Everything else
computes with plain tensors, the same on all ranks along the axis model.
"""

from __future__ import annotations

from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.experimental import implicit_replication
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils import _pytree as pytree

from k8sjob.runtime.comm import rng
from k8sjob.runtime.comm.mesh import Mesh, broadcast_state
from k8sjob.runtime.strategies import layout, sync_batchnorm
from k8sjob.runtime.strategies.api import Strategy, assemble
from k8sjob.runtime.strategies.blocks import prepare_layers
from k8sjob.runtime.strategies.step import (
    MixedError,
    clip_gradients,
    forward,
    forward_backward,
    synchronize,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from torch import Tensor
    from torch.distributed.device_mesh import DeviceMesh
    from torch.optim import Optimizer

    from k8sjob.runtime.comm.process_group import Group
    from k8sjob.runtime.strategies.layout import Axes
    from k8sjob.runtime.strategies.step import Loss, Options


def prepare(model: nn.Module, loss: Loss, group: Group, options: Options) -> Strategy:
    """The row of the table: DTensor along model, averaged gradients along data."""
    mesh, bf16 = Mesh(group, options["model"]), options["bf16"]
    divided = layout.parameters(model, options["layout"])
    outputs = layout.outputs(model, options["layout"])
    # Before the parameters are divided: all ranks cut them out of rank 0's.
    broadcast_state(model, group)
    if options["sync_batchnorm"] and mesh.data_size > 1:
        _check_norms(model, divided)
        model = sync_batchnorm.convert(model, group, mesh.process_group("data"))
    prepare_layers(model, options)
    ranks = mesh.axis("model")
    if ranks is not None:
        # Dropout on a divided tensor would have the same mask in each part otherwise.
        rng.divide(ranks)
        owners = _owners(model, divided)
        _divide(model, divided, owners, ranks)
        _convert(model, owners, outputs, ranks)

    def of_whole(output: Any, *targets: Any) -> Tensor:
        return loss(_whole(output), *targets)

    def backward(inputs: Any, targets: tuple[Any, ...], *, scale: float, sync: bool) -> Tensor:
        # Any layer may wait for the others along model. implicit_replication: plain tensors, such
        # as buffers, count as replicated where they meet a DTensor.
        with group.waiting(), implicit_replication(), _explained():
            value = forward_backward(model, of_whole, inputs, targets, scale=scale, bf16=bf16)
            if sync:
                synchronize(model, mesh)
        return value

    def evaluated(inputs: Any) -> Any:
        with implicit_replication(), _explained():
            return _whole(forward(model, inputs, bf16=bf16))

    return assemble(
        model,
        mesh,
        backward,
        forward=evaluated,
        clip=partial(clip_gradients, ranks=mesh.process_group("model")),
        sharded=bool(divided) and ranks is not None,
        ready=_step_by_kind,
    )


def _owners(model: nn.Module, divided: Iterable[str]) -> set[str]:
    """The layers with a divided parameter, and those that are tied to one of them."""
    named = list(model.named_parameters(remove_duplicate=False))
    owners, holders = set[str](), {name.rpartition(".")[0] for name in divided}
    # A layer that is tied to a divided one may have another parameter that is tied to a third:
    # until no layer is added.
    while owners != holders:
        owners = holders
        theirs = {item for name, item in named if name.rpartition(".")[0] in owners}
        holders = {name.rpartition(".")[0] for name, item in named if item in theirs}
    return owners


def _divide(
    model: nn.Module, divided: Mapping[str, int], owners: set[str], ranks: DeviceMesh
) -> None:
    """Put DTensors in place of all parameters of these layers."""
    layers = dict(model.named_modules(remove_duplicate=False))
    replacements: dict[nn.Parameter, nn.Parameter] = {}
    for name, parameter in list(model.named_parameters(remove_duplicate=False)):
        owner, _, last = name.rpartition(".")
        if owner not in owners:
            continue
        # Tied parameters stay one object, under all their names.
        if parameter not in replacements:
            # A parameter of such a layer that the layout does not divide is a replicated DTensor:
            # torch computes no layer from plain tensors and DTensors.
            placement = [Shard(divided[name]) if name in divided else Replicate()]
            if name in divided:
                dim = divided[name]
                layout.check_size(name, dim, parameter.shape[dim], "model", ranks.size())
            new = distribute_tensor(parameter.detach(), ranks, placement)
            replacements[parameter] = nn.Parameter(new, requires_grad=parameter.requires_grad)
        setattr(layers[owner], last, replacements[parameter])


def _check_norms(model: nn.Module, divided: Mapping[str, int]) -> None:
    layers = dict(model.named_modules(remove_duplicate=False))
    for name in divided:
        if isinstance(layers[name.rpartition(".")[0]], _BatchNorm):
            raise ValueError(  # noqa: TRY004 - a model that a setting does not fit
                f"strategy.layout: {name} belongs to a batch normalization, which sync_batchnorm"
                " computes whole; remove the key, or sync_batchnorm"
            )


def _convert(
    model: nn.Module, owners: set[str], outputs: Mapping[str, Axes], ranks: DeviceMesh
) -> None:
    """Plain tensors go into the layers with DTensors, and come out of them."""
    layers = dict(model.named_modules())  # each once, by its first name, as in outputs
    for name in owners & layers.keys():
        layers[name].register_forward_pre_hook(partial(_enter, ranks), with_kwargs=True)
    for name in (owners | outputs.keys()) & layers.keys():
        layers[name].register_forward_hook(partial(_leave, ranks, name, outputs.get(name, ())))


def _enter(ranks: DeviceMesh, _: nn.Module, inputs: Any, named: Any) -> Any:
    def enter(value: Tensor) -> Tensor:
        if isinstance(value, DTensor):
            return value
        # Without a check, which would be a broadcast in each call: inputs are equal along model.
        return DTensor.from_local(value, ranks, [Replicate()], run_check=False)

    return pytree.tree_map_only(torch.Tensor, enter, (inputs, named))


def _leave(ranks: DeviceMesh, name: str, axes: Axes, _: nn.Module, __: Any, output: Any) -> Any:
    dim = layout.model_dim(axes)
    if dim is None:
        return _whole(output)
    if not isinstance(output, torch.Tensor):
        raise TypeError(
            f"strategy.layout: {name}.output is a {type(output).__name__}, not one tensor; remove"
            " the key"
        )
    layout.check_axes(f"{name}.output", axes, output.ndim)
    # An output of a layer without divided parameters, which the layout divides all the same.
    if not isinstance(output, DTensor):
        output = DTensor.from_local(output, ranks, [Replicate()], run_check=False)
    return output.redistribute(placements=[Shard(dim)])


def _whole(output: Any) -> Any:
    """The same nest with plain tensors; their gradients are the same on all ranks."""
    return pytree.tree_map_only(DTensor, DTensor.full_tensor, output)


def _step_by_kind(optimizer: Optimizer) -> None:
    """Let each step take divided parameters apart from plain ones: no list may mix the two."""
    # Other optimizers may keep numbers in their groups, which the parts of one would not share.
    if not type(optimizer).__module__.startswith("torch.optim"):
        optimizer.register_step_pre_hook(_use_no_lists)
        return
    whole: list[dict[str, Any]] = []

    def divide(*_: Any) -> None:
        whole[:] = optimizer.param_groups
        parts = []
        for group in whole:
            for kind in (True, False):
                members = [item for item in group["params"] if isinstance(item, DTensor) is kind]
                parts += [{**group, "params": members}] if members else []
        optimizer.param_groups = parts

    def join(*_: Any) -> None:
        optimizer.param_groups = [*whole]

    optimizer.register_step_pre_hook(divide)
    optimizer.register_step_post_hook(join)


def _use_no_lists(optimizer: Optimizer, *_: Any) -> None:
    # Before each step, as a checkpoint that is restored brings these settings back.
    for group in optimizer.param_groups:
        group |= {name: False for name in ("foreach", "fused") if name in group}


_MIXED = (
    "a tensor that strategy.layout divides was combined with a plain parameter. A layer's"
    " parameters are divided only for its own forward (nn.MultiheadAttention uses those of its"
    " out_proj directly), and what follows an output with a layout must accept a part: remove that"
    " key, or give the last such layer no output layout"
)


@contextmanager
def _explained() -> Iterator[None]:
    """Put torch's error for a mixture into the words of the layout."""
    try:
        yield
    except MixedError as error:
        raise ValueError(_MIXED) from error
    except RuntimeError as error:
        # torch has no type for this error.
        if "mixed torch.Tensor and DTensor" in str(error):
            raise ValueError(_MIXED) from error
        raise

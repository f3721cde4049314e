"""Model split: one process, whose GPUs have some of the layers each and take turns.

The plain way to train a model that no single GPU can hold: only one of them computes at a time. On
a CPU all layers stay where they are.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.utils import _pytree as pytree

from k8sjob.runtime import chain
from k8sjob.runtime.blocks import prepare_layers
from k8sjob.runtime.mesh import Mesh
from k8sjob.runtime.replicas import replicate
from k8sjob.runtime.strategies import Strategy, assemble

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch import Tensor, nn

    from k8sjob.runtime.process_group import Group

__all__ = ["devices", "prepare"]


def prepare(
    model: nn.Module, loss: Callable[..., Tensor], group: Group, options: Mapping[str, Any]
) -> Strategy:
    """The row of the table: stages on the devices of this process, which is alone."""
    stages = chain.stages(model, options["splits"])
    prepare_layers(model, options)
    places = devices(group.device, len(stages), torch.cuda.device_count())
    for layers, place in zip(stages, places, strict=True):
        for name in layers:
            model.get_submodule(name).to(place)
        model.get_submodule(layers[0]).register_forward_pre_hook(partial(_enter, place))
    # The output goes back to where targets are, and where it is measured.
    model.register_forward_hook(partial(_leave, group.device))
    wrapped, backward = replicate(model, loss, group, bf16=options["bf16"])
    return assemble(model, Mesh(group), backward, bf16=options["bf16"], wrapped=wrapped)


def devices(first: torch.device, stages: int, gpus: int) -> list[torch.device]:
    """The device of each stage; where there are fewer GPUs, stages that follow each other share.

    Args:
        first: the process's device.
        stages: number of stages.
        gpus: GPUs that the process sees.
    """
    if first.type != "cuda":
        return [first] * stages
    used = min(stages, gpus)
    return [torch.device("cuda", stage * used // stages) for stage in range(stages)]


def _moved(value: Any, place: torch.device) -> Any:
    def move(item: Any) -> Any:
        return item.to(place, non_blocking=True) if isinstance(item, torch.Tensor) else item

    return pytree.tree_map(move, value)


def _enter(place: torch.device, _: nn.Module, inputs: Any) -> Any:
    return _moved(inputs, place)


def _leave(place: torch.device, _: nn.Module, __: Any, output: Any) -> Any:
    return _moved(output, place)

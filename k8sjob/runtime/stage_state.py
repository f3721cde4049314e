"""The state of a model whose layers lie on different ranks, as one process would have it.

See full_state for why. Layers keep their names when others are taken out, and the optimizer's state
goes by the numbers that the parameters have in the whole model.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch.distributed as dist

from k8sjob.runtime.shards import gathered, on_host

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

    from k8sjob.runtime.mesh import Mesh

__all__ = ["Names", "capture", "check", "equalise_buffers", "names", "parts", "restore"]


class Names(NamedTuple):
    """What a whole model has: its parameters in their order, and the keys of its state."""

    parameters: list[str]
    state: list[str]


def names(model: nn.Module) -> Names:
    """The names of a model that is not cut yet."""
    return Names([name for name, _ in model.named_parameters()], list(model.state_dict()))


def check(optimizer: Optimizer) -> None:
    """Refuse an optimizer whose state could not be put together."""
    if len(optimizer.param_groups) > 1:
        raise ValueError(
            f"the optimizer has {len(optimizer.param_groups)} groups of parameters, and the stages"
            " of a pipeline can have one; give optimizer=(class, arguments)"
        )


def parts(model: nn.Module, whole: Names, optimizer: Optimizer) -> dict[str, Any]:
    """The states of this stage, under the names and numbers of the whole model."""
    own = optimizer.state_dict()
    numbers = _numbers(model, whole)
    group = {**own["param_groups"][0], "params": list(range(len(whole.parameters)))}
    state = {numbers[number]: value for number, value in own["state"].items()}
    return {
        "model": model.state_dict(),
        "optimizer": {"state": state, "param_groups": [group]},
    }


def capture(model: nn.Module, whole: Names, mesh: Mesh, optimizer: Optimizer) -> dict[str, Any]:
    """A copy of the states of all stages, put together in rank 0's host memory; all ranks call it.

    Args:
        model: the stage.
        whole: see names.
        mesh: the ranks.
        optimizer: the stage's.
    """
    if mesh.data_rank > 0:
        return {}
    mine = on_host(parts(model, whole, optimizer))
    stages: list[Any] = [None] * mesh.model_size
    if mesh.model_size == 1:
        stages = [mine]
    else:
        first = mesh.model_rank == 0
        dist.gather_object(mine, stages if first else None, group=mesh.process_group("model"))
        if not first:
            return {}
    weights = {name: value for stage in stages for name, value in stage["model"].items()}
    states = [stage["optimizer"]["state"] for stage in stages]
    state = {number: value for found in states for number, value in found.items()}
    return {
        "model": {name: weights[name] for name in whole.state},
        "optimizer": {"state": state, "param_groups": stages[0]["optimizer"]["param_groups"]},
    }


def restore(model: nn.Module, whole: Names, optimizer: Optimizer, state: dict[str, Any]) -> None:
    """Take this stage's part of a whole state.

    Raises:
        RuntimeError, ValueError, KeyError: it belongs to another model or optimizer.
    """
    if state["model"].keys() != set(whole.state):
        odd = state["model"].keys() ^ set(whole.state)
        raise ValueError(f"{', '.join(sorted(odd)[:6])}: in one of them and not in the other")
    model.load_state_dict({name: gathered(state["model"][name]) for name in model.state_dict()})
    (group,) = state["optimizer"]["param_groups"]
    found = state["optimizer"]["state"]
    numbers = _numbers(model, whole)
    own = {mine: gathered(found[number]) for mine, number in enumerate(numbers) if number in found}
    groups = [{**group, "params": list(range(len(numbers)))}]
    optimizer.load_state_dict({"state": own, "param_groups": groups})


def equalise_buffers(model: nn.Module, mesh: Mesh) -> None:
    """The buffers of the first copy of this stage, for all of them."""
    ranks = mesh.process_group("data")
    if ranks is not None:
        for buffer in model.buffers():
            dist.broadcast(buffer, src=mesh.model_rank, group=ranks)


def _numbers(model: nn.Module, whole: Names) -> list[int]:
    """The number in the whole model of each parameter of this stage."""
    return [whole.parameters.index(name) for name, _ in model.named_parameters()]

"""State of a model and optimizer divided over the ranks, as one process would have it.

So a checkpoint has the same form whatever wrote it: plain tensors under the model's own names, the
optimizer's state under the numbers of the parameters. One strategy may resume what another saved.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate
from torch.utils._pytree import tree_leaves

from k8sjob.runtime.checkpoint.format import Stored, changed, gathered, on_host

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.optim import Optimizer

    from k8sjob.runtime.comm.mesh import Mesh


def parts(model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    """The states of both as this rank has them: its parts of the distributed tensors."""
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}


def restore(model: nn.Module, optimizer: Optimizer, state: dict[str, Any]) -> None:
    """Restore whole states of both; all ranks have them, and take their parts.

    Of a tensor that is still in a checkpoint, only the part is read.

    Raises:
        RuntimeError, ValueError, KeyError: it belongs to another model or optimizer.
    """
    now = model.state_dict()
    # Names and shapes are not compared here: load_state_dict() does, and names what differs.
    weights = {name: part(value, now.get(name)) for name, value in state["model"].items()}
    model.load_state_dict(weights)
    parameters = [item for group in optimizer.param_groups for item in group["params"]]
    by_number = {
        number: {key: part(value, parameters[number]) for key, value in numbers.items()}
        for number, numbers in state["optimizer"]["state"].items()
        # Where there are more, load_state_dict() refuses the state as that of another optimizer.
        if number < len(parameters)
    }
    settings = {key: gathered(value) for key, value in state["optimizer"].items() if key != "state"}
    optimizer.load_state_dict({**settings, "state": by_number})


def whole(value: Any, *, keep: bool) -> Any:
    """A nest of containers with whole copies of its tensors in host memory; all ranks call it.

    `keep`: this rank needs the result; the others only take part.
    """

    def of_tensor(tensor: Any) -> Any:
        if not isinstance(tensor, torch.Tensor):
            return tensor
        if not isinstance(tensor, DTensor):
            return tensor.detach().to("cpu", copy=True) if keep else tensor
        full = tensor.full_tensor().detach()
        if not keep:
            # The whole tensor is freed at once: on these ranks there is one of them at a time.
            return full.new_empty(0)
        # A replicated tensor shares its memory with the parameter, which the optimizer changes.
        local = tensor.to_local()
        shares = full.untyped_storage().data_ptr() == local.untyped_storage().data_ptr()
        return full.to("cpu", copy=True) if shares else full.cpu()

    return changed(value, of_tensor)


def is_divided(value: Any) -> bool:
    """Whether there is a distributed tensor in a nest of containers."""
    return any(isinstance(leaf, DTensor) for leaf in tree_leaves(value))


def only_distributed(value: Any) -> Any:
    """A nest of containers with its distributed tensors, and None in place of all else."""

    def kept(item: Any) -> Any:
        container = isinstance(item, dict) or type(item) in {list, tuple}
        return item if container or isinstance(item, DTensor) else None

    return changed(value, kept)


def placed(value: Any, like: Any) -> Any:
    """A nest of containers with each tensor divided as the one in the same place of another nest.

    All ranks call it. A tensor without a counterpart is whole, and on the CPU.
    """
    # A Counter, of a scheduler, has no tensors in it, and would become a dict.
    if isinstance(value, dict) and not isinstance(value, Counter):
        counterparts = like if isinstance(like, dict) else {}
        return {key: placed(item, counterparts.get(key)) for key, item in value.items()}
    if isinstance(value, list | tuple):
        pairs = like if isinstance(like, list | tuple) else ()
        return type(value)(map(placed, value, [*pairs, *[None] * len(value)]))
    return part(value, like)


def part(value: Any, like: Tensor | None) -> Any:
    """A whole tensor, or a stored one, divided as another one is.

    Raises:
        ValueError: that one has no memory.
    """
    stored = isinstance(value, Stored)
    whole_one = stored or isinstance(value, torch.Tensor)
    if not (whole_one and isinstance(like, DTensor) and value.shape == like.shape):
        return value.whole() if stored else value
    if like.device.type == "meta":
        raise ValueError(
            "the state that shows how to shard has no memory (device meta): allocate its modules"
            " first, with to_empty(device=...)"
        )
    if stored:
        return value.divided_as(like)
    # All ranks have it whole, so each takes its part, and torch sends nothing.
    mesh = like.device_mesh
    everywhere = [Replicate()] * mesh.ndim
    have = DTensor.from_local(value.to(like.device), mesh, everywhere, run_check=False)
    return have.redistribute(placements=like.placements)


class StageState:
    """State of a model of which this rank keeps some of the layers; made before it is cut.

    Layers keep their names when others are taken out, and the optimizer's state goes by the numbers
    that the parameters have in the whole model.

    Attributes:
        parameters: names of the whole model's parameters, in order.
        keys: of the whole model's state.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self.parameters = [name for name, _ in model.named_parameters()]
        self.keys = list(model.state_dict())

    def parts(self, optimizer: Optimizer) -> dict[str, Any]:
        """The states of this stage, under the names and numbers of the whole model."""
        whole, numbers = optimizer.state_dict(), self._numbers()
        # There is one group: check_groups() has refused an optimizer with several.
        group = {**whole["param_groups"][0], "params": list(range(len(self.parameters)))}
        state = {numbers[number]: value for number, value in whole["state"].items()}
        optimizer_state = {"state": state, "param_groups": [group]}
        return {"model": self._model.state_dict(), "optimizer": optimizer_state}

    def capture(self, mesh: Mesh, optimizer: Optimizer) -> dict[str, Any]:
        """A copy of all stages' states in rank 0's host memory; all ranks call it."""
        # The stages of the first copy of the model stand for those of all copies.
        if mesh.data_rank > 0:
            return {}
        mine, first = on_host(self.parts(optimizer)), mesh.model_rank == 0
        stages: list[Any] = [None] * mesh.model_size
        dist.gather_object(mine, stages if first else None, group=mesh.process_group("model"))
        if not first:
            return {}
        weights = {name: value for stage in stages for name, value in stage["model"].items()}
        states = [stage["optimizer"]["state"] for stage in stages]
        state = {number: value for stage_state in states for number, value in stage_state.items()}
        return {
            "model": {name: weights[name] for name in self.keys},
            "optimizer": {"state": state, "param_groups": stages[0]["optimizer"]["param_groups"]},
        }

    def restore(self, optimizer: Optimizer, state: dict[str, Any]) -> None:
        """Take this stage's part of a whole state.

        Raises:
            RuntimeError, ValueError, KeyError: it belongs to another model or optimizer.
        """
        weights = state["model"]
        # The load_state_dict() of a stage would see only the names of that stage.
        if odd := weights.keys() ^ set(self.keys):
            raise ValueError(f"{', '.join(sorted(odd)[:6])}: in one of them and not in the other")
        weights_of_stage = {name: gathered(weights[name]) for name in self._model.state_dict()}
        self._model.load_state_dict(weights_of_stage)
        (group,) = state["optimizer"]["param_groups"]
        stored, numbers = state["optimizer"]["state"], self._numbers()
        values = {
            at: gathered(stored[number]) for at, number in enumerate(numbers) if number in stored
        }
        groups = [{**group, "params": list(range(len(numbers)))}]
        optimizer.load_state_dict({"state": values, "param_groups": groups})

    def _numbers(self) -> list[int]:
        """The number in the whole model of each parameter of this stage."""
        return [self.parameters.index(name) for name, _ in self._model.named_parameters()]

"""A model whose tables lie on parameter servers: the trainers' side of tables.py.

A table is cut by columns, one piece a server. Its layer in the model is replaced by one that asks
all servers at once and puts their columns side by side.
"""

from __future__ import annotations

import re
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn
from torch.distributed import rpc
from torch.distributed.nn.api.remote_module import RemoteModule
from torch.utils import _pytree as pytree

from k8sjob.runtime import tables
from k8sjob.runtime.blocks import tied
from k8sjob.runtime.calls import server_name

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from k8sjob.runtime.process_group import Group

__all__ = ["RemoteTable", "RemoteTables", "choose"]


_FIND: Any = tables.find
"""RemoteModule asks for a class, and calls it."""


class RemoteTable(nn.Module):
    """Stands where a table was; has no parameters here.

    Attributes:
        pieces: the table's columns, by server. Not submodules: what asks a model for all of its
            parts would ask the servers.
        share: factor for its gradient, 1 / trainers: each of them steps the table by itself.
    """

    def __init__(self, name: str, servers: int, share: float) -> None:
        super().__init__()
        self.share = share
        self.pieces: tuple[Any, ...] = tuple(
            RemoteModule(f"{server_name(number)}/cpu", _FIND, (name,)) for number in range(servers)
        )

    def forward(self, *inputs: Any, **named: Any) -> Tensor:
        """As the table that it stands for; the output is where the input was."""
        first = inputs[0] if inputs else next(iter(named.values()))
        inputs, named = pytree.tree_map(_on_cpu, (inputs, named))
        asked = [piece.forward_async(*inputs, **named) for piece in self.pieces]
        output = torch.cat([columns.wait() for columns in asked], dim=-1).to(first.device)
        if output.requires_grad and self.share != 1.0:
            output.register_hook(lambda gradient: gradient * self.share)  # type: ignore[no-untyped-call]  # torch leaves it so
        return output


class RemoteTables:
    """The tables of a model, on the servers.

    Attributes:
        names: of the layers, in the model's order.
    """

    def __init__(self, model: nn.Module, names: Sequence[str], servers: int, group: Group) -> None:
        """Move the tables from the model to the servers; rank 0's numbers count.

        Args:
            model: its layers of these names are replaced.
            names: see choose().
            servers: number of servers.
            group: the trainers.
        """
        self.names, self._servers = list(names), servers
        for name in names:
            table = _table(model, name)
            pieces = self._cut(table.weight.detach().cpu())
            if group.rank == 0:
                recipe = tables.describe(table)
                keep = partial(tables.keep, trained=table.weight.requires_grad)
                self._on_all(keep, [(name, recipe, piece) for piece in pieces])
        group.barrier()
        self._layers = [RemoteTable(name, servers, 1.0 / group.world_size) for name in names]
        for name, layer in zip(names, self._layers, strict=True):
            owner, _, last = name.rpartition(".")
            setattr(model.get_submodule(owner), last, layer)

    def make_optimizer(self, kind: type[Any], pickled: dict[str, Any]) -> None:
        """See tables.make_optimizer."""
        self._on_all(tables.make_optimizer, [(kind, pickled)] * self._servers)

    def accumulate(self, trainer: int, context: int) -> None:
        """See tables.accumulate."""
        self._on_all(tables.accumulate, [(trainer, context)] * self._servers)

    def begin_step(self, trainer: int, context: int) -> list[Any]:
        """Begin what tables.step does, on all servers; the futures of their answers."""
        return self._ask_all(tables.step, [(trainer, context)] * self._servers)

    def set_rates(self, rates: dict[str, Any]) -> None:
        """See tables.set_rates."""
        self._on_all(tables.set_rates, [(rates,)] * self._servers)

    def state(self) -> dict[str, tuple[Tensor, dict[str, Any]]]:
        """Name of each table -> its weight and its optimizer's state, whole."""
        found = self._on_all(tables.state, [()] * self._servers)
        whole = {}
        for name in self.names:
            weights = [weights[name] for weights, _ in found]
            states = [states[name] for _, states in found]
            joined = {key: _joined([s[key] for s in states], weights) for key in states[0]}
            whole[name] = torch.cat(weights, dim=1), joined
        return whole

    def take_state(self, whole: dict[str, tuple[Tensor, dict[str, Any]]]) -> None:
        """Give the servers what state() gave."""
        weights: list[dict[str, Tensor]] = [{} for _ in range(self._servers)]
        states: list[dict[str, Any]] = [{} for _ in range(self._servers)]
        for name, (weight, state) in whole.items():
            for number, piece in enumerate(self._cut(weight)):
                weights[number][name] = piece
                states[number][name] = {
                    key: self._cut(value)[number] if _is_like(value, weight) else value
                    for key, value in state.items()
                }
        self._on_all(tables.take_state, list(zip(weights, states, strict=True)))

    def _cut(self, weight: Tensor) -> list[Tensor]:
        return [piece.contiguous() for piece in torch.tensor_split(weight, self._servers, dim=1)]

    def _on_all(self, function: Callable[..., Any], arguments: Sequence[tuple[Any, ...]]) -> Any:
        return [answer.wait() for answer in self._ask_all(function, arguments)]

    def _ask_all(
        self, function: Callable[..., Any], arguments: Sequence[tuple[Any, ...]]
    ) -> list[Any]:
        return [
            rpc.rpc_async(server_name(number), function, args=own)
            for number, own in enumerate(arguments)
        ]


def choose(model: nn.Module, patterns: Sequence[str], servers: int) -> list[str]:
    """The names of the layers that go to the servers, in the model's order.

    Args:
        model: the model.
        patterns: names, or regular expressions of whole names; none: every nn.EmbeddingBag.
        servers: among how many the columns are divided.

    Raises:
        ValueError: there is no such table, or one that cannot be divided.
    """
    known = {
        name: layer
        for name, layer in model.named_modules()
        if isinstance(layer, nn.EmbeddingBag | nn.Embedding)
    }
    there = f"there is {', '.join(known) or 'none'}"
    for pattern in patterns:
        if not any(name == pattern or re.fullmatch(pattern, name) for name in known):
            raise ValueError(f"strategy.tables: {pattern!r} matches no table; {there}")
    chosen = [
        name
        for name, layer in known.items()
        if any(name == pattern or re.fullmatch(pattern, name) for pattern in patterns)
        or (not patterns and isinstance(layer, nn.EmbeddingBag))
    ]
    if not chosen:
        raise ValueError(
            f"strategy.tables: {type(model).__name__} has no nn.EmbeddingBag for the servers; name"
            f" nn.Embedding layers ({there}), or use kind: ddp"
        )
    _check(model, chosen, servers)
    return chosen


def _check(model: nn.Module, chosen: Sequence[str], servers: int) -> None:
    shared = {name for names in tied(model) for name in names}
    for name in chosen:
        layer = _table(model, name)
        if f"{name}.weight" in shared:
            raise ValueError(
                f"strategy.tables: {name}.weight is a parameter of other layers too, and those are"
                f" not on the servers; leave {name} out"
            )
        if layer.embedding_dim < servers:
            raise ValueError(
                f"strategy.tables: {name} has {layer.embedding_dim} columns for {servers} servers;"
                f" set servers to at most {layer.embedding_dim}"
            )
        try:
            tables.describe(layer)
        except ValueError as error:
            raise ValueError(f"strategy.tables: {name}: {error}") from None
    on_servers = {f"{name}.weight" for name in chosen}
    if not any(
        item.requires_grad for name, item in model.named_parameters() if name not in on_servers
    ):
        raise ValueError(
            f"strategy.tables: {type(model).__name__} has nothing to train beside its tables; leave"
            " one of them out"
        )


def _on_cpu(value: Any) -> Any:
    return value.cpu() if isinstance(value, torch.Tensor) else value


def _table(model: nn.Module, name: str) -> nn.Embedding | nn.EmbeddingBag:
    return cast("nn.Embedding | nn.EmbeddingBag", model.get_submodule(name))


def _is_like(value: Any, weight: Tensor) -> bool:
    return isinstance(value, torch.Tensor) and value.shape == weight.shape


def _joined(values: Sequence[Any], weights: Sequence[Tensor]) -> Any:
    """An entry of the optimizer's state: cut as the weights are, or the same everywhere."""
    if all(_is_like(value, weight) for value, weight in zip(values, weights, strict=True)):
        return torch.cat(list(values), dim=1)
    return values[0]

"""Embedding tables with columns on parameter servers: what servers run, and trainers call.

Each server has some columns of every table, so that all of them work on every batch, and one
server or five give the same numbers. What a server holds is the module's own, since RPC finds
nothing else.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from functools import partial
from typing import TYPE_CHECKING, Any, Final, cast

import torch
import torch.distributed.autograd as dist_autograd
from torch import nn
from torch.distributed import rpc
from torch.distributed.nn.api.remote_module import RemoteModule
from torch.utils import _pytree as pytree

from k8sjob.runtime.strategies.blocks import matched, names_of, tied
from k8sjob.runtime.strategies.rpc import server_name

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch import Tensor
    from torch.optim import Optimizer

    from k8sjob.runtime.comm.process_group import Group

Recipe = tuple[type[nn.Embedding | nn.EmbeddingBag], dict[str, Any]]
"""A kind of table and what it is made with, its weight and its width aside."""

_SHARED: Final = ("padding_idx", "scale_grad_by_freq", "sparse")
_OF_BAGS: Final = ("mode", "include_last_offset")


def describe(table: nn.Embedding | nn.EmbeddingBag) -> Recipe:
    """The recipe for another table of its kind; ValueError if it needs whole rows."""
    # max_norm scales a row by the norm of the whole row, of which a server has a part.
    if table.max_norm is not None:
        raise ValueError("max_norm needs whole rows, and a server has columns; leave it out")
    bag = isinstance(table, nn.EmbeddingBag)
    names = (*_SHARED, *(_OF_BAGS if bag else ()))
    kind = nn.EmbeddingBag if bag else nn.Embedding
    return kind, {name: getattr(table, name) for name in names}


# --- what trainers call on a server ---------------------------------------------------------------


class _ServerTables:
    """The tables of this server, and the one optimizer of all of them."""

    def __init__(self) -> None:
        # RPC calls these functions from several threads of its own, for several trainers.
        self.lock = threading.Lock()
        self.tables: dict[str, nn.Embedding | nn.EmbeddingBag] = {}
        self.optimizer: Any = None  # until make_optimizer, which the trainers call first
        # trainer -> weight -> the sum of its gradients in this window; weights by identity.
        self.sums: dict[int, dict[Tensor, Tensor]] = defaultdict(dict)

    @property
    def weights(self) -> dict[str, Tensor]:
        return {name: table.weight for name, table in self.tables.items()}


_HELD: Final = _ServerTables()


def keep(name: str, recipe: Recipe, weight: Tensor, *, trained: bool) -> None:
    """Keep columns of a table under its name; weight: (rows, columns here)."""
    kind, settings = recipe
    rows, width = weight.shape
    table = kind(rows, width, _weight=weight.clone(), **settings)
    _HELD.tables[name] = table.requires_grad_(trained)


def find(name: str) -> nn.Module:
    """The table of a name: what torch's RemoteModule "makes" here, once for each trainer."""
    return _HELD.tables[name]


def make_optimizer(kind: type[Optimizer], pickled: dict[str, Any]) -> None:
    """Make the optimizer of this server's tables: its class, and the trainers' pickled state."""
    # Without __init__, whose arguments are not known here: unpickled, as torch unpickles
    # optimizers. The parameters are those of this server.
    optimizer = kind.__new__(kind)
    (group,) = pickled["param_groups"]
    held = {**group, "params": list(_HELD.weights.values())}
    optimizer.__setstate__({**pickled, "param_groups": [held], "state": defaultdict(dict)})
    _HELD.optimizer = optimizer


def take_gradients(trainer: int, context: int, closes: bool) -> None:  # noqa: FBT001 - of a call
    """Keep a trainer's gradients of one batch (a dist_autograd context), or step by all kept."""
    # This context is the trainer's; on this server it has the gradients of the tables here.
    gradients = dist_autograd.get_gradients(context)  # type: ignore[attr-defined]  # from C++
    with _HELD.lock:
        sums = _HELD.sums[trainer]
        for weight, gradient in gradients.items():
            sums[weight] = sums[weight] + gradient if weight in sums else gradient
        if closes:
            # The tables step for each trainer by itself: RemoteTable.share makes up for their
            # number.
            for weight, gradient in _HELD.sums.pop(trainer).items():
                weight.grad = gradient
            _HELD.optimizer.step()
            _HELD.optimizer.zero_grad()


def set_rates(rates: Mapping[str, Any]) -> None:
    """Take over the trainers' learning rate and whatever else a schedule changes."""
    _HELD.optimizer.param_groups[0].update(rates)


def state() -> tuple[dict[str, Tensor], dict[str, dict[str, Any]]]:
    """This server's columns by table, and the optimizer's state of each."""
    with _HELD.lock:
        weights = {name: weight.detach().clone() for name, weight in _HELD.weights.items()}
        of = _HELD.optimizer.state
        return weights, {name: dict(of[weight]) for name, weight in _HELD.weights.items()}


def take_state(weights: Mapping[str, Tensor], moments: Mapping[str, dict[str, Any]]) -> None:
    """Take over what state() gave."""
    with _HELD.lock, torch.no_grad():
        for name, weight in _HELD.weights.items():
            weight.copy_(weights[name])
            _HELD.optimizer.state[weight] = dict(moments.get(name, {}))


class RemoteTable(nn.Module):
    """Replaces a table in the model; has no parameters here.

    Attributes:
        pieces: the table's columns, by server. Not submodules: what asks a model for all of its
            parts would ask the servers.
        share: factor for its gradient, 1 / trainers: each of them steps the table by itself.
    """

    def __init__(self, name: str, servers: int, share: float) -> None:
        super().__init__()
        self.share = share
        self.pieces: tuple[Any, ...] = tuple(
            # RemoteModule asks for a class, and calls it.
            RemoteModule(f"{server_name(number)}/cpu", cast("Any", find), (name,))
            for number in range(servers)
        )

    def forward(self, *inputs: Any, **named: Any) -> Tensor:
        """As the table that it replaces; the output is where the input was."""
        first = inputs[0] if inputs else next(iter(named.values()))
        inputs, named = pytree.tree_map_only(torch.Tensor, torch.Tensor.cpu, (inputs, named))
        # All servers look up at the same time; the columns are waited for in their order.
        asked = [piece.forward_async(*inputs, **named) for piece in self.pieces]
        output = torch.cat([columns.wait() for columns in asked], dim=-1).to(first.device)
        if output.requires_grad and self.share != 1.0:
            # One lookup in a table of n trainers counts 1/n, as averaged gradients do elsewhere.
            output.register_hook(lambda gradient: gradient * self.share)  # type: ignore[no-untyped-call]  # torch leaves it so
        return output


class RemoteTables:
    """The tables of a model, on the servers.

    Attributes:
        names: of the layers, in the model's order.
    """

    def __init__(self, model: nn.Module, names: Sequence[str], servers: int, group: Group) -> None:
        """Move the tables of these names to the servers; rank 0's values count."""
        self.names, self._servers = list(names), servers
        for name in names:
            table = _table(model, name)
            pieces = self._cut(table.weight.detach().cpu())
            # One rank, so that the servers have one table; the barrier is for the others, who look
            # it up next.
            if group.rank == 0:
                recipe = describe(table)
                put = partial(keep, trained=table.weight.requires_grad)
                torch.futures.wait_all(
                    self._begin(put, [(name, recipe, piece) for piece in pieces])
                )
        group.barrier()
        self._layers = [RemoteTable(name, servers, 1.0 / group.world_size) for name in names]
        for name, layer in zip(names, self._layers, strict=True):
            owner, _, last = name.rpartition(".")
            setattr(model.get_submodule(owner), last, layer)

    def call(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """Call one of the functions above on all servers; their answers."""
        return [answer.wait() for answer in self.begin(function, *arguments)]

    def begin(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """The same without waiting: futures of the answers."""
        return self._begin(function, [arguments] * self._servers)

    def state(self) -> dict[str, tuple[Tensor, dict[str, Any]]]:
        """Name of each table -> its weight and its optimizer's state, whole."""
        answers = self.call(state)
        whole = {}
        for name in self.names:
            weights = [weights[name] for weights, _ in answers]
            states = [states[name] for _, states in answers]
            # Entries such as exp_avg are cut as the weight is; others, such as step, all servers
            # have alike.
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
        torch.futures.wait_all(self._begin(take_state, list(zip(weights, states, strict=True))))

    def _cut(self, weight: Tensor) -> list[Tensor]:
        return [piece.contiguous() for piece in torch.tensor_split(weight, self._servers, dim=1)]

    @staticmethod
    def _begin(function: Callable[..., Any], by_server: Sequence[tuple[Any, ...]]) -> list[Any]:
        return [
            rpc.rpc_async(server_name(number), function, args=arguments)
            for number, arguments in enumerate(by_server)
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
    tables = {
        name: layer
        for name, layer in model.named_modules()
        if isinstance(layer, nn.EmbeddingBag | nn.Embedding)
    }
    named = matched(patterns, tables, "strategy.tables", "table")
    bags = [name for name, layer in tables.items() if isinstance(layer, nn.EmbeddingBag)]
    chosen = [name for name in tables if name in (named if patterns else bags)]
    if not chosen:
        valid = f"valid tables: {names_of(tables) or 'none'}"
        raise ValueError(
            f"strategy.tables: {type(model).__name__} has no nn.EmbeddingBag for the servers; name"
            f" nn.Embedding layers ({valid}), or use kind: ddp"
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
                f" not on the servers; remove {name}"
            )
        if layer.embedding_dim < servers:
            raise ValueError(
                f"strategy.tables: {name} has {layer.embedding_dim} columns for {servers} servers;"
                f" set servers to at most {layer.embedding_dim}"
            )
        try:
            describe(layer)
        except ValueError as error:
            raise ValueError(f"strategy.tables: {name}: {error}") from None
    # DistributedDataParallel refuses a model without a parameter that needs a gradient.
    on_servers = {f"{name}.weight" for name in chosen}
    if not any(
        item.requires_grad for name, item in model.named_parameters() if name not in on_servers
    ):
        raise ValueError(
            f"strategy.tables: {type(model).__name__} has nothing to train besides its tables;"
            " leave one of them out"
        )


def _table(model: nn.Module, name: str) -> nn.Embedding | nn.EmbeddingBag:
    return cast("nn.Embedding | nn.EmbeddingBag", model.get_submodule(name))


def _is_like(value: Any, weight: Tensor) -> bool:
    return isinstance(value, torch.Tensor) and value.shape == weight.shape


def _joined(values: Sequence[Any], weights: Sequence[Tensor]) -> Any:
    """An entry of the optimizer's state: cut as the weights are, or the same everywhere."""
    if all(_is_like(value, weight) for value, weight in zip(values, weights, strict=True)):
        return torch.cat(list(values), dim=1)
    return values[0]

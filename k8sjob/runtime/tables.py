"""Tables of embeddings whose columns lie on parameter servers.

Each server has some columns of every table, so that all of them work on every batch, and one
server or five give the same numbers. Here is the side of the servers: functions that trainers call
by RPC. What a server holds is the module's own, since calls find nothing else.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from typing import TYPE_CHECKING, Any, Final

import torch
import torch.distributed.autograd as dist_autograd
from torch import nn

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor
    from torch.optim import Optimizer

__all__ = [
    "Recipe",
    "accumulate",
    "describe",
    "find",
    "keep",
    "make_optimizer",
    "set_rates",
    "state",
    "step",
    "take_state",
]

Recipe = tuple[type[nn.Embedding | nn.EmbeddingBag], dict[str, Any]]
"""A kind of table and what it is made with, its weight and its width aside."""

_SHARED: Final = ("padding_idx", "scale_grad_by_freq", "sparse")
_OF_BAGS: Final = ("mode", "include_last_offset")


def describe(table: nn.Embedding | nn.EmbeddingBag) -> Recipe:
    """How another of its kind is made.

    Raises:
        ValueError: it has a setting that needs whole rows.
    """
    if table.max_norm is not None:
        raise ValueError("max_norm needs whole rows, and a server has columns; leave it out")
    bag = isinstance(table, nn.EmbeddingBag)
    names = (*_SHARED, *(_OF_BAGS if bag else ()))
    kind = nn.EmbeddingBag if bag else nn.Embedding
    return kind, {name: getattr(table, name) for name in names}


# --- what trainers call on a server ---------------------------------------------------------------


class _Held:
    """The tables of this server, and the one optimizer of all of them."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.tables: dict[str, nn.Embedding | nn.EmbeddingBag] = {}
        self.optimizer: Optimizer | None = None
        self.sums: dict[int, dict[Tensor, Tensor]] = defaultdict(dict)

    @property
    def weights(self) -> dict[str, Tensor]:
        return {name: table.weight for name, table in self.tables.items()}


_HELD: Final = _Held()


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
    """Make the optimizer of this server's tables, like that of the trainers.

    Args:
        kind: its class.
        pickled: what the trainers' is pickled as, with one group and no parameters in it.
    """
    optimizer = kind.__new__(kind)
    (group,) = pickled["param_groups"]
    own = {**group, "params": list(_HELD.weights.values())}
    optimizer.__setstate__({**pickled, "param_groups": [own], "state": defaultdict(dict)})
    _HELD.optimizer = optimizer


def accumulate(trainer: int, context: int) -> None:
    """Keep a trainer's gradients of one batch for its next step.

    Args:
        trainer: its rank.
        context: of the batch, as torch.distributed.autograd counts them.
    """
    gradients = dist_autograd.get_gradients(context)  # type: ignore[attr-defined]  # from C++
    with _HELD.lock:
        _add(_HELD.sums[trainer], gradients)


def step(trainer: int, context: int) -> None:
    """Step by a trainer's gradients of one batch, and of those that accumulate() has kept of it.

    Args:
        trainer: its rank.
        context: see accumulate().
    """
    gradients, optimizer = dist_autograd.get_gradients(context), _optimizer()  # type: ignore[attr-defined]  # from C++
    with _HELD.lock:
        sums = _HELD.sums.pop(trainer, {})
        _add(sums, gradients)
        for weight, gradient in sums.items():
            weight.grad = gradient
        optimizer.step()
        optimizer.zero_grad()


def set_rates(rates: Mapping[str, Any]) -> None:
    """Take over the trainers' learning rate and whatever else a schedule changes."""
    _optimizer().param_groups[0].update(rates)


def state() -> tuple[dict[str, Tensor], dict[str, dict[str, Any]]]:
    """This server's columns by table, and the optimizer's state of each."""
    with _HELD.lock:
        weights = {name: weight.detach().clone() for name, weight in _HELD.weights.items()}
        of = _optimizer().state
        return weights, {name: dict(of[weight]) for name, weight in _HELD.weights.items()}


def take_state(weights: Mapping[str, Tensor], moments: Mapping[str, dict[str, Any]]) -> None:
    """Take over what state() gave."""
    optimizer = _optimizer()
    with _HELD.lock, torch.no_grad():
        for name, weight in _HELD.weights.items():
            weight.copy_(weights[name])
            optimizer.state[weight] = dict(moments.get(name, {}))


def _add(sums: dict[Tensor, Tensor], gradients: Mapping[Tensor, Tensor]) -> None:
    for weight, gradient in gradients.items():
        sums[weight] = sums[weight] + gradient if weight in sums else gradient


def _optimizer() -> Optimizer:
    if _HELD.optimizer is None:
        raise RuntimeError("the tables have no optimizer yet")
    return _HELD.optimizer

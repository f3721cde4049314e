"""The repeated layers of a model: what is gathered, recomputed or compiled as one."""

from __future__ import annotations

import functools
import re
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

    from k8sjob.runtime.strategies.step import Options

_GRAPHS: Final = 8
"""Compiled graphs of a layer at most, as torch has it for a function."""
_SHOWN: Final = 40
"""Names in a message: a recommender has some dozens of tables."""


def find_blocks(model: nn.Module, patterns: Sequence[str] = ()) -> dict[str, nn.Module]:
    """Layers that make a unit, by name; no two of them overlap or share a parameter.

    Args:
        model: the model.
        patterns: names, or regular expressions that match a whole name; none: the members of
            nn.Sequential and nn.ModuleList that have parameters and share none with others.

    Raises:
        ValueError: a pattern matches no layer, or layers overlap or share a parameter.
    """
    if not patterns:
        # FSDP gathers a block for its own forward; a parameter of two blocks would be gathered for
        # one.
        shared = {name.rpartition(".")[0] for names in tied(model) for name in names}
        return {
            name: layer
            for name, layer in _members(model)
            if not any(_inside(owner, name) for owner in shared)
        }
    layers = {name: layer for name, layer in model.named_modules() if name}
    blocks = {name: layers[name] for name in matched(patterns, layers, "strategy.blocks", "layer")}
    _check(model, blocks)
    return blocks


def matched(patterns: Sequence[str], names: Collection[str], setting: str, noun: str) -> list[str]:
    """The names that equal a pattern, or match it whole; ValueError if none matches one of them."""
    names_matched: dict[str, None] = {}
    for pattern in patterns:
        fitting = [name for name in names if name == pattern or re.fullmatch(pattern, name)]
        if not fitting:
            valid = names_of(names) or "none"
            raise ValueError(f"{setting}: {pattern!r} matches no {noun}; valid {noun}s: {valid}")
        names_matched |= dict.fromkeys(fitting)
    return list(names_matched)


def tied(model: nn.Module) -> list[list[str]]:
    """The names of each parameter that has more than one."""
    # A Tensor hashes by its identity, so a parameter with several names has one entry.
    names: dict[nn.Parameter, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    return [aliases for aliases in names.values() if len(aliases) > 1]


def prepare_layers(model: nn.Module, options: Options, *, as_one: bool = False) -> list[nn.Module]:
    """Let blocks be recomputed and compiled, as the settings say; hooks and names stay.

    Args:
        model: the model.
        options: blocks, checkpoint_activations and, where there is one, compile.
        as_one: compile the model as a whole, not block by block.

    Returns:
        The blocks; empty if the model has none.
    """
    blocks = list(find_blocks(model, options["blocks"]).values())
    if options["checkpoint_activations"]:
        for layer in blocks:
            # On the instance: hooks stay outside of it, and no wrapper gets between the names.
            layer.forward = functools.partial(checkpoint, layer.forward, use_reentrant=False)
    if options.get("compile"):
        from torch._dynamo import config  # takes seconds

        # Where blocks have hooks at their borders, as under fsdp and mesh, each is a graph of its
        # own.
        layers = [model] if as_one or not blocks else blocks
        # Layers of one class share its code, which torch compiles for so many shapes and modes at
        # most: the layers behind those would run as they are.
        config.cache_size_limit = max(config.cache_size_limit, _GRAPHS * len(layers))
        for layer in layers:
            layer.forward = _Compiled(layer.forward)
    return blocks


class _Compiled:
    """A compiled forward; a copy of the layer, as for an average, compiles its own."""

    def __init__(self, forward: Callable[..., Any]) -> None:
        self._forward, self._compiled = forward, torch.compile(forward)

    def __call__(self, *inputs: Any, **named: Any) -> Any:
        return self._compiled(*inputs, **named)

    def __reduce__(self) -> Any:
        return _Compiled, (self._forward,)  # else a copy computes with the weights of this one


def _members(model: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """The outermost members of containers, that have parameters."""
    container = isinstance(model, nn.Sequential | nn.ModuleList)
    for name, child in model.named_children():
        is_container = isinstance(child, nn.Sequential | nn.ModuleList)
        if not container or is_container:
            yield from _members(child, f"{prefix}{name}.")
        elif any(True for _ in child.parameters()):
            yield f"{prefix}{name}", child


def _check(model: nn.Module, blocks: dict[str, nn.Module]) -> None:
    for name in blocks:
        outer = next((block for block in blocks if block != name and _inside(name, block)), None)
        if outer is not None:
            raise ValueError(
                f"strategy.blocks: {name!r} is inside {outer!r}, which is a block too; leave one"
                " out"
            )
    for names in tied(model):
        owners = {next((b for b in blocks if _inside(name, b)), "") for name in names}
        if len(owners) > 1:
            raise ValueError(
                f"strategy.blocks: {' and '.join(names)} are one parameter and must be in one "
                "block, or in none; leave these blocks out"
            )


def _inside(name: str, outer: str) -> bool:
    return name == outer or name.startswith(f"{outer}.")


def names_of(layers: Iterable[str]) -> str:
    """The first names, for a message."""
    names = list(layers)
    return f"{', '.join(names[:_SHOWN])}{', ...' if len(names) > _SHOWN else ''}"

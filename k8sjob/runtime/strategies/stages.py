"""Stages of a model that is a chain of layers.

The chain is an nn.Sequential, nested ones included. A stage is the same model with the layers of
other stages gone: what is left keeps its name, and so do checkpoints.
"""

from __future__ import annotations

from collections import defaultdict
from itertools import pairwise
from typing import TYPE_CHECKING

from torch import nn

from k8sjob.runtime.strategies.blocks import tied

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

__all__ = ["cut", "keep_stage"]


def cut(model: nn.Module, splits: Sequence[str]) -> list[list[str]]:
    """The names of the layers of each stage.

    Args:
        model: a chain.
        splits: names of the layers that begin a new stage, in the chain's order.

    Raises:
        ValueError: the model is no chain, a split is no layer of it or out of order, or a
            parameter would be in two stages.
    """
    if not isinstance(model, nn.Sequential):
        raise ValueError(  # noqa: TRY004 - a model that a setting does not fit
            f"strategy.splits: {type(model).__name__} is not a chain of layers, so that it cannot"
            " be cut; make it an nn.Sequential of its parts"
        )
    links = list(_links(model))
    for split in splits:
        if split not in links:
            raise ValueError(
                f"strategy.splits: {split!r} is no layer of the chain; valid layers:"
                f" {', '.join(links)}"
            )
    begins = [0, *(links.index(split) for split in splits), len(links)]
    for before, after in pairwise(begins):
        if after <= before:
            raise ValueError(
                f"strategy.splits: {', '.join(splits)} leave a stage without layers; name them in"
                f" the chain's order, which is {', '.join(links)}, without the first and twice none"
            )
    stages = [links[before:after] for before, after in pairwise(begins)]
    _check(model, stages)
    return stages


def keep_stage(model: nn.Module, layers: Sequence[str]) -> None:
    """Replace all layers of a chain but these by nn.Identity."""
    for name in list(_links(model)):
        if name not in layers:
            owner, _, last = name.rpartition(".")
            setattr(model.get_submodule(owner), last, nn.Identity())


def _links(model: nn.Module) -> Iterator[str]:
    """All layers by name; one that is used in several places has several names."""
    chains = {""}
    for name, module in model.named_modules(remove_duplicate=False):
        if name and name.rpartition(".")[0] in chains:
            if isinstance(module, nn.Sequential):
                chains.add(name)
            else:
                yield name


def _check(model: nn.Module, cut: list[list[str]]) -> None:
    for number, layers in enumerate(cut):
        modules = [model.get_submodule(layer) for layer in layers]
        if not any(item.requires_grad for module in modules for item in module.parameters()):
            raise ValueError(
                f"strategy.splits: stage {number} ({', '.join(layers)}) has nothing to train;"
                " split elsewhere"
            )
    for names in tied(model):
        _check_together(names, "parameter", cut)
    for names in _used_again(model):
        _check_together(names, "layer", cut)


def _check_together(names: Sequence[str], what: str, cut: list[list[str]]) -> None:
    """Refuse what has several names, in several stages."""
    owners = {
        number
        for number, layers in enumerate(cut)
        for layer in layers
        if any(f"{name}.".startswith(f"{layer}.") or layer.startswith(f"{name}.") for name in names)
    }
    if len(owners) > 1:
        raise ValueError(
            f"strategy.splits: {' and '.join(names)} are one {what}, in stages"
            f" {', '.join(map(str, sorted(owners)))}; split so that they share a stage"
        )


def _used_again(model: nn.Module) -> list[list[str]]:
    """The names of each layer that has several, and a state or layers of its own."""
    names: defaultdict[nn.Module, list[str]] = defaultdict(list)
    for name, module in model.named_modules(remove_duplicate=False):
        names[module].append(name)
    return [
        found
        for module, found in names.items()
        if len(found) > 1 and (isinstance(module, nn.Sequential) or module.state_dict())
    ]

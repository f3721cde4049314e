"""The layout map: which tensor of a model, by its name, is divided along which dimension.

A key is a name, or a regular expression that matches a whole name; a name comes before regular
expressions. Names are those of parameters, and `<layer>.output`.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from k8sjob.runtime.strategies.blocks import names_of

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

    from torch import nn

    Axes = Sequence[str | None]
    """One mesh axis, or None, for each dimension of a tensor."""

_OUTPUT = ".output"


def parameters(model: nn.Module, layout: Mapping[str, Axes]) -> dict[str, int]:
    """Dimension along which each parameter is divided, by all names of a tied one."""
    chosen = _chosen(model, layout)
    dims: dict[nn.Parameter, tuple[str, int | None]] = {}
    names: dict[str, int] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if name not in chosen:
            continue
        axes = chosen[name]
        check_axes(name, axes, parameter.ndim)
        if "data" in axes:
            raise ValueError(
                f"strategy.layout: {name} is a parameter, and those are the same along data; write"
                " null there, or use kind: fsdp, which divides them along data"
            )
        dim = model_dim(axes)
        first, before = dims.setdefault(parameter, (name, dim))
        if before != dim:
            raise ValueError(
                f"strategy.layout: {first} and {name} are one parameter, and their layouts differ; "
                "give both the same, or one of them none"
            )
    for name, parameter in model.named_parameters(remove_duplicate=False):
        _, along = dims.get(parameter, ("", None))
        if along is not None:
            names[name] = along
    return names


def outputs(model: nn.Module, layout: Mapping[str, Axes]) -> dict[str, Axes]:
    """Name of each layer whose output has a layout -> that layout."""
    chosen = _chosen(model, layout)
    return {
        name: chosen[f"{name}{_OUTPUT}"]
        for name, _ in model.named_modules()
        if f"{name}{_OUTPUT}" in chosen
    }


def model_dim(axes: Axes) -> int | None:
    """The dimension that is divided along the axis model."""
    return list(axes).index("model") if "model" in axes else None


def key_for(name: str, layout: Mapping[str, Axes]) -> str | None:
    """The key whose layout a name has, or None; ValueError if several expressions match."""
    if name in layout:
        return name
    keys = [key for key in layout if re.fullmatch(key, name)]
    if len(keys) > 1:
        raise ValueError(
            f"strategy.layout: {' and '.join(map(repr, keys))} both match {name}; make them more"
            f" specific, or give {name} its own key"
        )
    return keys[0] if keys else None


def check_used(layout: Mapping[str, Axes], used: Collection[str], names: Iterable[str]) -> None:
    """Refuse a key that no name has; `used` are those that one of the `names` has."""
    for key in layout:
        if key not in used:
            raise ValueError(
                f"strategy.layout: {key!r} matches no parameter and no output; valid names:"
                f" {names_of(names)}"
            )


def check_axes(name: str, axes: Axes, ndim: int) -> None:
    """Refuse a layout that has not one axis or None for each dimension."""
    if len(axes) != ndim:
        raise ValueError(
            f"strategy.layout: {name} has {ndim} dimensions, and its layout {list(axes)} has"
            f" {len(axes)}; write one axis or null for each"
        )


def check_size(name: str, dim: int, size: int, axis: str, ranks: int) -> None:
    """Refuse to divide a dimension into parts of several sizes."""
    if size % ranks:
        # The divisors, of which the smallest say enough.
        fitting = [str(n) for n in range(1, size + 1) if size % n == 0][:8]
        raise ValueError(
            f"strategy.layout: {name} has {size} along dimension {dim}, which does not divide by"
            f" mesh axis {axis}={ranks}; set {axis} to {', '.join(fitting)}, or write null"
        )


def _chosen(model: nn.Module, layout: Mapping[str, Axes]) -> dict[str, Axes]:
    """Every name that has a layout."""
    names = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    # Not of the model itself, whose name is empty: its output goes to the loss whole.
    names += [f"{name}{_OUTPUT}" for name, _ in model.named_modules() if name]
    chosen: dict[str, str] = {}
    for name in names:
        key = key_for(name, layout)
        if key is not None:
            chosen[name] = key
    check_used(layout, set(chosen.values()), names)
    return {name: layout[key] for name, key in chosen.items()}

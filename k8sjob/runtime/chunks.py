"""A check of what a checkpoint says of its tensors: the chunks make up each of them, exactly.

Torch's reader trusts the description: what no chunk covers stays uninitialised memory.
"""

from __future__ import annotations

import math
from itertools import pairwise
from typing import TYPE_CHECKING, Any, cast

import torch

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

__all__ = ["problem"]

_Box = tuple[tuple[int, int], ...]
"""(start, stop) in each dimension."""


def problem(metadata: Metadata, sizes: Mapping[str, int]) -> str | None:
    """Why a description cannot be read safely: the first tensor that is not whole; None: all are.

    Args:
        metadata: what torch wrote, of plain tensors alone.
        sizes: bytes of the checkpoint's files, by name.
    """
    for name, about in metadata.state_dict_metadata.items():
        try:
            wrong = _wrong(name, cast("TensorStorageMetadata", about), metadata.storage_data, sizes)
        except (AttributeError, TypeError, ValueError) as error:
            wrong = f"is not described as torch does it: {error}"
        if wrong:
            return f"the tensor {name} {wrong}"
    return None


def _wrong(
    name: str, about: TensorStorageMetadata, places: Mapping[Any, Any], sizes: Mapping[str, int]
) -> str:
    from torch.distributed.checkpoint.metadata import MetadataIndex

    shape: Any = about.size  # of a pickle, so of whatever type
    dtype = about.properties.dtype
    if not isinstance(shape, torch.Size) or min(shape, default=0) < 0:
        return f"has the shape {shape!r}"
    if not isinstance(dtype, torch.dtype):
        return f"has the type {dtype!r}"
    boxes: set[_Box] = set()
    for chunk in about.chunks:
        pairs = zip(chunk.offsets, chunk.sizes, strict=True)
        box = tuple((start, start + size) for start, size in pairs)
        if not all(0 <= a <= b <= end for (a, b), end in zip(box, shape, strict=True)):
            return f"has the shape {tuple(shape)}, and a chunk at {_region(box)} outside of it"
        if not (elements := math.prod(chunk.sizes)):
            continue
        boxes.add(box)
        place = places.get(MetadataIndex(name, chunk.offsets))
        if place is None:
            return f"has a chunk at {_region(box)} that is in no file"
        needed, file = elements * dtype.itemsize, place.relative_path
        there = min(place.length, sizes[file] - place.offset)
        if place.offset < 0 or there < needed:
            held = f"of which {file} has {max(0, there):,}"
            return f"has a chunk at {_region(box)} of {needed:,} bytes, {held}"
    fault = _uncovered(tuple(shape), boxes) if math.prod(shape) else ""
    return f"has the shape {tuple(shape)}, and {fault}" if fault else ""


def _uncovered(shape: tuple[int, ...], boxes: Collection[_Box], at: _Box = ()) -> str:
    """Where boxes within a shape leave a gap or overlap; empty where they are its exact cover.

    Goes along one dimension after the other, slab by slab between the boxes' edges.
    """
    dimension = len(at)
    if not boxes:
        return f"no chunk holds {_region(at, shape)}"
    if dimension == len(shape):
        return f"{len(boxes)} chunks hold {_region(at)}" if len(boxes) > 1 else ""
    upcoming = sorted(boxes, key=lambda box: box[dimension], reverse=True)
    edges = {0, shape[dimension], *(edge for box in boxes for edge in box[dimension])}
    here: list[_Box] = []
    for start, stop in pairwise(sorted(edges)):
        here = [box for box in here if box[dimension][1] > start]
        while upcoming and upcoming[-1][dimension][0] <= start:
            here.append(upcoming.pop())
        if fault := _uncovered(shape, here, (*at, (start, stop))):
            return fault
    return ""


def _region(box: _Box, shape: tuple[int, ...] = ()) -> str:
    """A box as an index of Python's, the rest of a shape's dimensions whole."""
    shown = [f"{start}:{stop}" for start, stop in box] + [f"0:{n}" for n in shape[len(box) :]]
    return f"[{', '.join(shown)}]"

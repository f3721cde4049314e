"""Format of a checkpoint folder: each rank's part of the tensors, and one file of the rest.

The tensors have the form of torch.distributed.checkpoint, whose own tools can read them; torch
describes them in a pickle, from which only plain descriptions are accepted here. Tensors are read
piece by piece as they are needed.
"""

from __future__ import annotations

import io
import math
import pickle
from collections import Counter
from copy import copy
from enum import EnumMeta
from itertools import pairwise
from typing import TYPE_CHECKING, Any, ClassVar, Final, cast

import torch

from k8sjob.runtime.checkpoint.store import read_digests

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping
    from pathlib import Path

    from torch import Tensor
    from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

    from k8sjob.runtime.checkpoint.store import Digest

METADATA: Final = ".metadata"
"""Torch's description of the tensors: which part of which is where."""
OTHERS: Final = "others.pt"
"""Everything but the tensors of model and optimizer, and where each of those belongs."""
_MARK: Final = "k8sjob/tensor"

_DESCRIPTIONS: Final = {
    "torch.distributed.checkpoint.metadata": (
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    ),
    "torch.distributed.checkpoint.filesystem": ("_StorageInfo",),
    "torch": ("Size",),
    "torch.serialization": ("_get_layout",),
}
"""Classes that describe, by module; and the function by which torch pickles `torch.strided`."""


class Stored:
    """A tensor of some shape and dtype in a checkpoint, read when its content is asked for."""

    def __init__(self, name: str, folder: _Folder) -> None:
        about = cast("TensorStorageMetadata", folder.metadata.state_dict_metadata[name])
        self.shape: torch.Size = about.size
        self.dtype: torch.dtype = about.properties.dtype
        self._name, self._folder = name, folder

    def whole(self) -> Tensor:
        """The whole tensor, on the CPU; ValueError if it cannot be read, or without memory."""
        try:
            target = torch.empty(self.shape, dtype=self.dtype)
        except RuntimeError as error:
            needed = self.shape.numel() * self.dtype.itemsize
            raise ValueError(f"no memory for {self._name}, {needed:,} bytes") from error
        self._folder.fill(self._name, target)
        return target

    def divided_as(self, like: Tensor) -> Tensor:
        """This rank's part of it, divided and placed as a DTensor of the same shape."""
        target = torch.empty_like(like, dtype=self.dtype)
        self._folder.fill(self._name, target)
        return target


def gathered(nest: Any) -> Any:
    """A nest of containers with whole tensors in place of stored ones."""
    return changed(nest, lambda value: value.whole() if isinstance(value, Stored) else value)


def on_host(nest: Any) -> Any:
    """A nest of containers with copies of its tensors in host memory."""

    def copied(value: Any) -> Any:
        tensor = isinstance(value, torch.Tensor)
        return value.detach().to("cpu", copy=True) if tensor else value

    return changed(nest, copied)


def changed(nest: Any, change: Callable[[Any], Any]) -> Any:
    """The same nest with each of its values, containers included, changed from the top down."""
    new = change(nest)
    if new is not nest:
        return new
    if isinstance(nest, dict) and not isinstance(nest, Counter):  # of a scheduler
        return {key: changed(value, change) for key, value in nest.items()}
    if type(nest) in {list, tuple}:
        return type(nest)(changed(value, change) for value in nest)
    return Counter(nest) if isinstance(nest, Counter) else nest


def leaves(nest: Any) -> Iterator[Any]:
    """The values in a nest of dicts, lists and tuples that are none of these."""
    if isinstance(nest, dict | list | tuple):
        for value in nest.values() if isinstance(nest, dict) else nest:
            yield from leaves(value)
    else:
        yield nest


def mark(nest: Any, name: str = "") -> tuple[Any, dict[str, Tensor]]:
    """Take the tensors out of a nest of dicts, lists and tuples.

    Returns:
        (the nest with a mark in the place of each tensor, the tensors by the names in the marks).
    """
    if isinstance(nest, torch.Tensor):
        return {_MARK: name}, {name: nest}
    tensors: dict[str, Tensor] = {}

    def below(key: object, value: Any) -> Any:
        marked, found = mark(value, f"{name}.{key}" if name else str(key))
        if both := tensors.keys() & found.keys():
            raise ValueError(f"two tensors of the state are called {min(both)}: rename a key")
        tensors.update(found)
        return marked

    if isinstance(nest, dict) and not isinstance(nest, Counter):
        return {key: below(key, value) for key, value in nest.items()}, tensors
    if isinstance(nest, list | tuple):
        return type(nest)(below(at, value) for at, value in enumerate(nest)), tensors
    return copy(nest), tensors


def read_others(content: bytes) -> dict[str, Any]:
    """Plain values and tensors from a file's content; ValueError if it is damaged or holds more."""
    try:
        state = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    except Exception as error:
        # torch raises many types: pickle.UnpicklingError, RuntimeError, EOFError, ...
        raise ValueError(f"it cannot be loaded: {str(error).splitlines()[0]}") from error
    if not isinstance(state, dict):
        raise ValueError(f"it holds a {type(state).__name__}, not a dict: another program's file")  # noqa: TRY004 - of a file's content, not of an argument
    return state


def read(folder: Path) -> dict[str, Any]:
    """The state in a checkpoint's folder, with a Stored for each tensor of model and optimizer.

    Digests are not checked. ValueError: it is damaged, or holds more than tensors and plain values.
    """
    files = read_digests(folder)
    try:
        others = read_others((folder / OTHERS).read_bytes())
    except FileNotFoundError:
        raise ValueError(f"it is incomplete or damaged: {OTHERS} is missing") from None
    except ValueError as error:
        raise ValueError(f"{OTHERS}: {error}") from error
    opened = _Folder(folder, _metadata(folder, files))

    def stored(value: Any) -> Any:
        if not (isinstance(value, dict) and value.keys() == {_MARK}):
            return value
        if value[_MARK] not in opened.metadata.state_dict_metadata:
            raise ValueError(f"{METADATA} lacks {value[_MARK]}")
        return Stored(value[_MARK], opened)

    marked = others.pop("marked", None)
    if not isinstance(marked, dict):
        raise ValueError(f"{OTHERS} does not say where the tensors belong")  # noqa: TRY004 - see above
    return {**others, **changed(marked, stored)}


class _Folder:
    """The tensors of one folder, through torch's reader."""

    def __init__(self, path: Path, metadata: Metadata) -> None:
        from torch.distributed.checkpoint.filesystem import FileSystemReader

        self.path, self.metadata = path, metadata
        self._reader = FileSystemReader(path)
        self._reader.set_up_storage_reader(metadata, is_coordinator=True)

    def fill(self, name: str, target: Tensor) -> None:
        """Read this rank's part of a stored tensor; ValueError if the file does not match."""
        from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner

        planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        planner.set_up_planner({name: target}, self.metadata, is_coordinator=True)
        try:
            self._reader.read_data(planner.create_local_plan(), planner).wait()
        except Exception as error:
            # For a file of another program torch may raise any error.
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            raise ValueError(f"{self.path}: {name} cannot be loaded: {reason}") from error


_InPython: Any = pickle._Unpickler  # noqa: SLF001 - its parts can be replaced


class _Descriptions(_InPython):  # type: ignore[misc]  # see above
    """Makes descriptions of tensors, and nothing else: no other name is ever looked up."""

    dispatch: ClassVar = dict(_InPython.dispatch)

    def _build(self) -> None:
        """Fill an object; a class or a function stays as it is."""
        if callable(self.stack[-2]):
            raise ValueError(f"{METADATA} changes {self.stack[-2]!r}, which describes no tensor")  # noqa: TRY004 - of a file's content
        self.load_build()

    dispatch[pickle.BUILD[0]] = _build

    def find_class(self, module: str, name: str) -> Any:
        """The class of that name, where it is one that describes."""
        if module == "torch" and isinstance(found := vars(torch).get(name), torch.dtype):
            return found
        if (module, name) == ("builtins", "getattr"):
            return _member
        if name not in _DESCRIPTIONS.get(module, ()):
            raise ValueError(f"{METADATA} asks for {module}.{name}, which describes no tensor")
        return super().find_class(module, name)


def _member(kind: Any, name: Any) -> Any:
    """The member of an enumeration, which Python 3.11.0 to 3.11.3 pickle as a call of getattr."""
    if not isinstance(kind, EnumMeta):
        raise ValueError(f"{METADATA} asks for {name!r} of {kind!r}, which describes no tensor")  # noqa: TRY004 - of a file's content
    return kind[name]


def _metadata(folder: Path, files: dict[str, Digest]) -> Metadata:
    """Torch's description; ValueError unless it is of whole tensors in these files."""
    from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

    try:
        found = _Descriptions(io.BytesIO((folder / METADATA).read_bytes())).load()
    except FileNotFoundError:
        raise ValueError(f"it is incomplete or damaged: {METADATA} is missing") from None
    except ValueError:
        raise
    except Exception as error:
        # A pickle that somebody wrote may raise whatever it likes.
        raise ValueError(f"{METADATA} cannot be read: {type(error).__name__}: {error}") from error
    if not isinstance(found, Metadata):
        raise ValueError(f"{METADATA} holds a {type(found).__name__}")  # noqa: TRY004 - see above
    try:
        tensors = all(
            isinstance(v, TensorStorageMetadata) for v in found.state_dict_metadata.values()
        )
        places = {place.relative_path for place in found.storage_data.values()}
        plain = not any(
            getattr(place, "transform_descriptors", None) for place in found.storage_data.values()
        )
    except AttributeError as error:
        raise ValueError(f"{METADATA} describes no tensors: {error}") from error
    if not (tensors and plain):
        raise ValueError(f"{METADATA} describes something that is not a plain tensor")
    if odd := places - files.keys():
        raise ValueError(f"{METADATA} names {min(odd)}, of which there is no digest")
    if wrong := _problem(found, {name: digest.size for name, digest in files.items()}):
        raise ValueError(f"{METADATA}: {wrong}")
    return found


_Box = tuple[tuple[int, int], ...]
"""(start, stop) in each dimension."""


def _problem(metadata: Metadata, sizes: Mapping[str, int]) -> str | None:
    """The first tensor that the chunks of a description do not make up exactly; None: none.

    Torch's reader trusts the description: what no chunk covers stays uninitialized memory.
    `sizes` are the bytes of the checkpoint's files, by name.
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
    """The gap or overlap that boxes within a shape leave; empty if they cover it exactly.

    Goes through one dimension after the other, slab by slab between the boxes' edges.
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
    """A box as a Python index; the other dimensions of a shape are whole."""
    shown = [f"{start}:{stop}" for start, stop in box] + [f"0:{n}" for n in shape[len(box) :]]
    return f"[{', '.join(shown)}]"

"""A checkpoint of which each rank wrote a part, read piece by piece as it is needed.

The tensors are in the form of torch.distributed.checkpoint, whose own tools can read them; torch
describes them in a pickle, of which nothing but plain descriptions is taken here. What is no tensor
is in one more file.
"""

from __future__ import annotations

import io
import pickle
from collections import Counter
from copy import copy
from typing import TYPE_CHECKING, Any, ClassVar, Final, cast

import torch

from k8sjob.runtime import chunks, digests

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from torch import Tensor
    from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

    from k8sjob.runtime.digests import Digest

__all__ = ["METADATA", "OTHERS", "Stored", "gathered", "mark", "on_host", "read", "read_others"]

METADATA: Final = ".metadata"
"""Torch's description of the tensors: which part of which is where."""
OTHERS: Final = "others.pt"
"""What is no tensor of the model's or the optimizer's, and where each of these belongs."""
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
    """A tensor in a checkpoint, read when its content is asked for.

    Attributes:
        shape: of the whole tensor.
        dtype: its type.
    """

    def __init__(self, name: str, folder: _Folder) -> None:
        about = cast("TensorStorageMetadata", folder.metadata.state_dict_metadata[name])
        self.shape: torch.Size = about.size
        self.dtype: torch.dtype = about.properties.dtype
        self._name, self._folder = name, folder

    def whole(self) -> Tensor:
        """The whole tensor, on the CPU.

        Raises:
            ValueError: it cannot be read, or there is not enough memory for it.
        """
        try:
            target = torch.empty(self.shape, dtype=self.dtype)
        except RuntimeError as error:
            needed = self.shape.numel() * self.dtype.itemsize
            raise ValueError(f"no memory for {self._name}, {needed:,} bytes") from error
        self._folder.fill(self._name, target)
        return target

    def divided_as(self, like: Tensor) -> Tensor:
        """This rank's part of it, divided and placed as a DTensor is; the rest is not read.

        Args:
            like: a DTensor of the same shape.
        """
        target = torch.empty_like(like, dtype=self.dtype)
        self._folder.fill(self._name, target)
        return target


def gathered(nest: Any) -> Any:
    """The same nest of containers with whole tensors in place of stored ones."""
    return _replace(nest, lambda value: value.whole() if isinstance(value, Stored) else value)


def on_host(nest: Any) -> Any:
    """The same nest with tensors of its own in host memory in place of whatever tensors it has."""

    def copy(value: Any) -> Any:
        tensor = isinstance(value, torch.Tensor)
        return value.detach().to("cpu", copy=True) if tensor else value

    return _replace(nest, copy)


def mark(nest: Any, name: str = "") -> tuple[Any, dict[str, Tensor]]:
    """Take the tensors out of a nest of dicts, lists and tuples.

    Returns:
        (the nest with a mark in the place of each tensor, the tensors by the names in the marks).

    Raises:
        ValueError: two tensors would have the same name.
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
    """What a file of plain values and tensors holds, its tensors on the CPU.

    Raises:
        ValueError: it is torn, or holds anything else.
    """
    try:
        state = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    except Exception as error:
        # torch raises whatever it meets: pickle.UnpicklingError, RuntimeError, EOFError, ...
        raise ValueError(f"it cannot be loaded: {str(error).splitlines()[0]}") from error
    if not isinstance(state, dict):
        raise ValueError(f"it holds a {type(state).__name__}, not a dict: another program's file")  # noqa: TRY004 - of a file's content, not of an argument
    return state


def read(folder: Path) -> dict[str, Any]:
    """The state in a checkpoint's folder, with a Stored for each tensor of model and optimizer.

    Its digests are the caller's business.

    Raises:
        ValueError: it is torn, or holds anything but tensors and plain values.
        OSError: it cannot be read.
    """
    files = digests.read(folder)
    try:
        others = read_others((folder / OTHERS).read_bytes())
    except FileNotFoundError:
        raise ValueError(f"it is torn: {OTHERS} is missing") from None
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
    return {**others, **_replace(marked, stored)}


class _Folder:
    """The tensors of one folder, through torch's reader."""

    def __init__(self, path: Path, metadata: Metadata) -> None:
        from torch.distributed.checkpoint.filesystem import FileSystemReader

        self.path, self.metadata = path, metadata
        self._reader = FileSystemReader(path)
        self._reader.set_up_storage_reader(metadata, is_coordinator=True)

    def fill(self, name: str, target: Tensor) -> None:
        """Read what a tensor has of a stored one.

        Raises:
            ValueError: the file holds something else than its description says.
        """
        from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner

        planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        planner.set_up_planner({name: target}, self.metadata, is_coordinator=True)
        try:
            self._reader.read_data(planner.create_local_plan(), planner).wait()
        except Exception as error:
            # Of a file that another program made, torch raises whatever it meets.
            said = (str(error).splitlines() or [type(error).__name__])[0]
            raise ValueError(f"{self.path}: {name} cannot be loaded: {said}") from error


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
        if name not in _DESCRIPTIONS.get(module, ()):
            raise ValueError(f"{METADATA} asks for {module}.{name}, which describes no tensor")
        return super().find_class(module, name)


def _metadata(folder: Path, files: dict[str, Digest]) -> Metadata:
    """Torch's description, where all of it is of whole tensors in this folder's files.

    Raises:
        ValueError: it is torn or describes anything else.
    """
    from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

    try:
        found = _Descriptions(io.BytesIO((folder / METADATA).read_bytes())).load()
    except FileNotFoundError:
        raise ValueError(f"it is torn: {METADATA} is missing") from None
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
        raise ValueError(f"{METADATA} describes something that is no plain tensor")
    if odd := places - files.keys():
        raise ValueError(f"{METADATA} names {min(odd)}, of which there is no digest")
    if wrong := chunks.problem(found, {name: digest.size for name, digest in files.items()}):
        raise ValueError(f"{METADATA}: {wrong}")
    return found


def _replace(nest: Any, change: Callable[[Any], Any]) -> Any:
    """The same nest with each of its values, containers included, changed from the top down."""
    changed = change(nest)
    if changed is not nest:
        return changed
    if isinstance(nest, dict) and not isinstance(nest, Counter):  # of a scheduler
        return {key: _replace(value, change) for key, value in nest.items()}
    if type(nest) in {list, tuple}:
        return type(nest)(_replace(value, change) for value in nest)
    return Counter(nest) if isinstance(nest, Counter) else nest

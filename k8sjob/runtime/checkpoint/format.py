"""Format of a checkpoint folder: each rank's part of the tensors, and one file of the rest.

The tensors have the form of torch.distributed.checkpoint, whose own tools can read them; torch
describes them in a pickle, from which only plain descriptions are accepted here. Tensors are read
piece by piece as they are needed.
"""

from __future__ import annotations

import io
import pickle
import re
import zipfile
from collections import Counter
from copy import copy
from typing import TYPE_CHECKING, Any, Final, cast

import torch

from k8sjob.runtime.checkpoint.store import content_of, read_digests

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from torch import Tensor
    from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

    from k8sjob.runtime.checkpoint.store import Digest

METADATA: Final = ".metadata"
"""Torch's description of the tensors: which part of which is where."""
OTHERS: Final = "others.pt"
"""Everything but the tensors of model and optimizer, and where each of those belongs."""
_MARK: Final = "k8sjob/tensor"
_DAMAGED: Final = "it is incomplete or damaged"
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
        """The whole tensor, on the CPU; ValueError if it cannot be read."""
        # Uninitialized: its chunks, which fill() reads, cover all of it.
        target = torch.empty(self.shape, dtype=self.dtype)
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
    # MultiStepLR has its milestones in a Counter, and needs one again: a dict has no elements().
    if isinstance(nest, dict) and not isinstance(nest, Counter):  # of a scheduler
        return {key: changed(value, change) for key, value in nest.items()}
    # Not subclasses: a torch.Size has no tensors in it, and is to stay one.
    if type(nest) in {list, tuple}:
        return type(nest)(changed(value, change) for value in nest)
    return Counter(nest) if isinstance(nest, Counter) else nest


def mark(nest: Any, name: str = "") -> tuple[Any, dict[str, Tensor]]:
    """Take the tensors out of a nest of dicts, lists and tuples.

    Returns:
        (the nest with a mark in the place of each tensor, the tensors by the names in the marks).
    """
    if isinstance(nest, torch.Tensor):
        return {_MARK: name}, {name: nest}
    tensors: dict[str, Tensor] = {}

    def below(key: object, value: Any) -> Any:
        marked, part_tensors = mark(value, f"{name}.{key}" if name else str(key))
        # A key may have a dot itself: {"a.b": t} and {"a": {"b": t}} have one name.
        if both := tensors.keys() & part_tensors.keys():
            raise ValueError(f"two tensors of the state are called {min(both)}: rename a key")
        tensors.update(part_tensors)
        return marked

    if isinstance(nest, dict) and not isinstance(nest, Counter):
        return {key: below(key, value) for key, value in nest.items()}, tensors
    if isinstance(nest, list | tuple):
        return type(nest)(below(at, value) for at, value in enumerate(nest)), tensors
    # A copy, since the user's script may change what is not a tensor while the state is written.
    return copy(nest), tensors


def decode(content: bytes) -> dict[str, Any]:
    """The state in a file's content, on the CPU; ValueError if it is damaged or holds more."""
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            # A checkpoint of one file has no digests, and torch does not compare the checksums of
            # its archive.
            torn = archive.testzip()
    except Exception as error:
        # Of a damaged file zipfile may raise any error.
        raise ValueError(f"{_DAMAGED}: {error!s:.300} ({len(content)} bytes)") from error
    if torn:
        raise ValueError(f"{_DAMAGED}: {torn:.300} does not match its checksum")
    try:
        state = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    except Exception as error:
        # torch raises many types: pickle.UnpicklingError, RuntimeError, EOFError, ...
        # Its advice, weights_only=False or to allow a class, would run the file's code.
        lines = (line for line in str(error).splitlines() if not re.search("[Ww]eights.only", line))
        reason = next(filter(str.strip, lines), type(error).__name__).partition(". Please")[0]
        raise ValueError(f"it cannot be loaded: {reason.strip():.300}") from error
    if not isinstance(state, dict):
        raise ValueError(f"it holds a {type(state).__name__}, not a dict: another program's file")  # noqa: TRY004 - of a file's content, not of an argument
    return state


def read(folder: Path) -> dict[str, Any]:
    """The state in a checkpoint's folder, with a Stored for each tensor of model and optimizer.

    Digests are not checked. ValueError: it is damaged, or holds more than tensors and plain values.
    """
    files = read_digests(folder)
    if missing := {METADATA, OTHERS} - files.keys():
        raise ValueError(f"there is no digest of {min(missing)}")
    content = content_of(folder / OTHERS)
    try:
        values = decode(content)
    except ValueError as error:
        raise ValueError(f"{OTHERS}: {error}") from error
    opened = _Folder(folder, _metadata(folder, files))

    def stored(value: Any) -> Any:
        if not (isinstance(value, dict) and value.keys() == {_MARK}):
            return value
        if value[_MARK] not in opened.metadata.state_dict_metadata:
            raise ValueError(f"{METADATA} lacks {value[_MARK]}")
        return Stored(value[_MARK], opened)

    marked = values.pop("marked", None)
    if not isinstance(marked, dict):
        raise ValueError(f"{OTHERS} does not say where the tensors belong")  # noqa: TRY004 - see above
    return {**values, **changed(marked, stored)}


class _Folder:
    """The tensors of one folder, through torch's reader."""

    def __init__(self, path: Path, metadata: Metadata) -> None:
        # It takes a while, and most resumes of one file need none of it.
        from torch.distributed.checkpoint.filesystem import FileSystemReader

        self.path, self.metadata = path, metadata
        self._reader = FileSystemReader(path)
        self._reader.set_up_storage_reader(metadata, is_coordinator=True)

    def fill(self, name: str, target: Tensor) -> None:
        """Read this rank's part of a stored tensor; ValueError if the file does not match."""
        from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner

        # The names are those of mark(), which are flat already.
        planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        planner.set_up_planner({name: target}, self.metadata, is_coordinator=True)
        try:
            self._reader.read_data(planner.create_local_plan(), planner).wait()
        except Exception as error:
            # For a file of another program torch may raise any error.
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            raise ValueError(f"{self.path}: {name} cannot be loaded: {reason:.300}") from error


class _Descriptions(pickle.Unpickler):
    """Makes descriptions of tensors, and nothing else: no other name is ever looked up."""

    def find_class(self, module: str, name: str) -> Any:
        """The class of that name, where it is one that describes."""
        # By vars(): getattr would import modules that torch loads when they are first used.
        if module == "torch" and isinstance(dtype := vars(torch).get(name), torch.dtype):
            return dtype
        if (module, name) == ("builtins", "getattr"):
            return _member
        if name not in _DESCRIPTIONS.get(module, ()):
            raise ValueError(
                f"{METADATA} asks for {module:.100}.{name:.100}, which describes no tensor"
            )
        return super().find_class(module, name)


def _member(kind: Any, name: Any) -> Any:
    """The member of an enumeration, which Python 3.11.0 to 3.11.3 pickle as a call of getattr."""
    return kind.__members__[name]


def _metadata(folder: Path, files: dict[str, Digest]) -> Metadata:
    """Torch's description; ValueError unless it is of tensors in these files."""
    content = content_of(folder / METADATA)
    try:
        metadata: Metadata = _Descriptions(io.BytesIO(content)).load()
        names = {place.relative_path for place in metadata.storage_data.values()}
    except Exception as error:
        # A pickle that somebody wrote may raise whatever it likes.
        raise ValueError(f"{METADATA} cannot be read: {error!r:.300}") from error
    # Only what has a digest was compared; read_digests() accepts plain file names alone, so no path
    # leads out of the folder.
    if odd := names - files.keys():
        raise ValueError(f"{METADATA} names {min(odd):.300}, of which there is no digest")
    return metadata

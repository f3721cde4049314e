"""Format of a checkpoint folder: each rank's part of the tensors, and one file of the rest.

The tensors have the form of torch.distributed.checkpoint, whose own tools can read them; torch
describes them in a pickle, from which only plain descriptions are accepted here. Tensors are read
piece by piece as they are needed.
"""

from __future__ import annotations

import io
import math
import pickle
import re
import zipfile
from collections import Counter
from copy import copy
from enum import EnumMeta
from itertools import product
from typing import IO, TYPE_CHECKING, Any, ClassVar, Final, cast

import torch

from k8sjob.runtime.checkpoint import pickles
from k8sjob.runtime.checkpoint.store import content_of, read_digests

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping
    from pathlib import Path

    from torch import Tensor
    from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

    from k8sjob.runtime.checkpoint.store import Digest

METADATA: Final = ".metadata"
"""Torch's description of the tensors: which part of which is where."""
OTHERS: Final = "others.pt"
"""Everything but the tensors of model and optimizer, and where each of those belongs."""
_MARK: Final = "k8sjob/tensor"
_NAMES: Final = re.compile(
    r"collections (OrderedDict|Counter)|_codecs encode|torch (Size|[A-Z]\w*Storage|[a-z]\w*)"
    r"|torch\.storage \w+|torch\.serialization _get_layout"
    r"|torch\._utils _rebuild_(tensor|qtensor|sparse_tensor|meta_tensor|parameter)\w*"
)
"""What torch.save names in a checkpoint, as "module name". Torch would call more: a conversion to
another type, which copies, and text codecs, of which each doubles what the one before made."""

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
        # Uninitialized, as fill() overwrites all of it: _problem() has seen that the chunks cover
        # it.
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
    # A checkpoint of one file has no digests: the checksums of its zip archive show what is
    # damaged.
    _check_archive(io.BytesIO(content), len(content), checksums=True)
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
    # Tensors may share one storage; once they are copied, each has memory of its own.
    if (total := _bytes_of_tensors(state)) > pickles.MOST_SHARED * len(content):
        raise ValueError(f"its tensors have {total} bytes, and it has {len(content)}")
    return state


def _check_archive(stream: IO[bytes], size: int, *, checksums: bool = False) -> None:
    """Refuse what torch.save wrote, of `size` bytes, if it is damaged or becomes far larger."""
    try:
        # Anything may precede a zip archive; torch would load it as a pickle.
        begins = stream.read(4) == b"PK\x03\x04"
        with zipfile.ZipFile(stream) as archive:
            entries = archive.infolist()
            # torch.save compresses nothing, and what is compressed may unpack to any size.
            stored = all(entry.compress_type == zipfile.ZIP_STORED for entry in entries)
            fits = begins and stored and sum(entry.file_size for entry in entries) <= size
            torn = archive.testzip() if fits and checksums else None
        stream.seek(0)
        # By torch's own reader: of two entries of one name, another one may read the other.
        reader = torch._C.PyTorchFileReader(stream) if fits else None  # noqa: SLF001 - see above
        pickled = reader.get_record("data.pkl") if reader else b""
        stream.seek(0)
        if fits and not torn:
            pickles.check(pickled, size, _NAMES)
    except ValueError:  # with the reason of pickles.check
        raise
    except Exception as error:
        # For a file that somebody wrote zipfile may raise any error.
        raise ValueError(f"it is incomplete or damaged: {error!s:.300} ({size} bytes)") from error
    if not fits:
        raise ValueError(f"it is not of torch.save, or unpacks to more than its {size} bytes")
    if torn:
        raise ValueError(f"it is incomplete or damaged: {torn:.300} does not match its checksum")


def _bytes_of_tensors(value: Any) -> int:
    """The memory of all tensors in a nest, each as often as it occurs."""
    if isinstance(value, dict | list | tuple):
        values = value.values() if isinstance(value, dict) else value
        return sum(map(_bytes_of_tensors, values))
    if not isinstance(value, torch.Tensor):
        return 0
    dense = value.layout is torch.strided
    elements = value.numel() if dense else value._nnz()  # noqa: SLF001 - torch shows it to users
    return elements * value.itemsize


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
        from torch.distributed.checkpoint.filesystem import FileSystemReader

        # Defined here, since torch.distributed.checkpoint takes a while to import and most resumes
        # of one file need none of it.
        class Reader(FileSystemReader):
            """Torch's reader, which loads each part as a file of torch.save's."""

            def _slice_file(self, file: Any, sinfo: Any) -> Any:
                part: Any = super()._slice_file(file, sinfo)
                seek = part.seek

                def from_end(offset: int, whence: int = io.SEEK_SET) -> Any:
                    # Torch's own counts from the end in the wrong direction.
                    end = whence == io.SEEK_END
                    return seek(sinfo.length + offset) if end else seek(offset, whence)

                part.seek = from_end
                # Next, torch's reader loads this part: weights_only, but without a bound on what it
                # becomes.
                _check_archive(part, sinfo.length)
                return part

        self.path, self.metadata = path, metadata
        self._reader = Reader(path)
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


# Of pickle in C only find_class() can be replaced; this one shows its operations, too.
_InPython: Any = pickle._Unpickler  # noqa: SLF001 - its parts can be replaced


class _Descriptions(_InPython):  # type: ignore[misc]  # see above
    """Makes descriptions of tensors, and nothing else: no other name is ever looked up."""

    dispatch: ClassVar = dict(_InPython.dispatch)

    def _build(self) -> None:
        """Fill an object; a class or a function stays as it is."""
        # BUILD would set attributes of a class itself, such as __init__, for the rest of the
        # process.
        if callable(self.stack[-2]):
            raise ValueError(f"{METADATA} changes {self.stack[-2]!r}, which describes no tensor")  # noqa: TRY004 - of a file's content
        self.load_build()

    dispatch[pickle.BUILD[0]] = _build

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
    if not isinstance(kind, EnumMeta):
        raise ValueError(f"{METADATA} asks for {name!r:.99} of {kind!r:.99}, no description")  # noqa: TRY004 - of a file's content
    return kind[name]


def _metadata(folder: Path, files: dict[str, Digest]) -> Metadata:
    """Torch's description; ValueError unless it is of whole tensors in these files."""
    from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

    content = content_of(folder / METADATA)
    try:
        # No list of names is needed: find_class() of _Descriptions accepts few.
        pickles.check(content, len(content))
        metadata = _Descriptions(io.BytesIO(content)).load()
    except ValueError as error:
        raise ValueError(f"{METADATA}: {error!s:.300}") from error
    except Exception as error:
        # A pickle that somebody wrote may raise whatever it likes.
        raise ValueError(f"{METADATA} cannot be read: {error!r:.300}") from error
    if not isinstance(metadata, Metadata):
        raise ValueError(f"{METADATA} holds a {type(metadata).__name__}")  # noqa: TRY004 - see above
    try:
        # BUILD may have given these objects attributes of any type, or none: nothing is taken for
        # granted.
        described: list[Any] = list(metadata.state_dict_metadata.values())
        stored = list(metadata.storage_data.values())
        places: set[Any] = {place.relative_path for place in stored}
        plain = all(isinstance(text, str) for text in (*places, *metadata.state_dict_metadata))
        plain &= all(isinstance(about, TensorStorageMetadata) for about in described)
        # Newer versions of torch can compress parts by extensions, which they name here.
        plain &= not any(getattr(place, "transform_descriptors", None) for place in stored)
    except AttributeError as error:
        raise ValueError(f"{METADATA} describes no tensors: {error}") from error
    if not plain:
        raise ValueError(f"{METADATA} describes something that is not a plain tensor")
    # So no path leads out of the folder either: read_digests() accepts plain file names alone.
    if odd := places - files.keys():
        raise ValueError(f"{METADATA} names {min(odd):.300}, of which there is no digest")
    sizes = {name: files[name].size for name in places}
    if wrong := _problem(metadata, sizes, len(content)):
        raise ValueError(f"{METADATA}: {wrong}")
    return metadata


_Box = tuple[tuple[int, int], ...]
"""(start, stop) in each dimension."""


def _problem(metadata: Metadata, sizes: Mapping[str, int], size: int) -> str | None:
    """The first tensor that the chunks of a description do not make up exactly; None: none.

    Torch's reader trusts the description: what no chunk covers stays uninitialized memory, and a
    tensor of which there are few bytes is allocated whole. `sizes` are the bytes of the
    checkpoint's files, by name, and `size` those of the description.
    """
    chunks, remaining = 0, sum(sizes.values())
    for name, about in metadata.state_dict_metadata.items():
        try:
            # By the memo of a pickle many tensors may share one list of chunks, and each would be
            # checked.
            chunks += len(about.chunks)  # type: ignore[union-attr]  # of tensors, all of them
            if chunks > size:
                return f"{chunks} chunks are more than its {size} bytes describe"
            wrong = _wrong(name, cast("TensorStorageMetadata", about), metadata.storage_data, sizes)
        except (AttributeError, TypeError, ValueError) as error:
            wrong = f"is not described as torch does it: {error!s:.300}"
        if wrong:
            return f"the tensor {name:.300} {wrong}"
        # Many tensors may name the same bytes of a file, and would be read into memory one by one.
        remaining -= about.size.numel() * about.properties.dtype.itemsize  # type: ignore[union-attr]  # see above
        if remaining < 0:
            return f"the tensors up to {name:.300} have more bytes than its files"
    return None


def _wrong(
    name: str, about: TensorStorageMetadata, places: Mapping[Any, Any], sizes: Mapping[str, int]
) -> str:
    from torch.distributed.checkpoint.metadata import MetadataIndex

    shape: Any = about.size  # of a pickle, so of whatever type
    dtype = about.properties.dtype
    # Only the types are named: tuples within tuples would make an endless text.
    if not isinstance(shape, torch.Size) or not isinstance(dtype, torch.dtype):
        return f"has a {type(shape).__name__} for a shape, and a {type(dtype).__name__} for a type"
    # torch makes tensors of more than 64 dimensions, but sum() and others refuse them.
    if len(shape) > 64 or min(shape, default=0) < 0:
        return f"has the shape {shape!s:.300}"
    boxes: set[_Box] = set()
    for chunk in about.chunks:
        pairs = zip(chunk.offsets, chunk.sizes, strict=True)
        box = tuple((start, start + size) for start, size in pairs)
        if not all(0 <= a <= b <= end for (a, b), end in zip(box, shape, strict=True)):
            return f"has the shape {tuple(shape)}, and a chunk at {_region(box)} outside of it"
        # Without elements it is in no file, and covers nothing.
        if not (elements := math.prod(chunk.sizes)):
            continue
        boxes.add(box)
        place: Any = places.get(MetadataIndex(name, chunk.offsets))
        needed = elements * dtype.itemsize
        # A part is a file of torch.save's within the file, so it is longer than its elements.
        room = min(place.length, sizes[place.relative_path] - place.offset) if place else -1
        if room < needed or place.offset < 0:
            return f"has a chunk at {_region(box)} of {needed:,} bytes that are in no file"
    fault = _uncovered(tuple(shape), boxes) if math.prod(shape) else ""
    return f"has the shape {tuple(shape)}, and {fault}" if fault else ""


def _uncovered(shape: tuple[int, ...], boxes: Collection[_Box]) -> str:
    """What is wrong with boxes within a shape; empty if they cover it exactly.

    Where the corners that an odd number of boxes have are those of the shape, an odd number of
    boxes covers each place; and where their volumes are its volume, that number is one. So the time
    grows with the boxes alone, however they lie.
    """
    held = sum(math.prod(stop - start for start, stop in box) for box in boxes)
    if held != math.prod(shape):
        return f"its {len(boxes)} chunks hold {held:,} elements, not {math.prod(shape):,}"
    whole = tuple((0, end) for end in shape)
    cut = [at for at, ends in enumerate(whole) if any(box[at] != ends for box in boxes)]
    if len(cut) > 5:  # a mesh has fewer
        return f"is cut along {len(cut)} dimensions"
    odd: set[tuple[int, ...]] = set()
    for box in (whole, *boxes):
        for corner in product(*(box[at] for at in cut)):
            odd ^= {corner}
    return f"its chunks overlap and leave gaps, as near {list(min(odd))}" if odd else ""


def _region(box: _Box) -> str:
    """A box as a Python index."""
    return f"[{', '.join(f'{start}:{stop}' for start, stop in box)}]"

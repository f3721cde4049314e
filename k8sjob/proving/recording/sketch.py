"""Small linear images of tensors, and batches of several ranks joined to one."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any, Final, cast

import torch
from torch import Tensor

_randint = torch.randint  # what a script calls is wrapped
_MAX: Final = 1 << 20
"""Elements of a tensor that are looked at."""


@lru_cache(maxsize=256)
def _signs(size: int) -> Tensor:
    """Three rows of `size` signs, the same in every process."""
    # By a generator of its own: the script's random numbers stay as they are.
    bits = _randint(0, 2, (3, size), generator=torch.Generator().manual_seed(size))
    return bits.to(torch.float64) * 2 - 1


def sketch(tensor: Tensor) -> list[float]:
    """The sum of squares, and three projections that are linear in the tensor.

    Of a DTensor it is that of this rank's part: the sum over the ranks is that of the whole.
    """
    tensor = tensor.detach()
    if hasattr(tensor, "to_local"):
        return _sketch_of_part(tensor)
    if tensor.layout is not torch.strided:
        tensor = tensor.to_dense()
    return _project(tensor.flatten())


def _sketch_of_part(tensor: Any) -> list[float]:
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    local = tensor.to_local()
    shape, offset = compute_local_shape_and_global_offset(
        tensor.shape, tensor.device_mesh, tensor.placements
    )
    if not local.numel():
        return [0.0] * 4
    local_part = tuple(slice(o, o + s) for o, s in zip(offset, shape, strict=True))
    signs = _signs(tensor.numel()).reshape(3, *tensor.shape)[(slice(None), *local_part)]
    return _project(local.flatten(), signs.reshape(3, -1))


def _project(flat: Tensor, signs: Tensor | None = None) -> list[float]:
    if signs is None:
        if flat.numel() > _MAX:
            flat = flat[:: -(-flat.numel() // _MAX)]
        signs = _signs(flat.numel())
    values = flat.to("cpu", torch.float64)
    return [float(values @ values), *(signs @ values).tolist()]


def digest(value: Any) -> int:
    """A number by which equal values are known."""
    digester = hashlib.blake2b(digest_size=6)
    _feed(digester, value)
    return int.from_bytes(digester.digest(), "big")


def _feed(digester: Any, value: Any) -> None:
    if isinstance(value, Tensor):
        tensor = value.detach().to("cpu").contiguous()
        # numpy has no bfloat16.
        if tensor.dtype is torch.bfloat16:
            tensor = tensor.to(torch.float32)
        digester.update(str(tuple(tensor.shape)).encode())
        digester.update(tensor.reshape(-1).view(torch.uint8).numpy().tobytes())
    elif isinstance(value, Mapping):
        for key in value:
            _feed(digester, value[key])
    elif isinstance(value, list | tuple):
        for member in value:
            _feed(digester, member)
    # The default repr has the address, which differs in each process.
    elif (kind := cast("Any", type(value))).__repr__ is object.__repr__:
        digester.update(kind.__name__.encode())
    else:
        digester.update(repr(value).encode())


def _leaves(batch: Any) -> list[Any]:
    if isinstance(batch, Mapping):
        return [leaf for key in batch for leaf in _leaves(batch[key])]
    # A list of numbers or texts is one leaf, with as many samples.
    if isinstance(batch, list | tuple) and any(
        isinstance(member, Tensor | Mapping | list | tuple) for member in batch
    ):
        return [leaf for member in batch for leaf in _leaves(member)]
    return [batch]


def size_of(batch: Any, asked: int | None = None) -> int:
    """The number of samples in a batch: the first dimension of its first tensor.

    Or the number that the loader has asked for, where a part of the batch has as many.
    """
    if asked is not None and _has(batch, asked):
        return asked
    for leaf in _leaves(batch):
        if isinstance(leaf, Tensor) and leaf.dim():
            return leaf.shape[0]
        if isinstance(leaf, list | tuple):
            return len(leaf)
    return 1


def _has(batch: Any, size: int) -> bool:
    """Whether a part of a batch has this many samples."""
    if isinstance(batch, Tensor):
        return bool(batch.dim()) and batch.shape[0] == size
    members = [*batch.values()] if isinstance(batch, Mapping) else batch
    if not isinstance(members, list | tuple):
        return False
    whole = members is batch and len(batch) == size
    return whole or any(_has(member, size) for member in members)


def _is_of_samples(members: Sequence[Any], size: int) -> bool:
    """Whether they are one for each sample, as the pictures of a detector are."""
    alike = len({(type(member), getattr(member, "ndim", 0)) for member in members}) == 1
    return alike and len(members) == size and not all(_has(member, size) for member in members)


def digests(batch: Any, size: int) -> list[int] | None:
    """One number for each of this many samples of a batch; None: no part of it has as many."""
    rows = [leaf for leaf in _leaves(batch) if _has(leaf, size)]
    return [digest([leaf[at] for leaf in rows]) for at in range(size)] if rows else None


def join(  # noqa: PLR0911 - one for each type
    parts: list[Any], sizes: list[int], pads: Iterator[float | None]
) -> Any:
    """The batches of several ranks as one, samples along the dimension that has them.

    Args:
        parts: by rank.
        sizes: their numbers of samples.
        pads: what shorter samples of each tensor are padded with, as padding() finds it.

    Raises:
        LookupError: that is not known, and they have unequal lengths.
    """
    first = parts[0]
    if isinstance(first, Tensor):
        return _join_tensors(parts, sizes, next(pads, None))
    if isinstance(first, Mapping):
        joined = {key: join([part[key] for part in parts], sizes, pads) for key in first}
        try:
            # Mappings of other libraries may take other arguments.
            return type(first)(joined)  # type: ignore[call-arg]
        except TypeError:
            return joined
    if isinstance(first, list | tuple):
        plain = not any(isinstance(part, Tensor | Mapping | list | tuple) for part in first)
        listed = [len(part) for part in parts]
        of_samples = listed == sizes and _is_of_samples(first, sizes[0])
        # One entry for each sample, so the lists of the ranks follow each other.
        if plain or of_samples or listed != [len(first)] * len(parts):
            return type(first)(sample for part in parts for sample in part)
        members = [join(list(each), sizes, pads) for each in zip(*parts, strict=True)]
        return type(first)(*members) if hasattr(first, "_fields") else type(first)(members)
    if hasattr(first, "__dict__"):
        # A class of the script or of a library: its attributes are joined one by one.
        copy = object.__new__(type(first))
        copy.__dict__.update(join([vars(part) for part in parts], sizes, pads))
        return copy
    return first


def padding(samples: list[Any], collate: Callable[[list[Any]], Any]) -> list[float | None]:
    """What a loader pads each tensor of its batches with; None: these samples do not show it."""
    size = len(samples)
    together = _tensors(collate(samples), size)
    values: list[float | None] = [None] * len(together)
    for at, sample in enumerate(samples):  # twice, as the only picture may have one channel
        for number, alone in enumerate(_tensors(collate([sample, sample]), 2)):
            pairs = [*zip(together[number].shape, alone.shape, strict=True)]
            if (size, 2) not in pairs:
                continue
            along = pairs.index((size, 2))
            row, mine = together[number].select(along, at), alone.select(along, 0)
            for d, length in enumerate(mine.shape):
                if length < row.shape[d]:
                    values[number] = float(row.select(d, length).flatten()[0])
    return values


def _tensors(batch: Any, size: int) -> list[Tensor]:
    """The tensors of a batch that join() pads, in its order."""
    if isinstance(batch, Tensor):
        return [batch]
    if isinstance(batch, list | tuple) and _is_of_samples(batch, size):
        return []
    members = batch if isinstance(batch, list | tuple) else getattr(batch, "__dict__", {}).values()
    if isinstance(batch, Mapping):
        members = [batch[key] for key in batch]
    return [tensor for member in members for tensor in _tensors(member, size)]


def _join_tensors(parts: list[Tensor], sizes: list[int], value: float | None) -> Tensor:
    if not parts[0].dim():
        return parts[0]
    along = [
        d
        for d in range(parts[0].dim())
        if all(part.shape[d] == size for part, size in zip(parts, sizes, strict=True))
    ]
    if not along:
        if all(torch.equal(part, parts[0]) for part in parts):
            return parts[0]
        raise LookupError
    at = along[0]
    longest = [max(part.shape[d] for part in parts) for d in range(parts[0].dim())]
    padded = []
    for part in parts:
        pads: list[int] = []
        for d in reversed(range(part.dim())):
            # torch.nn.functional.pad counts from the last dimension, with a pair for each.
            pads += [0, 0 if d == at else longest[d] - part.shape[d]]
        if any(pads) and value is None:
            raise LookupError
        padded.append(torch.nn.functional.pad(part, pads, value=value) if any(pads) else part)
    return torch.cat(padded, at)


def join_draws(parts: list[Tensor], shape: torch.Size, *, permutes: bool = False) -> Tensor | None:
    """Random numbers of several ranks as those of one process; None: they do not fit its shape.

    Args:
        parts: by rank.
        shape: that of one process.
        permutes: they are orders of samples in each rank's batch.
    """
    for at in range(len(shape)):
        remaining = {(*part.shape[:at], *part.shape[at + 1 :]) for part in parts}
        fits = remaining == {(*shape[:at], *shape[at + 1 :])}
        if fits and sum(part.shape[at] for part in parts) == shape[at]:
            # An order within a rank's batch moves by the samples of the ranks before it.
            begins = [sum(map(len, parts[:rank])) if permutes else 0 for rank in range(len(parts))]
            return torch.cat(
                [part + b if b else part for part, b in zip(parts, begins, strict=True)], at
            )
    return parts[0] if parts[0].shape == shape else None

"""Random numbers: equal where ranks must agree, different where they must not, resumable."""

from __future__ import annotations

import random
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch.distributed.device_mesh import DeviceMesh

_RANK_STRIDE = 0x9E3779B1
"""The golden ratio's 32 bits: adjacent ranks get seeds far apart."""


def seed_all(seed: int, rank: int | None = None) -> None:
    """Seed torch, Python and, where it is loaded, numpy.

    Without a rank all draw the same numbers (the model's start), else each rank its own (dropout).
    """
    rank_seed = seed if rank is None else of_rank(seed, rank)
    torch.manual_seed(rank_seed)
    random.seed(rank_seed)
    if numpy := _numpy():
        numpy.random.seed(rank_seed % 2**32)


def of_rank(seed: int, rank: int) -> int:
    """A rank's own seed, 0 to 2**32 - 1."""
    return (seed + (rank + 1) * _RANK_STRIDE) % 2**32


def divide(ranks: DeviceMesh) -> None:
    """Let random operations on a tensor that is divided over these ranks differ by the part.

    The ranks draw the same numbers otherwise. torch does this on GPUs, but would give rank 0's
    numbers to all ranks of the job at the first such operation; on CPUs each part would
    have the same numbers, and ranks would draw different ones after parts of unequal size.
    """
    from torch.distributed.tensor import _random
    from torch.distributed.tensor._random import _RNGStateTracker

    on_gpu = ranks.device_type == "cuda"
    # Older trackers have a state of their own, which nothing saves or restores.
    if on_gpu and not hasattr(_RNGStateTracker, "rng_state_is_sync"):
        _random.manual_seed(torch.initial_seed(), ranks)
        return
    of_gpus = torch.cuda.default_generators
    used = of_gpus[torch.cuda.current_device()] if on_gpu else torch.default_generator
    tracker: Any = _ByPart(used)
    _random._rng_tracker = tracker  # noqa: SLF001 - torch has no public place for it


class _ByPart:
    """The random state for torch's operations on divided tensors (as _random._RNGStateTracker)."""

    distribute_region_enabled = True

    def __init__(self, used: torch.Generator) -> None:
        self._used = used  # what operations on this rank's device draw from

    @contextmanager
    def _distribute_region(
        self, spec: Any, generator: torch.Generator | None = None
    ) -> Iterator[None]:
        """Each part has its own generator, whose seed all ranks draw."""
        where = generator.device if generator else "cpu"
        drawn = int(torch.randint(2**62, (), generator=generator, device=where))
        place = zip(spec.mesh.get_coordinate(), spec.placements, strict=True)
        part = [at for at, placement in place if not placement.is_replicate()]
        common = self._used.get_state()
        self._used.manual_seed(hash((drawn, *part)) % 2**63)
        try:
            yield
        finally:
            self._used.set_state(common)


def capture(device: torch.device) -> dict[str, Tensor]:
    """The generators' states as tensors of fixed sizes."""
    state = {"torch": torch.get_rng_state(), "python": _of_python()}
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    if numpy := _numpy():
        whole = numpy.random.get_state(legacy=False)
        if whole["bit_generator"] == "MT19937":  # numpy's own; others have states of other forms
            inner = whole["state"]
            numbers = [*inner["key"].tolist(), inner["pos"], whole["has_gauss"], whole["gauss"]]
            state["numpy"] = torch.tensor(numbers, dtype=torch.float64)
    return state


def restore(state: dict[str, Tensor], device: torch.device) -> None:
    """Restore what capture gave; a generator that is not there now is skipped."""
    torch.set_rng_state(state["torch"])
    version, *words, has_gauss, gauss = state["python"].tolist()
    internal = tuple(int(word) for word in words)
    random.setstate((int(version), internal, gauss if has_gauss else None))
    if device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"], device)
    numpy = _numpy()
    if numpy and "numpy" in state:
        *keys, position, has_gauss, gauss = state["numpy"].tolist()
        mersenne = numpy.array([int(key) for key in keys], dtype=numpy.uint32)
        numpy.random.set_state(("MT19937", mersenne, int(position), int(has_gauss), gauss))


def _of_python() -> Tensor:
    # Its words are below 2**32, which float64 holds exactly, as it does the one float.
    version, internal, gauss = random.getstate()
    numbers = [version, *internal, gauss is not None, gauss or 0.0]
    return torch.tensor(numbers, dtype=torch.float64)


def _numpy() -> Any:
    """The numpy module if the program has loaded it; the runtime itself does not need it."""
    return sys.modules.get("numpy")

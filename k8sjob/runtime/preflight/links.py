"""The network between nodes: links of pairs, which name a node, and an all-reduce of all ranks.

An all-reduce is as slow as its slowest link, for every rank alike. So the first ranks of the nodes
exchange in pairs along a ring, disjoint pairs at once: each node of three or more has two links,
and its better one counts, so that a slow node is told from the neighbours of one. With two nodes
there is one link, whose two ends cannot be told apart.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

_WARM: Final = 1 << 14
_BYTES: Final = {"cuda": 1 << 26, "cpu": 1 << 21}
_REPEATS: Final = 3
_LINK_SECONDS: Final = 0.1
"""The fastest exchange of so many seconds counts: both ends need a CPU for each at once."""


def ring(leaders: Sequence[int]) -> Iterator[list[tuple[int, int]]]:
    """Rounds of disjoint pairs, by which each leader meets its two neighbours in a ring."""
    n = len(leaders)
    pairs = [(leaders[i], leaders[(i + 1) % n]) for i in range(n if n > 2 else n - 1)]
    # In a ring of odd length the last pair touches the first one: it gets a round of its own.
    odd = [pairs.pop()] if n > 2 and n % 2 else []
    yield from (part for part in (pairs[::2], pairs[1::2], odd) if part)


@dataclass(slots=True)
class Network:
    """What a rank has measured with the others."""

    rounds: int = 0  # of the ring, in which it is done
    links: dict[int, float] = field(default_factory=dict)  # neighbour -> bytes per second each way
    bus: float = 0.0  # the all-reduce's bus bandwidth, as nccl-tests define it; 0: not yet


def measure(leaders: Sequence[int], device: torch.device) -> Iterator[Network]:
    """This rank's links and the all-reduce of all ranks, as far as known; all ranks call it.

    Args:
        leaders: the first rank of each node.
        device: where the group's backend takes tensors.
    """
    rank, world, network = dist.get_rank(), dist.get_world_size(), Network()
    warm, payload = (torch.ones(size // 4, device=device) for size in (_WARM, _BYTES[device.type]))
    for pairs in ring(leaders):
        # All begin a round together, else a neighbour that is late would look like a slow link.
        dist.all_reduce(warm[:1])
        for pair in pairs:
            if rank in pair:
                peer = pair[1 - pair.index(rank)]
                _exchange(warm, peer)
                network.links[peer] = payload.nbytes / _fastest(payload, peer)
        network.rounds += 1
        yield network
    dist.all_reduce(warm)
    seconds = min(_timed_all_reduce(payload.clone()) for _ in range(_REPEATS))
    network.bus = payload.nbytes * 2 * (world - 1) / world / seconds
    yield network


def _fastest(tensor: torch.Tensor, peer: int) -> float:
    """Seconds of the fastest of several exchanges, of as many as both ends have time for."""
    first, _ = _exchange(tensor, peer)
    count = torch.full_like(tensor[:1], _LINK_SECONDS / first)
    more = int(torch.minimum(count, _exchange(count, peer)[1]))
    return min([first, *(_exchange(tensor, peer)[0] for _ in range(more))])


def _exchange(tensor: torch.Tensor, peer: int) -> tuple[float, torch.Tensor]:
    """Send and receive a tensor at once; the seconds that it took, and the received one."""
    received = torch.empty_like(tensor)
    began = time.monotonic()
    operations = [dist.P2POp(dist.isend, tensor, peer), dist.P2POp(dist.irecv, received, peer)]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    _finish(tensor.device)
    return time.monotonic() - began, received


def _timed_all_reduce(tensor: torch.Tensor) -> float:
    began = time.monotonic()
    dist.all_reduce(tensor)
    _finish(tensor.device)
    return time.monotonic() - began


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)

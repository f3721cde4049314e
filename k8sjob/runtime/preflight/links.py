"""The network between nodes: links of pairs, which name a node, and an all-reduce of all ranks.

An all-reduce is as slow as its slowest link, for every rank alike. So the first ranks of the nodes
exchange in pairs along a ring, disjoint pairs at once: each node of three or more has two links,
and its better one counts, so that a slow node is told from the neighbours of one. With two nodes
there is one link, whose two ends cannot be told apart.
"""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING, Final

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from k8sjob.runtime.preflight.node import Report

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


def measure(report: Report, leaders: Sequence[int], device: torch.device) -> Iterator[Report]:
    """This rank's report with its better link and the all-reduce of all ranks, as far as known.

    Args:
        report: of this rank; all ranks call this.
        leaders: the first rank of each node.
        device: where the group's backend takes tensors.
    """
    world = dist.get_world_size()
    warm, payload = (torch.ones(size // 4, device=device) for size in (_WARM, _BYTES[device.type]))
    for pairs in ring(leaders):
        # All begin a round together, else a neighbour that is late would look like a slow link.
        dist.all_reduce(warm[:1])
        for pair in pairs:
            if report.rank in pair:
                peer = pair[1 - pair.index(report.rank)]
                _exchange(warm, peer)
                rate = payload.nbytes / _fastest(payload, peer)
                report = replace(report, link=max(rate, report.link))
        report = replace(report, rounds=report.rounds + 1)
        yield report
    dist.all_reduce(warm)
    seconds = min(_timed_all_reduce(payload.clone()) for _ in range(_REPEATS))
    yield replace(report, bus=payload.nbytes * 2 * (world - 1) / world / seconds)


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

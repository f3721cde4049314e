"""What one rank finds out about its node by itself: device, memory, /dev/shm, names."""

from __future__ import annotations

import os
import re
import socket
import time
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch

from k8sjob.runtime.base.errors import first_line
from k8sjob.runtime.base.network import is_loopback
from k8sjob.runtime.comm.process_group import local_device

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from k8sjob.runtime.base.env import DistEnv

_SIDE: Final = {"cuda": 2048, "cpu": 128}
"""Rows of the matrices. Sums of so many small integers are exact in float32, and in TF32."""
_RATE_SECONDS: Final = 0.3
"""Of so many seconds the fastest product counts: others may use the CPU for a moment."""
_FREE: Final = 0.8
"""The part of a GPU's memory that must be free: this process's context takes some, too."""
_LOOKUP_SECONDS: Final = 2.0
"""A resolver that answers later tries one server after the other: each takes 5 s to time out."""
_GIB: Final = 2**30


@dataclass(frozen=True, slots=True)
class Report:
    """What a rank reports to rank 0."""

    rank: int
    local_rank: int
    node: str  # the node's name; outside a cluster the machine's
    device: str = ""  # "cuda" or "cpu"; empty: it has not been examined yet
    flops: float = 0.0  # float operations per second of a matrix product
    problems: Sequence[str] = ()  # each enough to refuse the node
    rounds: int = 0  # of the ring, in which it is done
    link: float = 0.0  # bytes per second each way of its better link; 0: it has none
    bus: float = 0.0  # the all-reduce's bus bandwidth, as nccl-tests define it; 0: not yet


def examine(env: DistEnv, blank: Report, asked: Mapping[str, Any]) -> Report:
    """Examine this rank's device, and for the first rank of a node the node.

    Args:
        env: this rank.
        blank: the report to complete.
        asked: what the job asks for on this node: "gpus", and bytes of "memory" and "shm".
    """
    device, flops = local_device(env), 0.0
    problems = list(_node_problems(env, asked)) if env.local_rank == 0 else []
    try:
        gpus = torch.cuda.device_count()
        if gpus < asked.get("gpus", 0):
            problems.append(f"torch sees {gpus} of the {asked['gpus']} GPUs that the job asks for")
        elif device.type == "cuda":
            problems += _device_memory(device)
        flops, correct = matmul(device)
        if not correct:
            problems.append(f"a matrix product on {device} is wrong: the device miscalculates")
    except RuntimeError as error:  # torch's errors of a device are its subclasses
        problems.append(f"{device} cannot compute: {first_line(error)}")
    return replace(blank, device=device.type, flops=flops, problems=problems)


def matmul(device: torch.device) -> tuple[float, bool]:
    """Float operations per second of a matrix product on a device, and whether it is right."""
    side = _SIDE[device.type]
    source = torch.Generator().manual_seed(side)
    shape = (side, side)
    left, right = (torch.randint(-2, 3, shape, generator=source).float() for _ in range(2))
    first, second = left.to(device), right.to(device)
    total = first @ second  # also loads the kernel
    until, count, best = time.monotonic() + _RATE_SECONDS, 1, float("inf")
    while (began := time.monotonic()) < until:
        product = first @ second
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        best = min(best, time.monotonic() - began)
        total += product
        count += 1
    # Freivalds' check, (LR)x = L(Rx), needs no second product: sums on the CPU, exact in float64.
    x = torch.randint(1, 1000, (side,), generator=source).double()
    expected = (left.double() * (right.double() * x).sum(1)).sum(1)
    correct = torch.equal((total.cpu().double() * x).sum(1), expected * count)
    return 2.0 * side**3 / best, correct


def _device_memory(device: torch.device) -> Iterator[str]:
    free, total = torch.cuda.mem_get_info(device)
    if free < _FREE * total:
        yield (
            f"{device} has {free / _GIB:.1f} of {total / _GIB:.1f} GiB free: other processes use it"
        )


def _node_problems(env: DistEnv, asked: Mapping[str, Any]) -> Iterator[str]:
    size = 0
    with suppress(FileNotFoundError):
        shm = os.statvfs("/dev/shm")  # noqa: S108 - the pod's
        size = shm.f_blocks * shm.f_frsize
    if size < 0.99 * asked.get("shm", 0):
        minimum = asked["shm"] / _GIB
        yield f"it has {size / _GIB:.2f} GiB in /dev/shm, and the job asks for {minimum:.2f}"
    available = _available()
    if available is not None and available < asked.get("memory", 0):
        yield (
            f"the node has {available / _GIB:.1f} GiB of memory for this pod, which asks for"
            f" {asked['memory'] / _GIB:.1f}: other processes use it"
        )
    # Rank 0's own name may not resolve before its pod is ready.
    if env.rank and not is_loopback(env.master_addr):
        began = time.monotonic()
        try:
            socket.getaddrinfo(env.master_addr, env.master_port)
        except OSError as error:
            yield f"the Master's name {env.master_addr} does not resolve: {error.strerror}"
        if (passed := time.monotonic() - began) > _LOOKUP_SECONDS:
            yield f"its resolver took {passed:.1f} s for {env.master_addr}: one does not respond"


def _available() -> int | None:
    """Bytes that the pod has, or can still get from its node; None: not known."""
    with suppress(OSError, ValueError):
        line = re.search(r"MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text())
        if line:
            used = Path("/sys/fs/cgroup/memory.current").read_text()
            return int(line[1]) * 1024 + int(used)
    return None

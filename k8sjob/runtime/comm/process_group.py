"""The process group of a session: its device, its backend, and the collectives it needs."""

from __future__ import annotations

import io
import socket
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final, Literal

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore

from k8sjob.runtime.base.config import launcher_hosts_store
from k8sjob.runtime.base.env import stay_on_loopback
from k8sjob.runtime.base.errors import EnvError, ranks_in_words
from k8sjob.runtime.base.network import is_loopback
from k8sjob.runtime.comm.rendezvous import RankInfo, Rendezvous, rendezvous

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch import Tensor

    from k8sjob.contract import RuntimeConfig
    from k8sjob.runtime.base.env import DistEnv

Reduction = Literal["sum", "max", "min"]
_OPERATIONS: Final = {
    "sum": dist.ReduceOp.SUM,
    "max": dist.ReduceOp.MAX,
    "min": dist.ReduceOp.MIN,
}
_CHUNK: Final = 64 << 20
"""Bytes of a checkpoint that travel at once: they pass through the GPU's memory with nccl."""


def local_device(env: DistEnv) -> torch.device:
    """This process's GPU, or the CPU where its node has none for each of its processes."""
    if torch.cuda.is_available() and torch.cuda.device_count() >= env.local_world_size:
        return torch.device("cuda", env.local_rank)
    return torch.device("cpu")


def backend_for(backend: str | None, device: torch.device) -> str:
    """The backend that this rank could use: `backend`, or by its device nccl or gloo.

    Raises:
        EnvError: it cannot work here.
    """
    if backend is None:
        return "nccl" if device.type == "cuda" else "gloo"
    if backend == "nccl" and device.type != "cuda":
        raise EnvError(
            f"backend 'nccl' needs a GPU for each process of a node, and this one has "
            f"{torch.cuda.device_count()}; request GPUs (resources.gpus), use gloo, or remove the "
            "backend"
        )
    return backend


def common_backend(infos: Sequence[RankInfo]) -> tuple[str, str]:
    """The backend for all ranks, and why it is not the one that some could have used."""
    proposed = {info.backend for info in infos}
    if proposed == {"nccl"}:
        owners: dict[tuple[str, str], int] = {}
        for info in infos:
            owner = owners.setdefault((info.host, info.gpu), info.rank)
            if info.gpu and owner != info.rank:
                return "gloo", (
                    f"ranks {owner} and {info.rank} share one GPU on {info.host}, which nccl "
                    "refuses: all ranks use their CPUs with gloo; start no more processes than GPUs"
                )
        return "nccl", ""
    if len(proposed) == 1:
        return proposed.pop(), ""
    without = [info.rank for info in infos if info.backend != "nccl"]
    return "gloo", (
        f"no GPU for {ranks_in_words(without)}, and the others have one: all ranks use their "
        "CPUs with gloo; give every replica the same resources.gpus"
    )


class Group:
    """All ranks of a session. With one rank every collective is a plain copy.

    Attributes:
        rank: 0 to world_size - 1.
        world_size: number of ranks.
        backend: "nccl", "gloo", ...
        device: the device of the model and its data.
        rendezvous: the rendezvous of the ranks; None with one rank.
        on_phase: called with "sync" before this rank waits for the others, with "compute" after it.
    """

    def __init__(
        self, env: DistEnv, backend: str, device: torch.device, joined: Rendezvous | None = None
    ) -> None:
        self.rank, self.world_size = env.rank, env.world_size
        self.backend, self.device, self.rendezvous = backend, device, joined
        self.on_phase: Callable[[str], None] = lambda _phase: None
        # nccl sends from the GPU; for another backend the tensors are copied to the CPU.
        self._transport = device if backend == "nccl" else torch.device("cpu")

    def all_reduce(self, tensor: Tensor, op: Reduction = "sum") -> Tensor:
        """A new tensor with the sum, maximum or minimum over the ranks, element by element.

        Args:
            tensor: of the same shape and type on all ranks.
            op: "sum", "max" or "min".
        """
        if op not in _OPERATIONS:
            raise ValueError(f'op={op!r}: it must be "sum", "max" or "min"')
        result = tensor.detach().to(self._transport, copy=True)
        if self.world_size == 1:
            return result.to(tensor.device)
        with self.waiting():
            dist.all_reduce(result, op=_OPERATIONS[op])
            return result.to(tensor.device)

    def sums(self, values: Sequence[float]) -> list[float]:
        """Sums over the ranks, in float64; blocks until they are known."""
        if self.world_size == 1:
            return [float(value) for value in values]
        total = torch.tensor(values, dtype=torch.float64)
        return [float(value) for value in self.all_reduce(total)]

    def table(self, numbers: Sequence[float]) -> list[list[float]]:
        """The numbers of all ranks, by rank, in float64; blocks until they are known.

        Args:
            numbers: equally many on all ranks.
        """
        if self.world_size == 1:  # without the GPU, which may have much to do before it answers
            return [[float(number) for number in numbers]]
        mine = torch.tensor(numbers, dtype=torch.float64, device=self._transport)
        rows = [torch.empty_like(mine) for _ in range(self.world_size)]
        with self.waiting():
            dist.all_gather(rows, mine)
            return [row.tolist() for row in rows]

    def gather(self, tensor: Tensor, to: int | None = None) -> list[Tensor]:
        """The tensors of all ranks, by rank.

        Args:
            tensor: of the same type and number of dimensions on all ranks; the first dimension
                may differ, and so may be empty.
            to: the rank that gets them, the list of the others is empty; None: every rank.
        """
        if to is not None and not 0 <= to < self.world_size:
            raise ValueError(f"to={to}: it must be one of the ranks 0 to {self.world_size - 1}")
        if self.world_size == 1:
            return [tensor.detach().clone()]
        flat = tensor.detach().to(self._transport)
        flat = flat.reshape(1) if flat.ndim == 0 else flat.contiguous()
        lengths = [int(length) for (length,) in self.table([flat.shape[0]])]
        # gloo gathers tensors of one shape only.
        padded = flat.new_zeros((max(lengths), *flat.shape[1:]))
        padded[: flat.shape[0]] = flat
        receives = to in {None, self.rank}
        parts = [torch.empty_like(padded) for _ in range(self.world_size if receives else 0)]
        with self.waiting():
            if to is None:
                dist.all_gather(parts, padded)
            else:
                dist.gather(padded, parts if receives else None, dst=to)
        cut = [part[:length] for part, length in zip(parts, lengths, strict=False)]
        return [(part[0] if tensor.ndim == 0 else part).to(tensor.device) for part in cut]

    def broadcast(self, tensor: Tensor, source: int = 0) -> Tensor:
        """One rank's tensor, on every rank; it has the same shape and type everywhere."""
        result = tensor.detach().to(self._transport, copy=True).contiguous()
        if self.world_size == 1:
            return result.to(tensor.device)
        with self.waiting():
            dist.broadcast(result, src=source)
            return result.to(tensor.device)

    def broadcast_bytes(self, content: bytes | None) -> bytes | None:
        """Rank 0's bytes, or its None, on every rank; the others' argument is ignored."""
        if self.world_size == 1:
            return content
        # The others learn the length first, since a broadcast needs tensors of one size.
        length = torch.tensor([-1 if content is None else len(content)])
        total = int(self.broadcast(length))
        if total < 0:
            return None
        whole = io.BytesIO()
        for start in range(0, total, _CHUNK):
            size = min(_CHUNK, total - start)
            part = torch.empty(size, dtype=torch.uint8)
            if self.rank == 0 and content is not None:
                # bytearray: torch warns of memory that may not be written.
                part = torch.frombuffer(bytearray(content[start : start + size]), dtype=torch.uint8)
            whole.write(self.broadcast(part).numpy().tobytes())
        return whole.getvalue()

    def barrier(self) -> None:
        """Wait until all ranks are here, their GPUs' work included."""
        if self.world_size > 1:
            self.sums([0.0])

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """A block in which this rank waits for the others.

        With nccl the host waits where it uses the result, so the block includes that.
        """
        self.on_phase("sync")
        try:
            yield
        finally:
            self.on_phase("compute")

    def destroy(self) -> None:
        """Destroy torch.distributed's process group; nothing is sent after this."""
        if not dist.is_initialized():
            return
        if self.world_size > 1 and self.backend == "gloo":
            _KEPT.append(dist.group.WORLD)
        dist.destroy_process_group()


_KEPT: Final[list[Any]] = []
"""Groups whose last reference must not go before the process does.

Their destructor joins gloo's threads while it holds the interpreter's lock, and such a thread may
wait for that lock to drop a tensor: both would wait forever (seen with torch 2.6).
"""


def open_group(
    env: DistEnv,
    config: RuntimeConfig,
    *,
    serving: int,
    on_cpu: bool,
    on_joined: Callable[[Rendezvous], object],
    on_wait: Callable[[Sequence[int]], object],
) -> Group:
    """Complete the rendezvous and make the process group.

    The first `serving` ranks only serve the others (see strategies.serving): each takes part, and
    is in a group of its own. `on_cpu` leaves the GPUs to another library, such as JAX.
    `on_joined` is called when several ranks have joined, before they connect with each other; for
    `on_wait` see rendezvous().

    Raises:
        EnvError: the backend cannot work here.
        PeerLost: ranks did not come in time.
    """
    if dist.is_initialized():
        raise RuntimeError(
            "a process group already exists: call session() instead of init_process_group, or "
            "do not use k8sjob.runtime in a script that creates its own"
        )
    serves = env.rank < serving
    device = torch.device("cpu") if serves or on_cpu else local_device(env)
    proposed = backend_for(None if serves else config.backend, device)
    timeout = timedelta(seconds=config.collective_timeout)
    # All ranks are on this machine, and nobody else is to reach their ports.
    if is_loopback(env.master_addr):
        stay_on_loopback("GLOO_SOCKET_IFNAME")
    if env.world_size == 1:
        store = dist.HashStore()  # type: ignore[attr-defined]  # re-exported at run time
        dist.init_process_group(proposed, store=store, rank=0, world_size=1, timeout=timeout)
        return Group(env, proposed, device)
    joined = rendezvous(
        env,
        _rank_info(env, proposed, device),
        choose=lambda infos: common_backend(infos[serving:]),
        timeout=config.rendezvous_timeout,
        launcher_hosts=launcher_hosts_store(),
        on_wait=on_wait,
    )
    on_joined(joined)
    # Another rank has no GPU, or shares one.
    if proposed == "nccl" and joined.backend != "nccl":
        device = torch.device("cpu")
    if serves:
        return Group(replace(env, rank=0, world_size=1), joined.backend, device, joined)
    trainer = env.among_trainers(serving)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(
        joined.backend,
        # A client of its own, since torch uses it from other threads; a prefix, since torch chooses
        # names.
        store=PrefixStore("group", joined.again()),
        rank=trainer.rank,
        world_size=trainer.world_size,
        timeout=timeout,
        # With a device torch makes nccl's communicator now, so that an error in that does not wait
        # for the first step.
        device_id=device if joined.backend == "nccl" else None,
    )
    return Group(trainer, joined.backend, device, joined)


def _rank_info(env: DistEnv, backend: str, device: torch.device) -> RankInfo:
    """This rank, with the identity of its GPU, which does not depend on the process's numbering."""
    gpu = ""
    if device.type == "cuda":
        gpu = str(getattr(torch.cuda.get_device_properties(device), "uuid", ""))
    return RankInfo(env.rank, env.world_size, socket.gethostname(), backend, gpu)

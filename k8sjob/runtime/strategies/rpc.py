"""Calls between the processes of a job with parameter servers, by torch.distributed.rpc.

The coordinator (rank 0) starts the loops of all others by a call that is answered when the loop has
ended. So it learns of a process that dies, whether or not anybody else has business with it, and
all others learn it from the coordinator.

RPC listens on other ports than the trainers' process group; both find their peers
through the job's one store.
"""

from __future__ import annotations

import threading
import time
import warnings
from typing import TYPE_CHECKING, Any, Final

import torch
from torch.distributed import rpc
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import register_rendezvous_handler

from k8sjob.runtime.base.env import stay_on_loopback
from k8sjob.runtime.base.errors import PeerLost
from k8sjob.runtime.base.network import is_loopback

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch._C._distributed_c10d import Store
    from torch.futures import Future

    from k8sjob.runtime.base.env import DistEnv
    from k8sjob.runtime.comm.rendezvous import Rendezvous

_LOOK_S: Final = 0.2
_SCHEME: Final = "k8sjob"
"""Of a URL by which torch's RPC finds the job's store."""


class Calls:
    """This process's part in the calls of a job."""

    def __init__(self, env: DistEnv, joined: Rendezvous, *, serving: int, timeout: float) -> None:
        """Connect to all other processes; returns when all of them can be called.

        `serving` processes do not train: the coordinator and the servers. A call counts as failed
        after `timeout` seconds.
        """
        self._env, self._serving = env, serving
        if is_loopback(env.master_addr):
            # TensorPipe looks for an address by the host's name otherwise, and listens on it.
            stay_on_loopback("TP_SOCKET_IFNAME")

        def rendezvous(_url: str, **_more: Any) -> Iterator[tuple[Store, int, int]]:
            yield PrefixStore("rpc", joined.again()), env.rank, env.world_size

        register_rendezvous_handler(_SCHEME, rendezvous)  # type: ignore[no-untyped-call]  # torch leaves it so
        options = rpc.TensorPipeRpcBackendOptions(
            init_method=f"{_SCHEME}://",
            rpc_timeout=timeout,
            # torch's default of 16, and one for each process: a call may wait in its thread for the
            # lock of the tables.
            num_worker_threads=16 + env.world_size,
            _transports=["uv"],  # shared memory would take more of /dev/shm than a pod has
        )
        with warnings.catch_warnings():
            # torch's own use of an older form of its groups
            warnings.filterwarnings("ignore", "You are using a Backend", UserWarning)
            rpc.init_rpc(  # type: ignore[no-untyped-call]  # torch leaves it so
                name_of(env.rank, serving),
                rank=env.rank,
                world_size=env.world_size,
                rpc_backend_options=options,
            )

    def begin(self, lost: Callable[[], None]) -> None:
        """Begin this process's part, or PeerLost: a trainer returns at once, others at the end."""
        if self._env.rank == 0:
            # Returns when all other processes are done: the coordinator does not train.
            self._coordinate(lost)
        # Servers serve until the last trainer is done; trainers begin to train at once.
        event = _DISMISSED if self._env.rank < self._serving else _BEGUN
        while self._env.rank and not event.wait(_LOOK_S):
            lost()

    def _coordinate(self, lost: Callable[[], None]) -> None:
        """Start the loops of all others, and stay until they have ended."""
        # Without a timeout: the answer is the end of the training.
        running = {
            rank: rpc.rpc_async(name_of(rank, self._serving), _loop, timeout=0)
            for rank in range(1, self._env.world_size)
        }
        dismissed = False
        while running:
            for rank in [rank for rank, loop in running.items() if loop.done()]:
                self._check(rank, running.pop(rank))
            # Only servers are left to wait for.
            if not dismissed and all(rank < self._serving for rank in running):
                dismissed = True
                for rank in range(1, self._serving):
                    rpc.rpc_sync(name_of(rank, self._serving), _dismiss)
            lost()
            time.sleep(_LOOK_S)

    def _check(self, rank: int, loop: Future[None]) -> None:
        try:
            loop.value()
        except RuntimeError as error:
            name = name_of(rank, self._serving)
            raise PeerLost(f"{name} (rank {rank}) is gone; see its log", (rank,)) from error

    def close(self) -> None:
        """Report that this process is done; returns when all others are."""
        # First the answer to the coordinator: rpc.shutdown() waits for calls that are not answered.
        _ENDED.set_result(None)
        rpc.shutdown()


def name_of(rank: int, serving: int) -> str:
    """Name of a process: "coordinator", "server0", ..., "trainer0", ... by its rank among all."""
    if rank == 0:
        return "coordinator"
    return server_name(rank - 1) if rank < serving else f"trainer{rank - serving}"


def server_name(number: int) -> str:
    """Name of a server, by its number."""
    return f"server{number}"


# The target of others' calls in this process; torch, too, has one RPC agent per process.
_BEGUN: Final = threading.Event()
_DISMISSED: Final = threading.Event()
_ENDED: Final[Future[None]] = torch.futures.Future()


@rpc.functions.async_execution  # type: ignore[untyped-decorator]  # torch leaves it so
def _loop() -> Future[None]:
    """Called by the coordinator: begin; answered when this process is done."""
    _BEGUN.set()
    return _ENDED


def _dismiss() -> None:
    _DISMISSED.set()

"""Where a group's store is: rank 0 hosts it, the others knock until it answers."""

from __future__ import annotations

import socket
import time
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore

from k8sjob.runtime.env import EnvError
from k8sjob.runtime.peer import PeerLost
from k8sjob.runtime.port import is_loopback

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

    from k8sjob.runtime.env import DistEnv

__all__ = ["PAUSE_S", "RETRY_S", "Place", "listen", "tcp_store"]

PAUSE_S: Final = 0.05
RETRY_S: Final = 0.2
_CONNECT: Final = timedelta(seconds=5)
"""Someone listens there; who does not answer now is leaving, and torch would wait for it."""
_ANSWER: Final = timedelta(seconds=300)
_LEAVING_S: Final = 15.0
"""How long a process of an earlier group may still hold the port."""


class Place:
    """Where a store is, and how to host it or to reach it."""

    def __init__(self, env: DistEnv, *, launcher_hosts: bool) -> None:
        self._addr, self._port = env.master_addr, env.master_port
        self._hosts = env.rank == 0 and not launcher_hosts
        # A launcher's store outlives the restarts of its ranks; ours is a new one each time.
        self._prefix = f"k8sjob/{env.restart}" if launcher_hosts else "k8sjob"

    def __str__(self) -> str:
        return f"{self._addr}:{self._port}"

    def store(self, deadline: float) -> Store:
        """The store that rank 0 hosts; for the others a connection to it."""
        return self._prefixed(self._host(deadline)) if self._hosts else self._client(deadline)

    def again(self) -> Store:
        """Another connection to the store of a meeting that took place."""
        return self._client(time.monotonic() + 30)

    def _client(self, deadline: float) -> Store:
        self._await_listener(deadline)
        return self._prefixed(tcp_store(self._addr, self._port, is_master=False))

    def _prefixed(self, store: Store) -> Store:
        return PrefixStore(self._prefix, store)

    def _host(self, deadline: float) -> Store:
        patience = min(time.monotonic() + _LEAVING_S, deadline)
        while True:
            try:
                # Left to itself, the store would listen on all addresses of the machine.
                listener = listen(self._addr, self._port) if is_loopback(self._addr) else None
                return tcp_store(self._addr, self._port, is_master=True, listener=listener)
            except (OSError, dist.DistNetworkError) as error:
                if time.monotonic() > patience:
                    raise EnvError(
                        f"rank 0 cannot listen on {self}: {str(error).splitlines()[0]}; another "
                        "process uses the port: end it, or set another MASTER_PORT"
                    ) from error
            time.sleep(RETRY_S)

    def _await_listener(self, deadline: float) -> None:
        """Knock until someone answers: torch's own client is slow to try again, and loud."""
        while True:
            try:
                socket.create_connection((self._addr, self._port), timeout=5).close()
            except OSError as error:
                why = error.strerror or str(error)
            else:
                return
            if time.monotonic() > deadline:
                break
            time.sleep(PAUSE_S)
        raise PeerLost(
            f"rank 0 does not answer at {self}: {why}; look at its log, or raise the rendezvous "
            "timeout if it is still starting",
            (0,),
        )


def listen(addr: str, port: int) -> socket.socket:
    """A socket that listens on this address alone.

    Raises:
        OSError: another process listens there.
    """
    listener = socket.socket(socket.AF_INET6 if ":" in addr else socket.AF_INET)
    # Also lets us listen on a port that a supervisor holds by binding it, never listening.
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((addr, port))
        listener.listen(1024)
    except OSError:
        listener.close()
        raise
    return listener


def tcp_store(
    addr: str, port: int, *, is_master: bool, listener: socket.socket | None = None
) -> Store:
    """The store of a group, hosted here or reached there.

    Args:
        addr: its name or address.
        port: its port.
        is_master: whether this process hosts it.
        listener: a socket of listen(), for the host: the store listens on all addresses otherwise.

    Raises:
        DistNetworkError: it cannot be hosted here, or not be reached within seconds.
    """

    def make(**more: Any) -> Store:
        store: Store = dist.TCPStore(  # type: ignore[attr-defined]  # re-exported at run time
            addr,
            port,
            is_master=is_master,
            timeout=_CONNECT,
            wait_for_workers=False,
            **more,
        )
        store.set_timeout(_ANSWER)
        return store

    if listener is not None:
        # Before torch 2.7 the newer server, libuv's, takes no socket of ours.
        return make(use_libuv=False, master_listen_fd=listener.detach())
    try:
        return make()
    except RuntimeError as error:
        if "libuv" not in str(error):
            raise
        # Debian builds torch without it; then the store has its older server alone.
        return make(use_libuv=False)

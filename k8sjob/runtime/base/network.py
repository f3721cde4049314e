"""Addresses, reserved ports, and the wait for the Master's name."""

from __future__ import annotations

import ipaddress
import socket
import threading
import time
from typing import TYPE_CHECKING

from k8sjob.runtime.base.errors import PeerLost
from k8sjob.runtime.base.timeouts import TIMEOUTS

if TYPE_CHECKING:
    from collections.abc import Callable

    from k8sjob.runtime.base.env import NodeEnv
    from k8sjob.runtime.base.signals import Inbox

__all__ = ["await_master", "is_loopback", "listen", "must_wait", "reserve"]


def is_loopback(addr: str) -> bool:
    """Whether an address stays on this machine."""
    try:
        return ipaddress.ip_address(addr).is_loopback
    except ValueError:
        return addr == "localhost"


def reserve(addr: str) -> socket.socket:
    """A free port of an address of this machine, held by a socket that never listens.

    Rank 0 can bind it as well.
    """
    bound = socket.socket(_family(addr))
    try:
        # Two processes may bind the port as long as only one of them listens.
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind((addr, 0))
    except OSError:
        bound.close()
        raise
    return bound


def listen(addr: str, port: int) -> socket.socket:
    """A socket that listens on this address alone.

    Raises:
        OSError: another process listens there.
    """
    return socket.create_server((addr, port), family=_family(addr), backlog=1024)


def _family(addr: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in addr else socket.AF_INET


def must_wait(node: NodeEnv) -> bool:
    """Whether the Master's address is the name of another pod."""
    if node.node_rank == 0 or node.master_addr == "localhost":
        return False
    try:
        ipaddress.ip_address(node.master_addr)
    except ValueError:
        return True
    return False


def await_master(
    node: NodeEnv, timeout: float, inbox: Inbox, log_line: Callable[[str], None]
) -> None:
    """Return once the Master's name resolves, or a stop is requested.

    The name resolves only once the Master's pod is ready. Whether its port answers is left to the
    rendezvous: a script that makes its group itself may open the port late.

    Raises:
        PeerLost: the name did not resolve in time. The Master may still come, so this is no error
            of the environment.
    """
    if not must_wait(node):
        return
    start = time.monotonic()
    lookup = _Lookup(node.master_addr)
    report = start + TIMEOUTS.report / 2
    while not lookup.done.is_set() and not inbox.stopping():
        waited = time.monotonic() - start
        if waited >= timeout:
            raise PeerLost(
                f"the Master's name {node.master_addr} did not resolve within {timeout:g} s "
                f"({lookup.error}); its pod is not ready or its Service is missing: see "
                "`k8sjob why`, or kubectl get pods,services",
                culprits=(0,),
            )
        if time.monotonic() >= report:
            report += TIMEOUTS.report
            log_line(
                f"node {node.node_rank} waits for the Master's name {node.master_addr}: "
                f"{lookup.error} ({waited:.0f} s of {timeout:g} s)"
            )
        inbox.wait(min(TIMEOUTS.poll, timeout - waited))


class _Lookup:
    """A look-up in a thread: a resolver may take many seconds, and signals must not wait."""

    def __init__(self, name: str) -> None:
        self.done = threading.Event()
        self.error = "no answer from the resolver yet"
        threading.Thread(
            target=self._resolve, args=(name,), daemon=True, name="k8sjob-lookup"
        ).start()

    def _resolve(self, name: str) -> None:
        while True:
            try:
                socket.getaddrinfo(name, None)
            except (OSError, UnicodeError) as error:
                self.error = getattr(error, "strerror", None) or str(error)
                time.sleep(TIMEOUTS.look)
            else:
                self.done.set()
                return

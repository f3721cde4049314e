"""Addresses, reserved ports, and the wait for the Master's name."""

from __future__ import annotations

import ipaddress
import socket
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from k8sjob.runtime.base.config import TIMEOUTS
from k8sjob.runtime.base.errors import PeerLost
from k8sjob.runtime.base.event_lines import log_line
from k8sjob.runtime.base.signals import in_thread

if TYPE_CHECKING:
    from k8sjob.runtime.base.env import NodeEnv
    from k8sjob.runtime.base.signals import Inbox


def is_loopback(addr: str) -> bool:
    """Whether an address stays on this machine."""
    address = _ip_address(addr)
    return address is not None and address.is_loopback


def _ip_address(addr: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address("127.0.0.1" if addr == "localhost" else addr)
    except ValueError:
        return None


def is_connected(port: int) -> bool:
    """Whether a process of this pod has a TCP connection with another address through a port."""
    ending = f":{port:04X}"  # as the kernel writes it, after the address
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        with suppress(OSError):
            for line in Path(table).read_text().splitlines()[1:]:
                local, remote, state = line.split()[1:4]
                established = state == "01" and ending in {local[-5:], remote[-5:]}
                if established and local[:-5] != remote[:-5]:
                    return True
    return False


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
    """A socket that listens only on this address.

    Raises:
        OSError: another process listens there.
    """
    return socket.create_server((addr, port), family=_family(addr), backlog=1024)


def _family(addr: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in addr else socket.AF_INET


def await_master(node: NodeEnv, timeout: float, inbox: Inbox) -> None:
    """Return once the Master's name resolves, or a stop is requested.

    The name resolves only once the Master's pod is ready. Whether its port answers is left to the
    rendezvous: a script that makes its group itself may open the port late.

    Raises:
        PeerLost: the name did not resolve in time. The Master may still come, so this is no error
            of the environment.
    """
    # Node 0's own name may not resolve before it is ready, and an address needs no resolver.
    if node.node_rank == 0 or _ip_address(node.master_addr) is not None:
        return
    problem = "no answer from the resolver yet"

    def resolve() -> None:
        nonlocal problem
        while True:
            try:
                socket.getaddrinfo(node.master_addr, None)
            except (OSError, UnicodeError) as error:
                problem = getattr(error, "strerror", None) or str(error)
                time.sleep(TIMEOUTS.look)
            else:
                return

    start = time.monotonic()
    resolved = in_thread(resolve, "k8sjob-lookup")  # a resolver may take many seconds
    report = start + TIMEOUTS.report / 2
    while not resolved.done() and not inbox.stopping():
        waited = time.monotonic() - start
        if waited >= timeout:
            raise PeerLost(
                f"the Master's name {node.master_addr} did not resolve within {timeout:g} s "
                f"({problem}); its pod is not ready or its Service is missing: see "
                "`k8sjob why`, or kubectl get pods,services",
                culprits=(0,),
            )
        if time.monotonic() >= report:
            report += TIMEOUTS.report
            log_line(
                f"node {node.node_rank} waits for the Master's name {node.master_addr}: "
                f"{problem} ({waited:.0f} s of {timeout:g} s)"
            )
        inbox.wait(min(TIMEOUTS.poll, timeout - waited))

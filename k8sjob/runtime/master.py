"""Waits for the Master's name: it resolves only once the Master's pod is ready.

Only the name is asked for. Whether the port answers is the rendezvous' business, and a script that
brings its own may open it late.
"""

from __future__ import annotations

import ipaddress
import socket
import threading
import time
from typing import TYPE_CHECKING, Final

from k8sjob.runtime.peer import PeerLost

if TYPE_CHECKING:
    from collections.abc import Callable

    from k8sjob.runtime.env import NodeEnv
    from k8sjob.runtime.signals import Inbox

__all__ = ["await_master", "must_wait"]

_FIRST_RETRY, _LAST_RETRY = 0.1, 1.0
"""Seconds between two look-ups: pods of one job come within a second or two, or much later."""
_REPORT: Final = 10.0
"""Seconds between two lines about a name that does not resolve."""


def must_wait(node: NodeEnv) -> bool:
    """Whether the Master's address is a name that another pod brings."""
    if node.node_rank == 0 or node.master_addr == "localhost":
        return False
    try:
        ipaddress.ip_address(node.master_addr)
    except ValueError:
        return True
    return False


def await_master(node: NodeEnv, timeout: float, inbox: Inbox, say: Callable[[str], None]) -> None:
    """Return once the Master's name resolves, or a stop is asked for.

    Args:
        node: this node.
        timeout: seconds until the wait is given up.
        inbox: entered already.
        say: where lines for the log go.

    Raises:
        PeerLost: the name did not resolve in time. The Master may still come, so this is no error
            of the environment.
    """
    if not must_wait(node):
        return
    start = time.monotonic()
    lookup = _Lookup(node.master_addr)
    report = start + _REPORT / 2
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
            report += _REPORT
            say(
                f"node {node.node_rank} waits for the Master's name {node.master_addr}: "
                f"{lookup.error} ({waited:.0f} s of {timeout:g} s)"
            )
        inbox.wait(min(0.05 if waited < 1 else 0.25, timeout - waited))


class _Lookup:
    """Asks in a thread of its own: a resolver may take many seconds, and signals must not wait."""

    def __init__(self, name: str) -> None:
        self.done = threading.Event()
        self.error = "no answer from the resolver yet"
        self._name = name
        threading.Thread(target=self._ask, daemon=True, name="k8sjob-lookup").start()

    def _ask(self) -> None:
        pause = _FIRST_RETRY
        while True:
            try:
                socket.getaddrinfo(self._name, None)
            except (OSError, UnicodeError) as error:
                self.error = getattr(error, "strerror", None) or str(error)
                time.sleep(pause)
                pause = min(2 * pause, _LAST_RETRY)
            else:
                self.done.set()
                return

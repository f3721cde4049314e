"""The roster of a group: which nodes have ended, and how often the group has started.

The agent of node 0 listens on a port derived from MASTER_PORT. The others call once a second, send
their state, and get the whole table. A call is one line of JSON each way, so a node that was away
needs no repair. Where node 0 does not respond, behind a NetworkPolicy for instance, each agent
decides by what it sees itself.
"""

from __future__ import annotations

import json
import socket
import socketserver
import threading
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Self

from k8sjob.contract import Reason
from k8sjob.runtime.base.config import TIMEOUTS
from k8sjob.runtime.base.network import is_loopback

if TYPE_CHECKING:
    from collections.abc import Callable

    from k8sjob.runtime.base.env import NodeEnv

RUNNING: Final = "running"
DONE: Final = "done"
"""All processes of the node ended with 0; it does not start again."""
FAILED: Final = "failed"
"""The node's agent gave up."""
_DISTANCE: Final = 4096
"""From MASTER_PORT; scripts take the ports next to it for groups that they make."""
_MAX_BYTES: Final = 1 << 20
_MAX_MESSAGE: Final = 300
_INVALID: Final = (ValueError, KeyError, TypeError, OverflowError, RecursionError)
"""The errors raised by reading an invalid call."""


@dataclass(frozen=True, slots=True)
class NodeState:
    """The state of one node."""

    node: int  # its rank among the nodes
    state: str = RUNNING  # RUNNING, DONE or FAILED
    restarts: int = 0  # how often its processes have been started again
    # whether a process group spanned the nodes, or one of them was connected to node 0
    grouped: bool = False
    started: bool = False  # whether its processes started others, which may have formed a group
    torch: bool = False  # whether its processes used torch
    reason: str = ""  # encoded, where it failed
    ranks: str = ""  # the states of its ranks, encoded, once a rank of any node is stuck

    @classmethod
    def decode(cls, body: Any, nnodes: int) -> NodeState:
        """Decode it from JSON.

        Raises:
            ValueError, KeyError, TypeError: it was not written by an agent of this group.
        """
        known = asdict(cls(0))
        found = cls(**{name: type(value)(body[name]) for name, value in known.items()})
        if not 0 <= found.node < nnodes or found.state not in {RUNNING, DONE, FAILED}:
            raise ValueError(f"not a node of this group: {body}")
        return found


class Roster:
    """All nodes of a group as this one knows them; with one node there is no connection.

    Attributes:
        joined: the restarts of a running group that this node joined, by its first answer.
    """

    def __init__(self, node: NodeEnv, job: str) -> None:
        """A roster; entered, it begins to listen or to call. Other jobs' calls are not answered."""
        self._node, self._job = node, job
        self._lock = threading.Lock()
        self._table = {node.node_rank: NodeState(node.node_rank)}
        self._changed, self._closed = threading.Event(), threading.Event()
        self._reported = threading.Event()
        self._server: socketserver.BaseServer | None = None
        self._thread: threading.Thread | None = None
        self.joined = 0

    def __enter__(self) -> Self:
        if self._node.nnodes == 1:
            return self
        target: Callable[[], None] = self._call_repeatedly
        if self._node.node_rank == 0:
            try:
                self._server = _listen(self._node, self)
            except OSError:
                return self  # the port is taken: each agent decides by what it sees itself
            target = partial(self._server.serve_forever, poll_interval=TIMEOUTS.poll)
        self._thread = threading.Thread(target=target, daemon=True, name="k8sjob-roster")
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closed.set()
        self._changed.set()
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()

    @property
    def active(self) -> bool:
        """Whether this node can learn about others."""
        return self._thread is not None

    @property
    def own(self) -> NodeState:
        """The state of this node, as the others learn it."""
        return self._table[self._node.node_rank]

    def report(self, **changes: Any) -> None:
        """Change this node's state; the others learn it within a second."""
        with self._lock:
            self._table[self._node.node_rank] = replace(self.own, **changes)
        self._reported.clear()
        self._changed.set()

    def give_up(self, reason: Reason) -> None:
        """Report that this node will not start again."""
        short = replace(reason, message=reason.message[:_MAX_MESSAGE])
        self.report(state=FAILED, reason=short.encode())

    def flush(self, seconds: float) -> None:
        """Wait until node 0 knows the last report."""
        if self._thread is not None and self._server is None:
            self._reported.wait(seconds)

    def others(self) -> list[NodeState]:
        """The states of the other nodes that have reported."""
        with self._lock:
            return [one for node, one in self._table.items() if node != self._node.node_rank]

    def restarts(self) -> int:
        """The restarts of the group: those of the node that has the most."""
        return max(state.restarts for state in [self.own, *self.others()])

    def done(self) -> tuple[int, ...]:
        """The other nodes that have ended with 0."""
        return tuple(sorted(state.node for state in self.others() if state.state == DONE))

    def failure(self) -> Reason | None:
        """Why another node gave up, where one did."""
        found = (Reason.decode(one.reason) for one in self.others() if one.state == FAILED)
        known = [reason for reason in found if reason is not None]
        return min(known, key=lambda reason: reason.time, default=None)

    # --- node 0 ---------------------------------------------------------------------------------

    def take(self, line: bytes) -> bytes:
        """Another node's call; returns the answer.

        Raises:
            ValueError, KeyError, TypeError: it is not valid.
        """
        body = json.loads(line)
        if body["job"] != self._job or body["nnodes"] != self._node.nnodes:
            raise ValueError("the call is from another group")
        state = NodeState.decode(body["state"], self._node.nnodes)
        with self._lock:
            if state.node and state.node not in self._table:
                self.joined = max(self.joined, state.restarts)
            if state.node:
                self._table[state.node] = state
            return json.dumps([asdict(one) for one in self._table.values()]).encode()

    # --- the others -----------------------------------------------------------------------------

    def _call_repeatedly(self) -> None:
        first = True
        while not self._closed.is_set():
            self._changed.clear()
            with suppress(OSError, *_INVALID):
                self._call(first=first)
                first = False
                if not self._changed.is_set():
                    self._reported.set()
            self._changed.wait(TIMEOUTS.exchange)

    def _call(self, *, first: bool) -> None:
        own = asdict(self.own)
        body = {"job": self._job, "nnodes": self._node.nnodes, "state": own}
        with _connect(self._node) as server, server.makefile("rb") as answers:
            server.sendall(json.dumps(body).encode() + b"\n")
            answer = json.loads(answers.readline(_MAX_BYTES))
        known = [NodeState.decode(one, self._node.nnodes) for one in answer]
        with self._lock:
            if first:
                self.joined = max((one.restarts for one in known), default=0)
            self._table |= {one.node: one for one in known if one.node != self._node.node_rank}


class _Handler(socketserver.StreamRequestHandler):
    timeout = TIMEOUTS.connect

    def handle(self) -> None:
        """Answer one call; an invalid one is not answered."""
        with suppress(OSError, *_INVALID):
            answer = self.server.roster.take(self.rfile.readline(_MAX_BYTES))  # type: ignore[attr-defined]
            self.wfile.write(answer + b"\n")


def _listen(node: NodeEnv, roster: Roster) -> socketserver.BaseServer:
    """The server of node 0; an OSError where the port is taken."""
    address = node.master_addr if is_loopback(node.master_addr) else ""
    both = not address and socket.has_dualstack_ipv6()
    listener = socket.create_server(
        (address, _port(node)),
        family=socket.AF_INET6 if both or ":" in address else socket.AF_INET,
        dualstack_ipv6=both,
    )
    server = socketserver.ThreadingTCPServer(("", 0), _Handler, bind_and_activate=False)
    server.socket.close()
    server.socket = listener
    server.daemon_threads = True
    server.roster = roster  # type: ignore[attr-defined]
    return server


def _connect(node: NodeEnv) -> socket.socket:
    return socket.create_connection((node.master_addr, _port(node)), TIMEOUTS.connect)


def _port(node: NodeEnv) -> int:
    far = node.master_port + _DISTANCE
    return far if far <= 65535 else node.master_port - _DISTANCE

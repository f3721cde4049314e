"""The roster of a group: which nodes have ended, and how often the group has started.

The agent of node 0 listens on a port derived from MASTER_PORT. The others call once a second, send
their state, and get the whole table. A call is one line of JSON each way, so a node that was away
needs no repair. Each line begins with an HMAC of the job's key: without the right one it changes
nothing. Where node 0 does not respond, behind a NetworkPolicy for instance, or does not accept what
it gets, each agent decides by what it sees itself.
"""

from __future__ import annotations

import hmac
import json
import socket
import socketserver
import threading
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Self

from k8sjob.contract import EventKind, Reason
from k8sjob.runtime.base.config import TIMEOUTS
from k8sjob.runtime.base.event_lines import log_line, write_event
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
_MAX_CALL: Final = 1 << 18
_MAX_ANSWER: Final = 1 << 20
_REFUSED: Final = 3
"""Calls in a row without an answer: one may be due to the end of node 0."""
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
        defaults = asdict(cls(0))
        state = cls(**{name: type(value)(body[name]) for name, value in defaults.items()})
        if not 0 <= state.node < nnodes or state.state not in {RUNNING, DONE, FAILED}:
            raise ValueError(f"not a node of this group: {body}")
        return state


class Roster:
    """All nodes of a group as this one knows them; with one node there is no connection.

    Attributes:
        joined: the restarts of a running group that this node joined, by its first answer.
    """

    def __init__(self, node: NodeEnv, job: str, key: bytes) -> None:
        """A roster; entered, it begins to listen or to call. Other jobs' calls are not answered."""
        self._node, self._job, self._key = node, job, key
        self._refusals = 0
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
        short = reason._replace(message=reason.message[:_MAX_MESSAGE])
        self.report(state=FAILED, reason=short.encode())

    def flush(self, seconds: float) -> None:
        """Wait until node 0 knows the last report."""
        if self._thread is not None and self._server is None:
            self._reported.wait(seconds)

    def others(self) -> list[NodeState]:
        """The states of the other nodes that have reported."""
        with self._lock:
            return [state for node, state in self._table.items() if node != self._node.node_rank]

    def restarts(self) -> int:
        """The restarts of the group: those of the node that has the most."""
        return max(state.restarts for state in [self.own, *self.others()])

    def done(self) -> tuple[int, ...]:
        """The other nodes that have ended with 0."""
        return tuple(sorted(state.node for state in self.others() if state.state == DONE))

    def failure(self) -> Reason | None:
        """Why another node gave up, where one did."""
        reasons = (Reason.decode(state.reason) for state in self.others() if state.state == FAILED)
        decoded = [reason for reason in reasons if reason is not None]
        return min(decoded, key=lambda reason: reason.time, default=None)

    # --- node 0 ---------------------------------------------------------------------------------

    def take(self, line: bytes) -> bytes:
        """Another node's call; returns the answer.

        Raises:
            ValueError, KeyError, TypeError: it is not valid.
        """
        body = json.loads(self._content(line))
        if body["job"] != self._job or body["nnodes"] != self._node.nnodes:
            raise ValueError("the call is from another group")
        state = NodeState.decode(body["state"], self._node.nnodes)
        with self._lock:
            # Where another node has counted further, node 0 is in a new container: nobody else can
            # tell it the count.
            if state.node and state.node not in self._table:
                self.joined = max(self.joined, state.restarts)
            if state.node:
                self._table[state.node] = state
            table = json.dumps([asdict(state) for state in self._table.values()])
        return self._signed(table, line)

    # --- both -----------------------------------------------------------------------------------

    def _signed(self, content: str, call: bytes = b"") -> bytes:
        """A line; with the call, if it is an answer to that."""
        body = content.encode() + b"\n"
        # An answer covers the call, so that an earlier answer cannot be sent again in its place.
        return hmac.digest(self._key, call + body, "sha256").hex().encode() + b" " + body

    def _content(self, line: bytes, call: bytes = b"") -> str:
        """The content of a call, or of the answer to one; a ValueError: it is not of this job."""
        content = line.partition(b" ")[2].rstrip(b"\n").decode()
        if hmac.compare_digest(self._signed(content, call), line):
            return content
        if call:
            self._refusals += 1
            if self._refusals == _REFUSED:
                message = (
                    f"node 0 at {self._node.master_addr} does not accept this node's messages, so"
                    " each decides alone when to restart and to end; start all pods from one image"
                    " and one manifest, with the same K8SJOB_SECRET"
                )
                log_line(message)
                write_event(EventKind.WARNING, message=message)
        raise ValueError("not authentic")

    # --- the others -----------------------------------------------------------------------------

    def _call_repeatedly(self) -> None:
        first = True
        while not self._closed.is_set():
            # Before the state is read: what changes during the call makes the next one come at
            # once.
            self._changed.clear()
            with suppress(OSError, *_INVALID):
                self._call(first=first)
                first, self._refusals = False, 0
                if not self._changed.is_set():
                    self._reported.set()
            self._changed.wait(TIMEOUTS.exchange)

    def _call(self, *, first: bool) -> None:
        state = asdict(self.own)
        body = {"job": self._job, "nnodes": self._node.nnodes, "state": state}
        with _connect(self._node) as server, server.makefile("rb") as answers:
            call = self._signed(json.dumps(body))
            server.sendall(call)
            answer = json.loads(self._content(answers.readline(_MAX_ANSWER), call))
        states = [NodeState.decode(reply, self._node.nnodes) for reply in answer]
        with self._lock:
            if first:
                self.joined = max((state.restarts for state in states), default=0)
            self._table |= {
                state.node: state for state in states if state.node != self._node.node_rank
            }


class _Server(socketserver.ThreadingTCPServer):
    daemon_threads = True
    roster: Roster

    def __init__(self) -> None:
        # TCPServer listens on one version of IP; _listen replaces its socket by one for both.
        super().__init__(("", 0), _Handler, bind_and_activate=False)


class _Handler(socketserver.StreamRequestHandler):
    # The base class gives each connection this timeout.
    timeout = TIMEOUTS.connect

    def handle(self) -> None:
        """Answer one call; an invalid one is not answered."""
        with suppress(OSError, *_INVALID):
            line = self.rfile.readline(_MAX_CALL)
            self.wfile.write(self.server.roster.take(line))  # type: ignore[attr-defined]


def _listen(node: NodeEnv, roster: Roster) -> socketserver.BaseServer:
    """The server of node 0; an OSError where the port is taken."""
    address = node.master_addr if is_loopback(node.master_addr) else ""
    both = not address and socket.has_dualstack_ipv6()
    listener = socket.create_server(
        (address, _port(node)),
        family=socket.AF_INET6 if both or ":" in address else socket.AF_INET,
        dualstack_ipv6=both,
    )
    server = _Server()
    server.socket.close()
    server.socket = listener
    server.roster = roster
    return server


def _connect(node: NodeEnv) -> socket.socket:
    return socket.create_connection((node.master_addr, _port(node)), TIMEOUTS.connect)


def _port(node: NodeEnv) -> int:
    far = node.master_port + _DISTANCE
    return far if far <= 65535 else node.master_port - _DISTANCE

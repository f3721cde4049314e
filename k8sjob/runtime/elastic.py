"""A group whose nodes come and go: whoever is there trains, and begins anew when that changes.

The nodes find each other by torch's own rendezvous (c10d), in a store at the operator's
PET_RDZV_ENDPOINT, which the first Worker hosts. Each round of it gives every node a number and a
place where the ranks of that round meet. A node that comes later waits for the next round: the
others stop their ranks after a checkpoint, and all meet again. A node that is lost takes its ranks
along; the ranks of the others fail by that, and their nodes meet without it.

torch's rendezvous takes the agent's memory (0.3 GB) and seconds of import, so an agent of a fixed
group never gets here.
"""

from __future__ import annotations

import json
import logging
import math
import os
import socket
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final, Self

import torch.distributed as dist
from torch.distributed.elastic.rendezvous import api
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import (
    DynamicRendezvousHandler,
    create_handler,
)

from k8sjob.contract import ExitCode
from k8sjob.runtime.agent import describe, rest, retryable, say, start
from k8sjob.runtime.env import NodeEnv
from k8sjob.runtime.generation import Record, verdict
from k8sjob.runtime.peer import PeerLost
from k8sjob.runtime.place import RETRY_S, is_loopback, listen, tcp_store

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

    from torch._C._distributed_c10d import Store

    from k8sjob.contract import Reason, RuntimeConfig
    from k8sjob.runtime.agent import Program
    from k8sjob.runtime.env import ElasticEnv
    from k8sjob.runtime.signals import Inbox

__all__ = ["keep_elastic"]

_LAST_CALL_S: Final = 3
"""Seconds that those who are enough to begin wait for more."""
_ALIVE_S: Final = 1
"""Seconds between two signs of life of a node."""
_MISSED: Final = 5
"""So many of them missed, and a node counts as lost."""
_ANSWER: Final = timedelta(seconds=60)
"""For one question to the store; the one who is to answer may have died meanwhile."""
_SETTLED_S: Final = 60.0
"""A round that lasted so long was a good one: its end is not counted against max_restarts."""
_LOOK_S: Final = 1.0
_GOODBYE_S: Final = 5.0
_PLACE: Final = "k8sjob/place"


def keep_elastic(
    env: ElasticEnv,
    program: Callable[[NodeEnv], Program],
    config: RuntimeConfig,
    inbox: Inbox,
) -> Reason | None:
    """Run a program on this node in round after round, until a round comes to its end.

    Args:
        env: where the nodes meet, and how many they may be.
        program: what runs on the node of a round.
        config: max_restarts counts this node's own failures, and rounds that ended within a
            minute; rendezvous_timeout, stop_grace and hang_timeout are used too.
        inbox: entered already.

    Returns:
        None when all processes of this node ended with 0, or the others have ended the job; else
        why the node's last round ended.

    Raises:
        PeerLost: fewer nodes than the job needs came in time.
        EnvError: there is no folder to write in.
        OSError: a process could not be started.
    """
    rounds = failures = 0
    with _Rendezvous(env, config.rendezvous_timeout) as rendezvous:
        while (node := rendezvous.join(inbox)) is not None:
            began = time.monotonic()
            say(f"round {rounds + 1}: node {node.node_rank} of {node.nnodes}")
            record = start(program(node), rounds, config, inbox, leave=rendezvous.has_newcomer)
            rounds += 1
            reason = verdict(record, inbox.stop)
            if reason is None:
                rendezvous.close()
                return None
            if inbox.stopping() or not retryable(reason.exit_code):
                return reason
            brief = time.monotonic() - began < _SETTLED_S
            if reason.exit_code != ExitCode.STOPPED and (brief or not _is_peers(reason)):
                failures += 1
                if failures > config.max_restarts:
                    return reason
                rest(min(2.0, 0.1 * 2**failures), inbox)
            say(f"{describe(reason)}; the nodes that are there meet again")
    if not inbox.stopping():
        return None
    return verdict(Record(stop_time=inbox.stop_time, orphan_time=inbox.orphan_time), inbox.stop)


def _is_peers(reason: Reason) -> bool:
    return reason.exit_code == ExitCode.PEER_LOST


@dataclass(slots=True)
class _Asked:
    """A question that may take long, asked in a thread so that a signal is heard meanwhile."""

    done: threading.Event
    answer: Any = None
    error: BaseException | None = None

    @classmethod
    def of(cls, question: Callable[[], Any]) -> Self:
        asked = cls(threading.Event())

        def ask() -> None:
            try:
                asked.answer = question()
            except BaseException as error:  # noqa: BLE001 - raised where it was asked
                asked.error = error
            asked.done.set()

        threading.Thread(target=ask, daemon=True, name="k8sjob-rendezvous").start()
        return asked


class _Rendezvous:
    """This node's part in the rounds of an elastic job."""

    def __init__(self, env: ElasticEnv, timeout: float) -> None:
        # Else a node that joins a second round waits for an address that nobody writes anew
        # (pytorch issue 135712).
        os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
        logging.getLogger("torch.distributed.elastic").setLevel(logging.ERROR)
        self._env, self._timeout = env, timeout
        self._addr = _own_address(env)
        self._hosted: Store | None = None
        self._handler: DynamicRendezvousHandler | None = None
        self._reserved: socket.socket | None = None
        self._newcomer = threading.Event()
        self._looking: threading.Event | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._settle()

    def join(self, inbox: Inbox) -> NodeEnv | None:
        """This node in the next round; None: it is to stop, or the others have ended the job."""
        if inbox.stopping():
            return None
        self._settle()
        asked = _Asked.of(self._next)
        while not asked.done.is_set():
            if inbox.stopping():
                return None
            inbox.wait(0.05)
        if asked.error is not None:
            raise asked.error
        node: NodeEnv | None = asked.answer
        if node is not None:
            self._look_out()
        return node

    def has_newcomer(self) -> bool:
        """Whether a node waits for the next round."""
        return self._newcomer.is_set()

    def close(self) -> None:
        """The job is done: whoever comes now finds it closed. The host says so for all."""
        self._settle()
        if self._handler is not None and self._hosted is not None:
            _Asked.of(self._handler.shutdown).done.wait(_GOODBYE_S)

    def _next(self) -> NodeEnv | None:
        deadline = time.monotonic() + self._timeout
        while True:
            try:
                if self._handler is None:
                    self._handler = self._connected()
                info = self._handler.next_rendezvous()
                return self._placed(info)
            except (api.RendezvousClosedError, api.RendezvousGracefulExitError):
                return None
            except api.RendezvousTimeoutError:
                why = "not enough of them came"
            except (api.RendezvousError, dist.DistError, OSError) as error:
                why = str(error.__cause__ or error).partition("\n")[0]
                self._handler = None
            if time.monotonic() > deadline:
                raise PeerLost(
                    f"fewer than {self._env.least} nodes met at {self._env.host}:{self._env.port}"
                    f" within {self._timeout:g} s: {why}; see `k8sjob why` for the replicas that"
                    " wait, or raise run.rendezvous_timeout"
                )
            time.sleep(RETRY_S)

    def _connected(self) -> DynamicRendezvousHandler:
        store = self._store()
        store.set_timeout(_ANSWER)
        backend = C10dRendezvousBackend(store, self._env.run_id)
        how = api.RendezvousParameters(
            backend=backend.name,
            endpoint=f"{self._env.host}:{self._env.port}",
            run_id=self._env.run_id,
            min_nodes=self._env.least,
            max_nodes=self._env.most,
            local_addr=self._addr,
            join_timeout=math.ceil(self._timeout),
            last_call_timeout=_LAST_CALL_S,
            # Before torch 2.7 these are not listened to: 5 s, and three of them.
            keep_alive_interval=_ALIVE_S,
            keep_alive_max_attempt=_MISSED,
        )
        handler: DynamicRendezvousHandler = create_handler(store, backend, how)
        return handler

    def _store(self) -> Store:
        """The store of all rounds: of the nodes of one machine the first that comes hosts it."""
        host, port = self._env.host, self._env.port
        if self._hosted is None and is_loopback(host):
            with suppress(OSError):
                listener = listen(host, port)
                self._hosted = tcp_store(host, port, is_master=True, listener=listener)
        elif self._hosted is None and self._env.hosts:
            self._hosted = tcp_store(host, port, is_master=True)
        if self._hosted is not None:
            return self._hosted
        socket.create_connection((host, port), timeout=5).close()  # torch's client is slow and loud
        return tcp_store(host, port, is_master=False)

    def _placed(self, info: api.RendezvousInfo) -> NodeEnv:
        """Where the ranks of a round meet: on its first node, at a port that is free there."""
        if info.rank == 0:
            self._reserved = _reserve(self._addr)
            port = self._reserved.getsockname()[1]
            info.store.set(_PLACE, json.dumps([self._addr, port]))
        addr, port = json.loads(info.store.get(_PLACE))
        return NodeEnv(info.rank, info.world_size, self._env.nproc_per_node, addr, port)

    def _look_out(self) -> None:
        """See whether nodes wait for the next round, until this one is over."""
        handler, over = self._handler, threading.Event()
        self._newcomer.clear()
        self._looking = over

        def look() -> None:
            while handler is not None and not over.wait(_LOOK_S):
                with suppress(Exception):  # the store's host may be gone; the ranks feel it soon
                    if handler.num_nodes_waiting() and not over.is_set():
                        self._newcomer.set()

        threading.Thread(target=look, daemon=True, name="k8sjob-newcomers").start()

    def _settle(self) -> None:
        """A round is over."""
        if self._looking is not None:
            self._looking.set()
            self._looking = None
        if self._reserved is not None:
            self._reserved.close()
            self._reserved = None


def _own_address(env: ElasticEnv) -> str:
    """The address by which the other nodes reach this one."""
    if is_loopback(env.host):
        return env.host
    family, kind, _, _, address = socket.getaddrinfo(env.host, env.port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as towards:
        towards.connect(address)  # sends nothing: it chooses the interface
        return str(towards.getsockname()[0])


def _reserve(addr: str) -> socket.socket:
    """A free port that stays ours: bound and never listened on, so rank 0 may bind it as well."""
    reserved = socket.socket(socket.AF_INET6 if ":" in addr else socket.AF_INET)
    reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    reserved.bind((addr, 0))
    return reserved

"""Elastic groups: the available nodes train, and restart when nodes join or leave.

The nodes find each other by torch's rendezvous (c10d), in a store at the operator's
PET_RDZV_ENDPOINT, which the first Worker hosts. Each round gives every node a number and an address
for the rendezvous of that round's ranks. A node that comes later waits for the next round: the
others stop their ranks after a checkpoint, and all join it. When a node is lost, its ranks are too;
the ranks of the others fail by that, and their nodes start the next round without it.

Torch's rendezvous takes 0.3 GB of the agent's memory and seconds of import, so the agent of a fixed
group does not import this module.
"""

from __future__ import annotations

import json
import logging
import math
import socket
import threading
import time
from concurrent.futures import wait
from contextlib import closing, suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final

import torch.distributed as dist
from torch.distributed.elastic.rendezvous import api
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import (
    DynamicRendezvousHandler,
    create_handler,
)

from k8sjob.contract import ExitCode
from k8sjob.runtime.agent.attempt import backoff, retryable, run_attempt, stopped, verdict
from k8sjob.runtime.agent.restarts import in_vain
from k8sjob.runtime.base.config import TIMEOUTS
from k8sjob.runtime.base.env import NodeEnv, export
from k8sjob.runtime.base.errors import PeerLost
from k8sjob.runtime.base.event_lines import log_line, write_restart
from k8sjob.runtime.base.network import is_loopback, listen, reserve
from k8sjob.runtime.base.signals import in_thread
from k8sjob.runtime.base.termination import describe
from k8sjob.runtime.comm.rendezvous import tcp_store

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch._C._distributed_c10d import Store

    from k8sjob.contract import Reason, RuntimeConfig
    from k8sjob.runtime.agent.attempt import Attempt
    from k8sjob.runtime.agent.restarts import RestartCount
    from k8sjob.runtime.agent.worker_group import Program
    from k8sjob.runtime.base.env import ElasticEnv
    from k8sjob.runtime.base.signals import Inbox

_MISSED: Final = 15
"""Missed heartbeats after which a node is lost: a machine may stand still for a while."""
_LOOKS: Final = 3
"""Consecutive checks that must show that a node is missing."""
_MAX_PAUSE_S: Final = 30.0
"""Before a round, after many failures: all nodes have to come to it again."""
_PLACE: Final = "k8sjob/place"
_DONE: Final = "k8sjob/done"
_THREAD: Final = "k8sjob-rendezvous"


def run_elastic(
    env: ElasticEnv,
    program: Callable[[NodeEnv], Program],
    config: RuntimeConfig,
    inbox: Inbox,
    count: RestartCount,
) -> tuple[Reason | None, bool]:
    """Run a program on this node in round after round, until a round succeeds.

    `max_restarts` counts this node's failures, over all containers of its pod, as long as no round
    between them lasts a minute.

    Returns:
        None when all processes of this node ended with 0, or the others have ended the job; else
        why the node's last round ended. And whether another one would end the same way.

    Raises:
        PeerLost: fewer nodes than the job needs came in time.
        EnvError: there is no folder to write in.
        OSError: a process could not be started.
    """
    failures, losses, before = count.restarts, 0, None
    earlier = count.restarts  # a round is counted from 1 again where its host is new
    with closing(_Rendezvous(env, config)) as rendezvous:
        while (node := rendezvous.join(inbox)) is not None:
            began = time.monotonic()
            count.begin(failures)
            log_line(f"round {rendezvous.round}: node {node.node_rank} of {node.nnodes}")
            leave = rendezvous.is_out_of_date
            record = run_attempt(program(node), rendezvous.round - 1, config, inbox, leave=leave)
            reason = verdict(record, inbox.stop)
            # Ranks that were asked to leave may have stopped with 0, so they are not known to be
            # done.
            if reason is None and record.leave_time == float("inf"):
                rendezvous.finish(inbox)
                return None, True
            # A process that cannot be killed keeps its GPU's memory and its ports from the next
            # round, and a code below 128 means that no round can end better.
            stays = record.unkillable or (reason and not retryable(reason.exit_code))
            if inbox.stopping() or stays:
                return reason, False
            if time.monotonic() - began >= TIMEOUTS.settled:
                failures = losses = 0
            why = describe(reason) if reason else "stopped"
            log_line(f"{why}; the remaining nodes start again")
            # A lost node costs the others no restart: it may happen as often as a spot machine is
            # taken away.
            if reason and is_loss(reason, node):
                losses += 1
            # Ranks that leave for a newcomer end as stopped, which is no failure.
            elif reason and reason.exit_code != ExitCode.STOPPED:
                failures += 1
                if last := in_vain(before, reason):
                    return last, True
                if failures > config.max_restarts:
                    return reason, False
                before = reason
                write_restart(earlier + rendezvous.round, reason)
            if failures or losses > 1:  # the first loss of a node is followed by no pause
                inbox.sleep(backoff(failures + losses, _MAX_PAUSE_S))
    return stopped(inbox), False


def is_loss(reason: Reason, node: NodeEnv) -> bool:
    """Whether a round ended because of another node."""
    ranks = set(node.ranks(node.node_rank))
    elsewhere = bool(reason.culprits) and ranks.isdisjoint(reason.culprits)
    return reason.means(ExitCode.PEER_LOST) or (reason.means(ExitCode.HUNG) and elsewhere)


class _Rendezvous:
    """This node's part in the rounds of an elastic job."""

    def __init__(self, env: ElasticEnv, config: RuntimeConfig) -> None:
        # Else a node that joins a second round waits for an address that is not written again
        # (pytorch issue 135712).
        export("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
        logging.getLogger("torch.distributed.elastic").setLevel(logging.ERROR)
        self._env, self._timeout = env, config.rendezvous_timeout
        self._stop_grace = max(config.stop_grace, config.session_hang_timeout)
        self._hosted: Store | None = None
        self._handler: Any = None
        self._addr = ""
        self._info: api.RendezvousInfo | None = None
        self._reserved: socket.socket | None = None
        self._grace: float | None = None
        self._over = threading.Event()
        self._watcher: threading.Thread | None = None

    @property
    def round(self) -> int:
        """The number of the round, the same on all nodes, counted from 1."""
        return int(self._handler._state_holder.state.round) + 1  # noqa: SLF001 - not public elsewhere

    def join(self, inbox: Inbox) -> NodeEnv | None:
        """This node in the next round; None: it is to stop, or the others have ended the job.

        Raises:
            PeerLost: fewer nodes than the job needs came in time, or the store does not respond.
        """
        if inbox.stopping():
            return None
        self.close()
        # The rendezvous of torch blocks, and a signal must stop this node meanwhile.
        joining = in_thread(self._next, _THREAD)
        until = time.monotonic() + self._timeout + TIMEOUTS.connect
        while not joining.done():
            if inbox.stopping():
                return None
            if time.monotonic() > until:  # torch waits without end for a host that is frozen
                raise PeerLost(self._failure("its host does not respond"))
            inbox.wait(TIMEOUTS.poll)
        node = joining.result()
        if node is not None:
            self._grace, self._over = None, threading.Event()
            arguments = (self._handler, node, self._over)
            self._watcher = threading.Thread(
                target=self._watch, args=arguments, daemon=True, name="k8sjob-round"
            )
            self._watcher.start()
        return node

    def is_out_of_date(self, _record: Attempt) -> float | None:
        """The seconds that the ranks have to end this round for another one; None: it is valid."""
        return self._grace

    def finish(self, inbox: Inbox) -> None:
        """This node is done: stay until all of the round are, so that none of them misses it."""
        done = in_thread(self._done, _THREAD)
        while not (done.done() or inbox.stopping() or self._grace is not None):
            inbox.wait(TIMEOUTS.poll)
        self.close()
        if self._handler is not None and self._hosted is not None:
            # This closes the rendezvous, by which a node that comes later learns that the job is
            # over. It uses the store, which may not respond, so it has a limit.
            wait([in_thread(self._handler.shutdown, _THREAD)], TIMEOUTS.connect)
            inbox.sleep(TIMEOUTS.linger)

    def close(self) -> None:
        """End a round."""
        self._over.set()
        if self._watcher is not None:
            self._watcher.join(TIMEOUTS.connect)
            self._watcher = None
        self._grace = None
        if self._reserved is not None:
            self._reserved.close()
            self._reserved = None

    def _done(self) -> None:
        info = self._info
        if info is None:
            return
        info.store.set(f"{_DONE}/{info.rank}", "")
        keys = [f"{_DONE}/{rank}" for rank in range(info.world_size)]
        while not info.store.check(keys) and not self._over.wait(TIMEOUTS.retry):
            pass

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
                # Torch compares the times that the nodes write down as their last signs of life.
                why = "not enough of them joined, or their clocks differ by more than a few seconds"
            except (api.RendezvousError, dist.DistError, OSError, RuntimeError) as error:
                why = str(error.__cause__ or error).partition("\n")[0]
                self._handler = None
            if time.monotonic() > deadline:
                raise PeerLost(self._failure(why))
            time.sleep(TIMEOUTS.retry)

    def _failure(self, why: str) -> str:
        return (
            f"fewer than {self._env.min_nodes} nodes joined at {self._env.host}:{self._env.port}"
            f" within {self._timeout:g} s: {why}; see `k8sjob why` for the replicas that wait, or"
            " raise run.rendezvous_timeout"
        )

    def _connected(self) -> DynamicRendezvousHandler:
        self._addr, hosts = _own_address(self._env)
        store = self._store(hosts=hosts)
        store.set_timeout(timedelta(seconds=TIMEOUTS.elastic_store))
        backend = C10dRendezvousBackend(store, self._env.run_id)
        how = api.RendezvousParameters(
            backend=backend.name,
            endpoint=f"{self._env.host}:{self._env.port}",
            run_id=self._env.run_id,
            min_nodes=self._env.min_nodes,
            max_nodes=self._env.max_nodes,
            local_addr=self._addr,
            join_timeout=math.ceil(self._timeout),
            last_call_timeout=math.ceil(TIMEOUTS.last_call),
            # Torch before 2.7 ignores these: 5 s, and three of them.
            keep_alive_interval=math.ceil(TIMEOUTS.keep_alive),
            keep_alive_max_attempt=_MISSED,
        )
        handler: DynamicRendezvousHandler = create_handler(store, backend, how)
        return handler

    def _store(self, *, hosts: bool) -> Store:
        """The store of all rounds; the first of several nodes on one machine hosts it."""
        host, port = self._env.host, self._env.port
        if self._hosted is None and is_loopback(host):
            with suppress(OSError):
                listener = listen(host, port)
                self._hosted = tcp_store(host, port, is_master=True, listener=listener)
        elif self._hosted is None and hosts:
            with suppress(dist.DistNetworkError):
                self._hosted = tcp_store(host, port, is_master=True)
        if self._hosted is not None:
            return self._hosted
        # torch's client is slow and loud
        socket.create_connection((host, port), TIMEOUTS.connect).close()
        return tcp_store(host, port, is_master=False)

    def _placed(self, info: api.RendezvousInfo) -> NodeEnv:
        """This node in a round, whose ranks join at a free port of the round's first node."""
        self._info = info
        if info.rank == 0:
            self._reserved = reserve(self._addr)
            port = self._reserved.getsockname()[1]
            info.store.set(_PLACE, json.dumps([self._addr, port]))
        info.store.wait([_PLACE], timedelta(seconds=TIMEOUTS.placed))
        addr, port = json.loads(info.store.get(_PLACE))
        return NodeEnv(info.rank, info.world_size, self._env.nproc_per_node, addr, port)

    def _watch(self, handler: Any, node: NodeEnv, over: threading.Event) -> None:
        """See whether the nodes of this round are still the right ones, until it is over."""
        missing = 0
        while not over.wait(TIMEOUTS.exchange):
            try:
                waiting = handler.num_nodes_waiting()
            except Exception:  # noqa: BLE001, S112 - its host may be gone: the ranks fail soon
                continue
            participants = handler._state_holder.state.participants  # noqa: SLF001 - not public elsewhere
            # The others have left out a node that was frozen, and do not notify it.
            alone = handler._this_node not in participants  # noqa: SLF001 - the same
            missing = missing + 1 if len(participants) < node.nnodes else 0
            if over.is_set():
                return
            if alone or missing >= _LOOKS:
                self._grace = TIMEOUTS.kill_grace
            elif waiting and node.nnodes < self._env.max_nodes:
                # There is time: a checkpoint may take longer than a pod has for its end.
                self._grace = self._stop_grace


def _own_address(env: ElasticEnv) -> tuple[str, bool]:
    """The address by which the other nodes reach this one, and whether this node hosts the store.

    A pod on its node's network has the node's name, so the endpoint's address shows it as well.
    """
    if is_loopback(env.host):
        return env.host, True
    family, kind, _, _, address = socket.getaddrinfo(env.host, env.port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as towards:
        towards.connect(address)  # sends nothing: it chooses the interface
        own_address = str(towards.getsockname()[0])
    return own_address, env.hosts or own_address == address[0]

"""The rendezvous of a group's ranks: a store, a roll call, and one message to go.

torch's rendezvous reports "2/3 clients joined" at its deadline. Here each rank first sets a key, so
the missing ones are named. A store serves exactly one rendezvous: a rank that finds it already
complete belongs to a later one, sets a note for the ranks that run without it, and tries again
until its deadline.
"""

from __future__ import annotations

import json
import socket
import time
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore

from k8sjob.runtime.base.config import TIMEOUTS
from k8sjob.runtime.base.errors import EnvError, PeerLost, ranks_in_words
from k8sjob.runtime.base.network import is_loopback, listen

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch._C._distributed_c10d import Store

    from k8sjob.runtime.base.env import DistEnv

NOTE: Final = "note"
"""Key under which a rank reports that the group of this store has lost a rank."""
_GO: Final = "go"


@dataclass(frozen=True, slots=True)
class RankInfo:
    """A rank, as the others learn about it."""

    rank: int  # 0 to world_size - 1
    world_size: int  # how many ranks it expects
    host: str  # name of its machine or pod
    backend: str  # the backend that it could use: "nccl", "gloo", or the one that was asked for
    gpu: str = ""  # identity of its GPU; empty without one


@dataclass(frozen=True, slots=True)
class Rendezvous:
    """A completed rendezvous."""

    store: Store  # the group's store; in rank 0 it may be the one that hosts it
    again: Callable[[], Store]  # makes another client of the same store, for another thread
    backend: str  # the backend that all ranks can use
    remark: str  # why it is not the one that some proposed; empty otherwise


class _TryAgainError(Exception):
    """This store serves another rendezvous, or was closed during this one."""


def rendezvous(
    env: DistEnv,
    info: RankInfo,
    *,
    choose: Callable[[Sequence[RankInfo]], tuple[str, str]],
    timeout: float,
    launcher_hosts: bool = False,
    on_wait: Callable[[Sequence[int]], object] = lambda _missing: None,
) -> Rendezvous:
    """Wait for all ranks, at most `timeout` seconds.

    On rank 0 `choose` gives the backend for all and a remark, and `on_wait` is called with the
    missing ranks, at most once a second and where they have changed; with none at the end, if it
    was called before. `launcher_hosts`: the store is torchrun's, which outlives the ranks.

    Raises:
        PeerLost: ranks did not come in time; they are named, and may come after a new start.
        EnvError: the ranks disagree about the world size.
    """
    began = time.monotonic()
    deadline = began + timeout
    endpoint = StoreEndpoint(env, launcher_hosts=launcher_hosts)
    while True:
        try:
            store = endpoint.open(deadline)
            _enter(store, info)
            if env.rank == 0:
                _await_all(store, env.world_size, deadline, on_wait)
                _publish_result(store, env.world_size, choose, began)
            backend, remark = _result(store, env.rank, deadline)
            break
        except (_TryAgainError, dist.DistNetworkError, dist.DistStoreError) as error:
            if time.monotonic() + TIMEOUTS.retry > deadline:
                raise PeerLost(
                    f"rank {env.rank} did not join the others at {endpoint} within {timeout:g} s; "
                    f"last seen: {str(error).splitlines()[0]}",
                    (0,),
                ) from error
        time.sleep(TIMEOUTS.retry)
    return Rendezvous(store, endpoint.connect, backend, remark)


def _enter(store: Store, info: RankInfo) -> None:
    """Set this rank's key."""
    # The rendezvous of this store is over: all its ranks were here, or its deadline came.
    if store.check([_GO]):
        store.set(NOTE, f"rank {info.rank} was started again")
        # The ranks of that group fail by the note, their store ends, and a new one comes in its
        # place.
        raise _TryAgainError("an earlier group is still running there, without this rank")
    store.set(f"here/{info.rank}", json.dumps(asdict(info)))


def _result(store: Store, rank: int, deadline: float) -> tuple[str, str]:
    """Wait for what rank 0 publishes; (backend, remark)."""
    while not store.check([_GO]):
        # Rank 0 publishes the result at the deadline at the latest.
        if time.monotonic() > deadline + TIMEOUTS.lead:
            raise PeerLost("rank 0 joined but never reported that all ranks had", (0,))
        time.sleep(TIMEOUTS.poll)
    result = json.loads(store.get(_GO))
    # Rank 0 hosts the store, and leaves a failed rendezvous when all have read why.
    if rank != 0:
        store.set(f"heard/{rank}", "")
    if result.get("error"):
        raise EnvError(result["error"])
    if result["missing"]:
        raise PeerLost(result["message"], tuple(result["missing"]))
    return result["backend"], result["remark"]


def _publish_result(
    store: Store,
    world_size: int,
    choose: Callable[[Sequence[RankInfo]], tuple[str, str]],
    began: float,
) -> None:
    """Rank 0: publish that all may go, or which ranks are missing since `began`."""
    missing = _missing(store, world_size)
    present = [rank for rank in range(world_size) if rank not in missing]
    result: dict[str, Any] = {"missing": missing}
    if missing:
        result["message"] = (
            f"{ranks_in_words(missing)} of {world_size} did not join within "
            f"{time.monotonic() - began:.0f} s; here: {ranks_in_words(present)}. Look at the logs "
            "of those replicas, or raise the rendezvous timeout if they are still being scheduled"
        )
    else:
        infos = [RankInfo(**json.loads(store.get(f"here/{rank}"))) for rank in present]
        result["error"] = _disagreement(infos)
        result["backend"], result["remark"] = choose(infos)
    store.set(_GO, json.dumps(result))
    if missing or result["error"]:
        # The store ends with rank 0: leave when the others know why.
        until = time.monotonic() + TIMEOUTS.lead / 3
        heard = [f"heard/{rank}" for rank in present if rank != 0]
        while time.monotonic() < until and not all(store.check([key]) for key in heard):
            time.sleep(TIMEOUTS.poll)


def _await_all(
    store: Store, world_size: int, deadline: float, on_wait: Callable[[Sequence[int]], object]
) -> None:
    """Rank 0: wait until all are here or the deadline has come."""
    keys, reported = [f"here/{rank}" for rank in range(world_size)], list[int]()
    report = time.monotonic() + TIMEOUTS.exchange
    while not (all_here := store.check(keys)) and time.monotonic() < deadline:
        if time.monotonic() >= report:
            report += TIMEOUTS.exchange
            if (missing := _missing(store, world_size)) != reported:
                reported = missing
                on_wait(reported)
        time.sleep(TIMEOUTS.poll)
    if reported and all_here:
        on_wait(())


def _missing(store: Store, world_size: int) -> list[int]:
    return [rank for rank in range(world_size) if not store.check([f"here/{rank}"])]


def _disagreement(infos: Sequence[RankInfo]) -> str:
    for info in infos:
        if info.world_size != infos[0].world_size:
            return (
                f"rank {info.rank} (on {info.host}) expects {info.world_size} ranks and rank 0 "
                f"(on {infos[0].host}) {infos[0].world_size}: give all replicas the same "
                "WORLD_SIZE"
            )
    return ""


# --- the store ----------------------------------------------------------------------------------


class StoreEndpoint:
    """The endpoint of a group's store: rank 0 hosts it, the others try until it answers."""

    def __init__(self, env: DistEnv, *, launcher_hosts: bool) -> None:
        self._addr, self._port = env.master_addr, env.master_port
        self._hosts = env.rank == 0 and not launcher_hosts
        self._reached = _by_itself(self._addr) if self._hosts else self._addr
        # A launcher's store outlives the restarts of its ranks; ours is a new one each time.
        self._prefix = f"k8sjob/{env.restart}" if launcher_hosts else "k8sjob"

    def __str__(self) -> str:
        return f"{self._addr}:{self._port}"

    def open(self, deadline: float) -> Store:
        """The store that rank 0 hosts; for the others a connection to it."""
        if self._hosts:
            return PrefixStore(self._prefix, self._host(deadline))
        return self.connect(deadline)

    def connect(self, deadline: float | None = None) -> Store:
        """A connection to the store; by default within 30 s."""
        self._await_listener(time.monotonic() + 30 if deadline is None else deadline)
        return PrefixStore(self._prefix, tcp_store(self._reached, self._port, is_master=False))

    def _host(self, deadline: float) -> Store:
        until = min(time.monotonic() + TIMEOUTS.listen, deadline)
        while True:
            try:
                # By default the store would listen on all addresses of the machine.
                listener = listen(self._addr, self._port) if is_loopback(self._addr) else None
                return tcp_store(self._addr, self._port, is_master=True, listener=listener)
            except (OSError, dist.DistNetworkError) as error:
                if time.monotonic() > until:
                    raise EnvError(
                        f"rank 0 cannot listen on {self}: {str(error).splitlines()[0]}; another "
                        "process uses the port: end it, or set another MASTER_PORT"
                    ) from error
            time.sleep(TIMEOUTS.retry)

    def _await_listener(self, deadline: float) -> None:
        """Connect until the port answers: torch's client is slow to try again, and loud."""
        while True:
            try:
                address = self._reached, self._port
                socket.create_connection(address, timeout=TIMEOUTS.connect).close()
            except OSError as error:
                if time.monotonic() > deadline:
                    raise PeerLost(
                        f"rank 0 does not respond at {self}: {error.strerror or error}; look at its"
                        " log, or raise the rendezvous timeout if it is still starting",
                        (0,),
                    ) from None
            else:
                return
            time.sleep(TIMEOUTS.poll)


def _by_itself(addr: str) -> str:
    """The address at which the host of a store reaches it.

    Its own name may not resolve yet: a headless Service's appear when its Pod has been seen to run.
    """
    return addr if is_loopback(addr) else "localhost"


def tcp_store(
    addr: str, port: int, *, is_master: bool, listener: socket.socket | None = None
) -> Store:
    """The store of a group, hosted by this process or by another.

    The host's store listens on all addresses unless it gets a socket of listen().

    Raises:
        DistNetworkError: it cannot be hosted here, or not be reached within seconds.
    """

    def make(**more: Any) -> Store:
        store: Store = dist.TCPStore(  # type: ignore[attr-defined]  # re-exported at run time
            _by_itself(addr) if is_master else addr,
            port,
            is_master=is_master,
            # A store that does not respond is closing, and torch would wait for it.
            timeout=timedelta(seconds=TIMEOUTS.connect),
            wait_for_workers=False,
            **more,
        )
        store.set_timeout(timedelta(seconds=TIMEOUTS.store))
        return store

    if listener is not None:
        # Before torch 2.7 the newer server, libuv's, does not accept our socket.
        return make(use_libuv=False, master_listen_fd=listener.detach())
    try:
        return make()
    except RuntimeError as error:
        if "libuv" not in str(error):
            raise
        # Debian builds torch without it; then the store has only its older server.
        return make(use_libuv=False)

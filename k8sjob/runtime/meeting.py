"""How the ranks of a group find each other: a store, a roll call, and one word to go.

torch's own rendezvous says "2/3 clients joined" at its deadline. Here each rank leaves a presence
key first, so the ones that did not come are named. A store serves exactly one meeting: a rank that
finds its word already given belongs to a later one, leaves a note for the ranks that run on
without it, and tries again until its deadline.
"""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Final

import torch.distributed as dist

from k8sjob.runtime.env import EnvError
from k8sjob.runtime.peer import PeerLost
from k8sjob.runtime.place import PAUSE_S, RETRY_S, Place

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch._C._distributed_c10d import Store

    from k8sjob.runtime.env import DistEnv

__all__ = ["NOTE", "Hello", "Meeting", "meet"]

NOTE: Final = "note"
"""Key under which one says that the group of this store has lost a rank."""
_GO: Final = "go"
_TELL_S: Final = 1.0
"""Seconds between two words about who is missing."""


@dataclass(frozen=True, slots=True)
class Hello:
    """What a rank says of itself when it comes.

    Attributes:
        rank: 0 to world_size - 1.
        world_size: how many ranks it expects.
        host: name of its machine or pod.
        pid: its process there.
        backend: the backend that it could use: "nccl", "gloo", or what was asked for.
        gpu: identity of its GPU; empty without one.
    """

    rank: int
    world_size: int
    host: str
    pid: int
    backend: str
    gpu: str = ""

    def encode(self) -> str:
        """As JSON."""
        return json.dumps(asdict(self))


@dataclass(frozen=True, slots=True)
class Meeting:
    """A group that has met.

    Attributes:
        store: the group's store; in rank 0 it may be the one that hosts it.
        again: makes another client of the same store, for a thread of its own.
        backend: the backend that all of them can use.
        remark: why it is another one than some proposed; empty otherwise.
        seconds: how long the meeting took.
    """

    store: Store
    again: Callable[[], Store]
    backend: str
    remark: str
    seconds: float


class _TryAgainError(Exception):
    """This store serves another meeting, or went away in the middle of this one."""


def meet(
    env: DistEnv,
    hello: Hello,
    *,
    choose: Callable[[Sequence[Hello]], tuple[str, str]],
    timeout: float,
    launcher_hosts: bool = False,
    on_wait: Callable[[Sequence[int]], object] = lambda _missing: None,
) -> Meeting:
    """Wait for all ranks.

    Args:
        env: who this is and where to meet.
        hello: what the others learn of this rank.
        choose: on rank 0: the backend for all, and a remark, from what each said.
        timeout: seconds until all must have come.
        launcher_hosts: the store belongs to the launcher (torchrun), which outlives the ranks.
        on_wait: on rank 0: told which ranks have not come, at most once a second and where that
            has changed; with none at the end, if it was told of some.

    Raises:
        PeerLost: ranks did not come in time; they are named, and may come after a new start.
        EnvError: two processes call themselves the same rank, or they count differently.
    """
    began = time.monotonic()
    deadline = began + timeout
    place = Place(env, launcher_hosts=launcher_hosts)

    def lead(store: Store) -> None:
        _await_all(store, env.world_size, deadline, on_wait)
        _give_word(store, env, choose, began)

    while True:
        try:
            store = place.store(deadline)
            backend, remark = _roll_call(store, env, hello, lead, deadline)
            break
        except (_TryAgainError, dist.DistNetworkError, dist.DistStoreError) as error:
            if time.monotonic() + RETRY_S > deadline:
                raise PeerLost(
                    f"rank {env.rank} did not meet the others at {place} within {timeout:g} s; "
                    f"last seen: {str(error).splitlines()[0]}",
                    (0,),
                ) from error
        time.sleep(RETRY_S)
    return Meeting(store, place.again, backend, remark, time.monotonic() - began)


def _roll_call(
    store: Store,
    env: DistEnv,
    hello: Hello,
    lead: Callable[[Store], object],
    deadline: float,
) -> tuple[str, str]:
    """Say that this rank is here, and wait for the word; returns (backend, remark)."""
    if store.check([_GO]):
        store.set(NOTE, f"rank {env.rank} was started again")
        raise _TryAgainError("an earlier group is still running there, without this rank")
    store.set(f"here/{env.rank}", hello.encode())
    if env.rank == 0:
        lead(store)
    while not store.check([_GO]):
        # Rank 0 gives the word at the deadline at the latest, whatever it says then.
        if time.monotonic() > deadline + 10:
            raise PeerLost("rank 0 came and never said that all are here", (0,))
        time.sleep(PAUSE_S)
    word = json.loads(store.get(_GO))
    if env.rank != 0:
        store.set(f"heard/{env.rank}", "")
    if word.get("error"):
        raise EnvError(word["error"])
    if word["missing"]:
        raise PeerLost(word["message"], tuple(word["missing"]))
    return word["backend"], word["remark"]


def _give_word(
    store: Store,
    env: DistEnv,
    choose: Callable[[Sequence[Hello]], tuple[str, str]],
    began: float,
) -> None:
    """Rank 0: tell all to go, or who is missing since `began`."""
    keys, missing = _keys(env.world_size), _missing(store, env.world_size)
    here = [rank for rank in range(env.world_size) if rank not in missing]
    word: dict[str, Any] = {"missing": missing}
    if missing:
        word["message"] = (
            f"{_ranks(missing)} of {env.world_size} did not come within "
            f"{time.monotonic() - began:.0f} s; here: {_ranks(here)}. Look at the logs of those "
            "replicas, or raise the rendezvous timeout if they are still being scheduled"
        )
    else:
        hellos = [Hello(**json.loads(store.get(key))) for key in keys]
        word["error"] = _disagreement(hellos)
        word["backend"], word["remark"] = choose(hellos)
    store.set(_GO, json.dumps(word))
    if missing or word["error"]:
        _await_heard(store, [rank for rank in here if rank != 0])


def _await_all(
    store: Store, world_size: int, deadline: float, on_wait: Callable[[Sequence[int]], object]
) -> None:
    """Rank 0: wait until all are here or the deadline has come."""
    keys, told = _keys(world_size), list[int]()
    look = time.monotonic() + _TELL_S
    while not (all_here := store.check(keys)) and time.monotonic() < deadline:
        if time.monotonic() >= look:
            look += _TELL_S
            if (missing := _missing(store, world_size)) != told:
                told = missing
                on_wait(told)
        time.sleep(PAUSE_S)
    if told and all_here:
        on_wait(())


def _keys(world_size: int) -> list[str]:
    return [f"here/{rank}" for rank in range(world_size)]


def _missing(store: Store, world_size: int) -> list[int]:
    return [rank for rank, key in enumerate(_keys(world_size)) if not store.check([key])]


def _await_heard(store: Store, ranks: Sequence[int]) -> None:
    """The store goes with rank 0: leave when the others know why."""
    until = time.monotonic() + 3
    while time.monotonic() < until and not all(store.check([f"heard/{r}"]) for r in ranks):
        time.sleep(PAUSE_S)


def _disagreement(hellos: Sequence[Hello]) -> str:
    for hello in hellos:
        if hello.world_size != hellos[0].world_size:
            return (
                f"rank {hello.rank} (on {hello.host}) expects {hello.world_size} ranks and rank 0 "
                f"(on {hellos[0].host}) {hellos[0].world_size}: give all replicas the same "
                "WORLD_SIZE"
            )
    return ""


def _ranks(ranks: Sequence[int]) -> str:
    """Ranks as words: "rank 2", "ranks 2, 5 and 7", "ranks 0, 1, 2, ... and 99"."""
    shown = [str(rank) for rank in ranks]
    if len(shown) == 1:
        return f"rank {shown[0]}"
    if len(shown) > 8:
        shown = [*shown[:6], "...", shown[-1]]
    return f"ranks {', '.join(shown[:-1])} and {shown[-1]}"

"""The rendezvous, with threads as ranks, each with its connection."""

import socket
import threading
import time

import pytest

from k8sjob.runtime.base.env import DistEnv
from k8sjob.runtime.base.errors import EnvError, PeerLost
from k8sjob.runtime.base.network import reserve
from k8sjob.runtime.comm.process_group import common_backend
from k8sjob.runtime.comm.rendezvous import NOTE, RankInfo, rendezvous


@pytest.fixture
def port():
    """A port that stays ours: bound, never listened on."""
    with reserve("127.0.0.1") as holder:
        yield holder.getsockname()[1]


def join(port, rank, world, *, timeout=60.0, backend="gloo", addr="127.0.0.1", **options):
    env = DistEnv(rank, rank, world, world, addr, port)
    info = RankInfo(rank, world, "here", backend)
    return rendezvous(env, info, choose=common_backend, timeout=timeout, **options)


def in_threads(*calls):
    """What each call returned or raised."""
    results = [None] * len(calls)

    def run(index):
        try:
            results[index] = calls[index]()
        except (PeerLost, EnvError) as error:
            results[index] = error

    threads = [threading.Thread(target=run, args=(index,)) for index in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=40)
    return results


def test_all_meet_and_agree(port):
    backends = ["nccl", "gloo", "nccl"]
    told = []
    calls = [
        lambda r=r, b=b: join(port, r, 3, backend=b, on_wait=told.append)
        for r, b in enumerate(backends)
    ]
    meetings = in_threads(*calls)
    assert told == [], "nobody had to wait"
    assert [meeting.backend for meeting in meetings] == ["gloo"] * 3
    assert "no GPU for rank 1," in meetings[2].remark
    meetings[2].store.set("word", "heard")
    assert meetings[0].again().get("word") == b"heard"


def test_rank_0_reports_the_missing_ranks_until_all_are_here(port):
    told, come = [], threading.Event()

    def tell(missing):
        told.append(list(missing))
        come.set()

    def late():
        come.wait(60)
        return join(port, 1, 2)

    in_threads(lambda: join(port, 0, 2, timeout=60, on_wait=tell), late)
    assert told == [[1], []]


def test_a_store_serves_one_rendezvous(port):
    first = in_threads(lambda: join(port, 0, 2), lambda: join(port, 1, 2))
    with pytest.raises(PeerLost, match="an earlier group is still running"):
        join(port, 1, 2, timeout=1)
    assert first[0].store.get(NOTE) == b"rank 1 was started again"


def test_the_next_rendezvous_follows_when_the_old_store_is_gone(port):
    old = in_threads(lambda: join(port, 0, 2), lambda: join(port, 1, 2))

    def host_again():
        time.sleep(0.5)
        old.clear()  # the last reference to the store
        return join(port, 0, 2)

    new = in_threads(host_again, lambda: join(port, 1, 2))
    assert [meeting.backend for meeting in new] == ["gloo"] * 2


def test_rank_0_needs_no_name_that_resolves(port):
    """The name of its own Pod may appear in the DNS after it has started."""
    found = in_threads(
        lambda: join(port, 0, 2, addr="no-such-host.invalid"), lambda: join(port, 1, 2)
    )
    assert [one.backend for one in found] == ["gloo"] * 2
    found[0].again().set("word", "said")
    assert found[1].store.get("word") == b"said"


def test_a_port_that_another_listens_on_is_named():
    with socket.create_server(("127.0.0.1", 0)) as other:
        taken = other.getsockname()[1]
        with pytest.raises(EnvError, match=f"cannot listen on 127.0.0.1:{taken}"):
            join(taken, 0, 2, timeout=0.3)

import random
import threading
import time
from dataclasses import replace

import pytest
import torch.distributed as dist
from waiting import until

from k8sjob.runtime.base.errors import PeerLost
from k8sjob.runtime.comm import stop
from k8sjob.runtime.comm.rendezvous import Rendezvous
from k8sjob.runtime.comm.stop import StopCoordinator


class Group:
    """Ranks as threads over one store in memory."""

    def __init__(self, world):
        self.store = dist.HashStore()
        meeting = Rendezvous(self.store, lambda: self.store, "gloo", "")
        self.coordinators = [StopCoordinator(rank, world) for rank in range(world)]
        for coordinator in self.coordinators:
            coordinator.start(meeting)

    @property
    def lost(self):
        return [each for each in self.coordinators if each._lost]

    def close(self):
        for coordinator in self.coordinators:
            coordinator.close()


@pytest.fixture
def group(monkeypatch):
    made = []
    patient = replace(stop.TIMEOUTS, loss_grace=600)  # else a loss would end this process
    monkeypatch.setattr(stop, "TIMEOUTS", patient)

    def make(world):
        made.append(Group(world))
        return made[-1]

    yield make
    for one in made:
        one.close()


@pytest.mark.parametrize("seed", range(4))
def test_all_ranks_stop_before_the_same_point(group, seed):
    world, limit, asked_at = 4, 10_000, 20
    ranks = group(world)
    collective = threading.Barrier(world, timeout=60)
    stopped = {}

    def run(rank):
        pace = random.Random(f"{seed}-{rank}")
        for point in range(limit):
            if not ranks.coordinators[rank].passes():
                stopped[rank] = point
                return
            if point == asked_at and rank == seed:
                ranks.coordinators[rank].request("SIGTERM")
            if pace.random() < 0.1:
                time.sleep(pace.random() * 0.02)
            collective.wait()  # breaks if a rank is missing here: a collective left half done

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
    assert set(stopped) == set(range(world))
    assert len(set(stopped.values())) == 1
    assert asked_at < stopped[0] < limit
    assert {coordinator.reason for coordinator in ranks.coordinators} == {"SIGTERM"}
    assert not ranks.lost


def test_a_failing_rank_warns_the_others(group):
    ranks = group(2)
    ranks.coordinators[0].warn_others("rank 0 failed: ValueError: no")
    until(lambda: len(ranks.lost) == 2)
    with pytest.raises(PeerLost, match="rank 0 failed: ValueError: no"):
        ranks.coordinators[1].finish(10)


def test_no_rank_leaves_before_all_are_at_the_end(group):
    ranks = group(2)
    left = []

    def leave(rank):
        ranks.coordinators[rank].finish(10)
        left.append(rank)

    first = threading.Thread(target=leave, args=(1,))
    first.start()
    first.join(timeout=0.3)
    assert not left
    leave(0)
    first.join(timeout=60)
    assert left == [1, 0]  # the host of the store last


def test_a_rank_that_does_not_come_to_the_end_is_named(group):
    ranks = group(3)
    with pytest.raises(PeerLost, match="ranks 1-2 did not reach the end") as caught:
        ranks.coordinators[0].finish(0.2)
    assert caught.value.culprits == (1, 2)


def test_a_finished_rank_does_not_delay_a_stop(group):
    ranks = group(2)
    done, other = ranks.coordinators
    assert done.passes()
    assert other.passes()
    leaving = threading.Thread(target=done.finish, args=(10,))
    leaving.start()
    other.request("SIGTERM")
    until(lambda: not other.passes())  # it asks, and learns that nobody else goes on
    other.finish(10)
    leaving.join(timeout=60)
    assert not leaving.is_alive()

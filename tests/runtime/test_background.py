"""Work beside the training, and how ranks tell each other of it."""

import threading
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from k8sjob.runtime.base.env import dist_env
from k8sjob.runtime.checkpoint.writer import Background, SaveReports
from k8sjob.runtime.comm.process_group import Group
from k8sjob.runtime.comm.rendezvous import Rendezvous


def test_a_beat_comes_only_for_progress():
    go, sizes, beats = threading.Event(), [1, 2, 2, 2, 5], []

    def progress():
        if len(sizes) == 1:
            go.set()
        return sizes.pop(0) if sizes else 5

    background = Background(progress, lambda: beats.append(len(sizes)))
    background.begin(lambda: go.wait(60), lambda _: None)
    assert background.finish()
    assert beats == [4, 3, 0]


def test_work_that_does_not_move_is_left_alone():
    background, go = Background(lambda: 0, lambda: None), threading.Event()
    background.begin(lambda: go.wait(60), lambda _: None)
    assert not background.finish(0.1)
    assert background.busy
    go.set()


@pytest.fixture
def tallies():
    """Those of three ranks that share a store."""
    store = dist.HashStore()
    met = Rendezvous(store, lambda: store, "gloo", "")
    ranks = [replace(dist_env({}), rank=rank, world_size=3) for rank in range(3)]
    return [SaveReports(Group(env, "gloo", torch.device("cpu"), met)) for env in ranks]


def test_a_rank_that_could_not_do_it_is_named(tallies):
    tallies[1].report("save/1", "done")
    tallies[2].report("save/1", "No space left on device", failed=True)
    with pytest.raises(OSError, match="rank 2: No space left on device"):
        tallies[0].collect("save/1")


def test_nobody_waits_for_a_rank_that_has_gone(tallies):
    tallies[1].report("save/1", "done")
    tallies[0].abandon()
    with pytest.raises(OSError, match="rank 2 did not report that its part is written"):
        tallies[0].collect("save/1")

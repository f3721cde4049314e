"""What ranks called, told to the user; ranks that really disagree are in tests/dist."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch.distributed import HashStore

from k8sjob.runtime.base.env import DistEnv
from k8sjob.runtime.base.errors import ranks_in_words
from k8sjob.runtime.comm.call_order import LEAVING, Call, CallOrder, disagreement
from k8sjob.runtime.comm.process_group import Group
from k8sjob.runtime.comm.rendezvous import Rendezvous


def call(number, name, detail="", line=1):
    return Call(number, name, detail, "main.py", line)


EVALUATE = call(7, "run.evaluate", "12 samples", 44)
STEP = call(7, "run.step", line=41)


@pytest.mark.parametrize(
    ("others", "reply"),
    [
        (
            dict.fromkeys([1, 2, 3], STEP),
            "rank 0 called run.evaluate (main.py:44) where ranks 1-3 called run.step (main.py:41);",
        ),
        ({1: EVALUATE, 2: STEP}, "ranks 0-1 called run.evaluate (main.py:44) where rank 2 called"),
        (
            {1: EVALUATE._replace(number=8, line=50)},
            "where rank 1 called run.evaluate (main.py:50)",
        ),
        ({1: EVALUATE._replace(detail="9 samples")}, "with 12 samples (main.py:44) where rank 1"),
        ({1: call(7, LEAVING, line=9)}, "where rank 1 left runtime.session (main.py:9);"),
    ],
)
def test_calls_that_differ_are_reported_with_their_lines(others, reply):
    assert reply in disagreement(0, EVALUATE, others)


@pytest.mark.parametrize(
    "others",
    [
        {},
        {1: STEP._replace(number=6)},  # behind: it may yet come
        {1: EVALUATE},
        {1: EVALUATE._replace(line=45), 2: STEP._replace(number=2)},  # another line will do
    ],
)
def test_ranks_that_may_yet_come_are_waited_for(others):
    assert disagreement(0, EVALUATE, {0: EVALUATE, **others}) == ""


def test_ranks_are_spans():
    assert ranks_in_words([0]) == "rank 0"
    assert ranks_in_words([3, 1, 2, 5]) == "ranks 1-3, 5"
    assert ranks_in_words([4, 5]) == "ranks 4-5"
    assert ranks_in_words(range(0, 40, 2)) == "ranks 0, 2, 4, 6, 8, 10, 12, 14, ..."


def test_the_same_calls_are_checked_on_all_ranks_whichever_lines_they_come_from():
    store, together = HashStore(), threading.Barrier(2, timeout=60)
    met = Rendezvous(store, lambda: store, "gloo", "")

    def train(rank):
        env = DistEnv(rank, 0, 2, 1, "127.0.0.1", 29500)
        group = Group(env, "gloo", torch.device("cpu"), met)
        calls = CallOrder(group, 0, 10.0, lambda: None)
        for step in range(70):
            if rank == 0 and step % 10 == 0:
                calls.check_often("job.reduce", "loss")
            else:
                calls.check_often("job.reduce", "loss")
            together.wait()  # the collective itself

    with ThreadPoolExecutor() as pool:
        for rank in [pool.submit(train, rank) for rank in range(2)]:
            rank.result()

"""Which waits for progress are reported, and how often."""

import types

import pytest

from k8sjob.runtime.base.heartbeat import Seen
from k8sjob.runtime.base.long_waits import LongWaits, StepClock, step_missing


@pytest.fixture
def clock(monkeypatch):
    now = types.SimpleNamespace(seconds=1000.0)
    own = types.SimpleNamespace(monotonic=lambda: now.seconds)
    monkeypatch.setattr("k8sjob.runtime.base.long_waits.time", own)
    return now


def test_a_wait_is_reported_once_and_shorter_ones_no_more(clock):
    waits = LongWaits(100)

    def look(now, since):
        clock.seconds = 1000.0 + now
        found = waits.look(1000.0 + since)
        return found and (found["seconds"], found["over"])

    assert look(9, 0) is None
    assert look(11, 0) == (11, False)
    assert look(20, 0) is None
    assert look(31, 30) == (30, True)
    assert look(85, 30) is None, "not twice as long"
    assert look(91, 30) == (61, False)


def test_a_script_waits_for_a_step_of_any_rank(clock):
    steps = StepClock(100)

    def look(seconds, *counts):
        clock.seconds += seconds
        at = {"where": "main.py:9 in test", "ranks": 2}
        found = steps.look({rank: Seen(step=step, **at) for rank, step in counts})
        return found and (found["seconds"], found["over"])

    assert look(0, (0, -1), (1, -1)) is None
    assert look(50, (0, -1), (1, -1)) is None, "before the first step"
    assert look(1, (0, 0), (1, 900)) is None
    assert look(9, (0, 1), (1, 900)) is None
    assert look(9, (0, 2), (1, 900)) is None, "the one that is behind steps"
    assert look(12, (0, 2), (1, 900)) == (12, False)
    assert look(5, (1, 900)) is None, "rank 0 has ended"
    assert look(5, (0, -1), (1, 900)) is None, "its file could not be read"
    assert look(1, (0, 3), (1, 900)) == (23, True)


def test_before_the_first_step_others_wait_for_a_rank_that_prepares(clock):
    steps = StepClock(100)
    prepares, waits = Seen(where="main.py:5 in load", works=True), Seen(where="main.py:9", waited=9)
    assert steps.look({0: prepares, 1: prepares}) is None
    clock.seconds += 50
    assert steps.look({0: prepares, 1: prepares}) is None
    assert steps.look({0: prepares, 1: waits}) is None
    clock.seconds += 11
    wait = steps.look({0: prepares, 1: waits})
    assert (wait["seconds"], wait["over"]) == (11, False)
    message = step_missing(wait, {0: prepares, 1: waits})["message"]
    assert (
        message
        == "no optimizer step for 11 s: rank 0 works at main.py:5 in load, rank 1 is at main.py:9"
    )

import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from k8sjob.runtime.progress import Computing, Waiting, lost_time


def test_waiting_is_counted_from_sync_to_what_comes_next():
    waiting = Waiting()
    began = time.monotonic()
    waiting.phase("compute")
    waiting.phase("sync")
    waiting.phase("sync")  # within the first
    time.sleep(0.02)
    waiting.phase("compute")
    waiting.phase("compute")
    spent = time.monotonic() - began
    assert 0.02 <= waiting.seconds <= spent
    waiting.reset()
    assert waiting.seconds == 0


def test_what_is_computed_meanwhile_is_a_ranks_own():
    clock = iter([5.0, 5.03])
    waiting = Waiting(lambda: next(clock))
    began = time.monotonic()
    waiting.phase("sync")
    time.sleep(0.05)
    waiting.phase("compute")
    assert 0.02 <= waiting.seconds <= time.monotonic() - began - 0.03


def spun(seconds):
    """Seconds that a busy loop took, and those of them that count as computing."""
    clock, began = Computing(), time.monotonic()
    before = clock()
    while time.monotonic() < began + seconds:
        pass
    return time.monotonic() - began, clock() - before


def test_computing_is_counted_and_sleeping_is_not():
    clock = Computing()
    before = clock()
    time.sleep(0.2)
    assert clock() - before < 0.1
    spent, computed = spun(0.2)
    assert computed == pytest.approx(spent, rel=0.2)


@pytest.mark.skipif(not Path("/proc/thread-self/schedstat").exists(), reason="Linux tells of it")
def test_so_is_the_time_in_which_others_have_the_core():
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})
    try:
        argv = [sys.executable, "-c", "print(flush=True)\nwhile True: pass"]
        with subprocess.Popen(argv, stdout=subprocess.PIPE) as other:
            try:
                other.stdout.readline()
                spent, computed = spun(0.5)
            finally:
                other.kill()
    finally:
        os.sched_setaffinity(0, cores)
    assert computed == pytest.approx(spent, rel=0.2)


def test_a_thread_may_go_on_with_the_clock_of_one_that_has_ended():
    with ThreadPoolExecutor(1) as other:
        clock = other.submit(Computing).result()
    before = clock()
    while clock() < before + 0.01:
        pass


@pytest.mark.parametrize(
    ("own", "seconds", "slowest"),
    [([1.0, 4.0, 1.0], 2.0, 1), ([2.0, 2.0], 0.0, 0), ([0.5], 0.0, 0), ([0.0, 3.0], 1.5, 1)],
)
def test_all_wait_for_whoever_needs_most(own, seconds, slowest):
    assert lost_time(own) == (pytest.approx(seconds), slowest)

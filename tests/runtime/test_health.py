import time

import pytest
import torch

from k8sjob.runtime.health import Waiting, lost_time, peak_memory


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


def test_a_phase_that_goes_on_is_counted_when_it_ends():
    waiting = Waiting()
    waiting.phase("sync")
    assert waiting.seconds == 0
    waiting.phase("evaluate")
    assert waiting.seconds > 0


@pytest.mark.parametrize(
    ("own", "seconds", "slowest"),
    [([1.0, 4.0, 1.0], 2.0, 1), ([2.0, 2.0], 0.0, 0), ([0.5], 0.0, 0), ([0.0, 3.0], 1.5, 1)],
)
def test_all_wait_for_whoever_needs_most(own, seconds, slowest):
    lost = lost_time(own)
    assert lost.seconds == pytest.approx(seconds)
    assert lost.slowest == slowest


def test_memory_is_in_bytes_and_a_peak():
    before = peak_memory(torch.device("cpu"))
    assert before > 2**20
    held = torch.ones(2**22)
    assert peak_memory(torch.device("cpu")) >= before
    assert held.numel() == 2**22

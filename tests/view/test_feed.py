import os
import signal
import threading
import time

import pytest

from k8sjob.view.follow import Feed, Interrupts


def test_everything_comes_in_order():
    batches = list(Feed(range(5000)))
    assert [item for batch in batches for item in batch] == list(range(5000))
    assert len(batches) < 100


def test_empty_batches_come_while_nothing_happens():
    go = threading.Event()

    def source():
        yield 1
        go.wait(10)
        yield 2

    seen = []
    for batch in Feed(source()):
        seen.append(batch)
        if seen.count([]) == 2:
            go.set()
    assert [item for batch in seen for item in batch] == [1, 2]


def test_the_error_of_a_source_is_raised_after_its_items():
    def source():
        yield 1
        raise KeyError("gone")

    seen = []
    with pytest.raises(KeyError, match="gone"):
        seen.extend(item for batch in Feed(source()) for item in batch)
    assert seen == [1]


def test_interrupts_are_counted_and_the_source_lives():
    def source():
        for _ in range(3):
            time.sleep(0.05)
            yield "still here"

    before = signal.getsignal(signal.SIGINT)
    seen = []
    with Interrupts() as interrupts:
        for batch in Feed(source()):
            seen += batch
            if interrupts.count < 2:
                os.kill(os.getpid(), signal.SIGINT)
    assert interrupts.count == 2
    assert interrupts.exit_code == 130
    assert len(seen) == 3
    assert signal.getsignal(signal.SIGINT) is before


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_a_termination_has_its_own_exit_code(number, code):
    before = signal.signal(number, signal.SIG_DFL)  # these tests may run under nohup
    try:
        with Interrupts() as interrupts:
            signal.raise_signal(number)
    finally:
        signal.signal(number, before)
    assert (interrupts.count, interrupts.exit_code) == (1, code)


def test_a_terminal_that_is_closed_is_nothing_to_who_has_said_nohup():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with Interrupts() as interrupts:
            signal.raise_signal(signal.SIGHUP)
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)
    assert (interrupts.count, interrupts.exit_code) == (0, 0)

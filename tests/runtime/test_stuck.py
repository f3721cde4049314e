"""Who is to blame where ranks of a script wait in a collective; see tests/dist for real ranks."""

from __future__ import annotations

import time

import pytest

from k8sjob.contract import ExitCode
from k8sjob.runtime.observer import Seen, decode_ranks, encode_ranks
from k8sjob.runtime.stuck import Waiting, hang_of

STUCK = Seen(torch=True, ranks=3, step=7, where="main.py:9 in train", waited=600, stuck=True)
WAITS = Seen(torch=True, ranks=3, step=7, where="main.py:9 in train", waited=20)
WORKS = Seen(torch=True, ranks=3, step=7, where="main.py:5 in load")


class TestHangOf:
    @pytest.mark.parametrize(
        "seen",
        [
            {},
            {0: Seen(), 1: Seen()},
            {0: WAITS, 1: WORKS},
            {0: STUCK, 1: Seen(ranks=3, step=90, where="main.py:5 in load", steps_on=True)},
        ],
    )
    def test_none(self, seen):
        assert hang_of(seen) is None

    def test_those_that_do_not_wait_are_to_blame(self):
        why = hang_of({0: STUCK, 1: WORKS, 2: WAITS, 3: Seen()})
        assert (why.exit_code, why.type, why.step) == (ExitCode.HUNG, "Hang", 7)
        assert (why.rank, why.culprits, why.where) == (1, (1,), "main.py:5")
        assert why.message == (
            "rank 1 is at main.py:5 in load;"
            " rank 0 has waited 600 s in a collective, main.py:9 in train"
        )

    def test_all_wait(self):
        why = hang_of({0: STUCK, 1: WAITS})
        assert (why.rank, why.culprits, why.where) == (0, (), "main.py:9")
        assert why.message.endswith("; no rank is known that does not wait")

    def test_all_wait_in_different_lines(self):
        other = Seen(ranks=3, step=7, where="main.py:20 in test", waited=601)
        assert hang_of({0: STUCK, 1: other}).message.endswith(
            "; so have all others, in different lines:"
            " rank 0 is at main.py:9 in train, rank 1 is at main.py:20 in test"
        )


class TestRanksOfOtherNodes:
    def test_those_that_matter_arrive(self):
        told = decode_ranks(encode_ranks({0: WAITS, 1: STUCK, 2: WORKS, 3: WAITS}))
        assert told == {1: STUCK, 2: WORKS}

    @pytest.mark.parametrize(
        "text",
        [
            *("", "[]", "{", '{"x": {}}', '{"1": 2}', '{"1": {"other": 1}}'),
            *('{"1": {"waited": "9"}}', '{"1": {"step": Infinity}}'),
        ],
    )
    def test_what_is_none_says_nothing(self, text):
        assert decode_ranks(text) == {}


def test_a_process_without_a_group_does_not_wait():
    waiting = Waiting(0.01)
    for _ in range(3):
        waiting.look(0)
        time.sleep(0.01)
    assert (waiting.where, waiting.seconds, waiting.too_long) == ("", 0, False)

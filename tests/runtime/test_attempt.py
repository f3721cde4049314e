"""When to signal, and why a start ended: the decisions, without a process."""

from __future__ import annotations

import math
import signal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from k8sjob.contract import ExitCode, Reason
from k8sjob.runtime.agent.attempt import Attempt, deadlines, stacks_due, verdict
from k8sjob.runtime.agent.worker_group import Exit

NEVER = math.inf


def ended(code, moment, number=0):
    return Exit(code, number, moment, moment)


def killed(number, moment):
    return ended(128 + number, moment, number)


class TestDeadlines:
    @pytest.mark.parametrize(
        ("record", "term", "kill"),
        [
            (Attempt(exits={0: ended(0, 1.0)}), NEVER, NEVER),
            (Attempt(stop_time=10), 10, 55),
            (Attempt(exits={0: ended(1, 10)}), 13, 16),  # the others write their reasons
            (Attempt(leave_time=10, leave_grace=600), 10, 610),
            (Attempt(leave_time=10, leave_grace=600, stop_time=20), 10, 65),
            (Attempt(stop_time=10, orphan_time=12), 10, 15),
            (Attempt(hang_time=10), NEVER, 12),  # it writes its stacks
        ],
    )
    def test_signals(self, record, term, kill):
        assert deadlines(record, 45) == (term, kill)

    def test_a_process_that_does_not_end_writes_its_stacks_before_it_is_killed(self):
        assert stacks_due(Attempt(stop_time=10), 45) == 53
        assert stacks_due(Attempt(stop_time=10), 1) == 10.5
        assert stacks_due(Attempt(exits={0: ended(1, 10)}), 45) == 14.5

    def test_stacks_are_written_once_and_not_by_orphans(self):
        assert stacks_due(Attempt(), 45) == NEVER
        assert stacks_due(Attempt(stop_time=10, orphan_time=12), 45) == NEVER
        assert stacks_due(Attempt(stop_time=10, signals={signal.SIGABRT: 11}), 45) == NEVER

    def test_a_requested_exit_is_not_a_failure(self):
        record = Attempt(
            exits={0: killed(15, 11), 1: ended(143, 12), 2: killed(9, 60)},
            stop_time=10,
            signals={signal.SIGTERM: 10, signal.SIGKILL: 55},
        )
        assert record.failures == {}

    def test_a_kill_by_another_process_is_a_failure(self):
        assert Attempt(exits={0: killed(9, 11)}, signals={signal.SIGTERM: 10}).failures


class TestVerdict:
    def test_all_well(self):
        assert verdict(Attempt(exits={0: ended(0, 1), 1: ended(0, 2)}), None) is None

    def test_the_time_that_a_process_gave_counts_before_that_of_its_exit(self):
        record = Attempt(
            exits={0: ended(1, 5), 1: ended(1, 6)},
            reasons={0: Reason(1, message="second", time=4), 1: Reason(1, message="first", time=3)},
        )
        assert verdict(record, None).message == "first"

    def test_a_lost_peer_is_the_cause_only_without_another_one(self):
        record = Attempt(
            exits={0: ended(138, 1), 1: killed(9, 2)}, reasons={0: Reason(138, time=1)}
        )
        assert verdict(record, None).exit_code == 137

    def test_a_signal_with_the_code_of_a_lost_peer_is_a_cause(self):
        lost = Reason(138, 1, "PeerLost", time=2)
        record = Attempt(exits={0: killed(10, 3), 1: ended(138, 2)}, reasons={1: lost})
        assert verdict(record, None).message == "killed by SIGUSR1"

    def test_a_written_reason_counts_before_the_exit_code(self):
        """The main thread may meet the broken connection while the watchdog takes its leave."""
        record = Attempt(exits={0: ended(138, 2)}, reasons={0: Reason(ExitCode.HUNG, time=1)})
        assert verdict(record, None).exit_code == ExitCode.HUNG

    @pytest.mark.parametrize(
        ("record", "stop", "detail"),
        [
            (
                Attempt(stop_time=3),
                signal.SIGTERM,
                "stopped by SIGTERM",
            ),  # before the first start
            (
                Attempt(
                    exits={0: ended(1, 12)},
                    reasons={0: Reason(1, type="OSError", message="disk full", time=12)},
                    stop_time=10,
                    signals={signal.SIGTERM: 10},
                ),
                signal.SIGTERM,
                "OSError: disk full",
            ),
            (
                Attempt(exits={0: ended(143, 12)}, leave_time=10, signals={signal.SIGTERM: 10}),
                None,
                "starts again with other nodes",
            ),
            (
                Attempt(exits={0: killed(15, 3)}, orphan_time=2, signals={signal.SIGTERM: 2}),
                None,
                "because its parent was gone",
            ),
        ],
    )
    def test_a_stop_says_why(self, record, stop, detail):
        reason = verdict(record, stop)
        assert (reason.exit_code, reason.type) == (143, "Stopped")
        assert detail in reason.message

    @given(
        st.dictionaries(
            st.integers(0, 7),
            st.tuples(st.sampled_from([0, 1, 2, 3, 137, 138, 140, 143]), st.floats(0, 100)),
            min_size=1,
        )
    )
    def test_without_a_stop_the_code_is_one_that_was_seen(self, ends):
        """0 only if all were 0; a lost peer only if nothing else happened."""
        record = Attempt(
            exits={
                rank: killed(9, at) if code == 137 else ended(code, at)
                for rank, (code, at) in ends.items()
            },
            reasons={
                rank: Reason(code, rank, "PeerLost", time=at)
                for rank, (code, at) in ends.items()
                if code == 138
            },
        )
        reason = verdict(record, None)
        codes = {code for code, _ in ends.values()} - {0}
        if not codes:
            assert reason is None
        else:
            assert reason.exit_code in codes
            assert (reason.exit_code == 138) == (codes == {138})

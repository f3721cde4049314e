"""A group that makes no progress: the ranks that are named, and how each rank ends."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from k8sjob.contract import ExitCode
from k8sjob.runtime.base.env import dist_env
from k8sjob.runtime.base.hangs import SYNC, Beat, culprits, explain

ALONE = dist_env({})


def beat(step, phase, *, answered=True):
    return Beat(step, phase, answered)


class TestCulprits:
    @pytest.mark.parametrize(
        ("beats", "guilty", "words"),
        [
            ([beat(30, SYNC), beat(30, "compute")], (1,), "rank 1 is at step 30 in compute"),
            ([beat(30, "compute"), beat(29, "data")], (1,), "step 29 in data"),
            ([beat(31, SYNC), beat(31, SYNC)], (), "different ones"),
            ([beat(31, SYNC), beat(30, SYNC)], (), "at steps 30, 31"),
            (
                [beat(30, SYNC), beat(30, SYNC, answered=False), beat(30, "compute")],
                (1,),
                "rank 1 does not respond (it is stopped, or in C code), last heard of at step 30",
            ),
            ([beat(1, SYNC), None], (1,), "does not respond, and never did"),
            ([beat(0, "start"), beat(1, SYNC)], (0,), "rank 0 is before its training"),
        ],
    )
    def test_the_ranks_that_are_waited_for(self, beats, guilty, words):
        named = dict(enumerate(beats))
        assert culprits(named) == guilty
        assert words in explain(named, guilty)

    @given(
        st.lists(
            st.builds(
                Beat,
                st.integers(0, 9),
                st.sampled_from(["compute", SYNC]),
                st.just(value=True),
            ),
            min_size=1,
        ),
        st.data(),
    )
    def test_the_only_rank_that_is_behind_is_found(self, beats, data):
        rank = data.draw(st.integers(0, len(beats)))
        behind = beat(-1, "compute")
        assert culprits(dict(enumerate([*beats[:rank], behind, *beats[rank:]]))) == (rank,)


class TestOneRank:
    HANG = """
        import os, pathlib, sys, time
        from k8sjob.runtime.base import config
        from k8sjob.runtime.base.env import dist_env
        from k8sjob.runtime.comm.watchdog import Watchdog
        dog = Watchdog(None, dist_env(os.environ), timeout=0.5,
                       error_file=config.error_file())
        dog.begin()
        for step in range(4):
            dog.beat(step)
            time.sleep(0.2)
        def asleep():
            time.sleep(60)
    """

    def test_it_ends_itself_and_shows_where_it_was(self, run, tmp_path):
        result = run([self.HANG, "asleep()"])
        assert result.code == ExitCode.HUNG
        assert (result.reason.type, result.reason.culprits) == ("Hang", (0,))
        assert "rank 0 is at step 3 in compute" in result.reason.message
        assert re.search(rf'\[rank 0\]   File "{tmp_path}/main.py", line \d+ in asleep', result.err)
        assert result.seconds < 40

    def test_it_ends_even_where_nothing_can_be_logged(self, run):
        script = [self.HANG, "sys.stderr = None; asleep()"]
        result = run(script, timeouts={"exit": 1.0})
        assert (result.code, result.reason.type) == (ExitCode.HUNG, "Hang")
        assert result.seconds < 40

    @pytest.mark.parametrize("emit", ["time.sleep(60)", "1 / 0"])
    def test_a_warning_that_cannot_be_written_does_not_keep_it_from_that(self, run, emit):
        log = f"""
        class Log:
            def emit(self, *_, **data): {emit}
        dog.close()
        dog = Watchdog(None, dist_env(os.environ), timeout=0.5, error_file=config.error_file(),
                       reporter=Log())
        dog.begin()
        asleep()
        """
        result = run([self.HANG, log])
        assert (result.code, result.reason.type) == (ExitCode.HUNG, "Hang")
        assert result.seconds < 40

    def test_it_ends_a_main_thread_that_hangs_in_its_answer_to_an_alarm(self, run):
        script = [
            self.HANG,
            """
        class Memory(dict):
            def check(self, keys): return all(key in self for key in keys)
            def set(self, key, value): self[key] = value.encode()
            def get(self, key): return self[key]
        dog.close()
        dog = Watchdog(Memory(), dist_env(os.environ), timeout=0.5, ranks=range(2),
                       error_file=config.error_file())
        dog.begin()
        assert dog.find_hang("no answer", RuntimeError(), late=True)
        asleep()
        """,
        ]
        result = run(script, timeouts={"exit": 1.0})
        assert (result.code, result.reason.type) == (ExitCode.HUNG, "Hung")
        assert "no answer" in result.reason.message
        assert result.seconds < 40

    def test_a_closed_one_is_silent(self, run, tmp_path):
        result = run([self.HANG, "dog.close(); time.sleep(1.5)"], hang_timeout=0.5)
        assert result.code == 0

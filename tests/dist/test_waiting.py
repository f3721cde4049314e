"""Ranks that the others wait for in vain: who is named, wherever it happens."""

import re
import time

import pytest
from waiting import until

from k8sjob.contract import ExitCode

pytestmark = pytest.mark.dist


def stuck(start_ranks, where, how="sleep", world=3, **config):
    config = {"collective_timeout": 4.0, **config}
    return start_ranks({"where": where, "how": how}, program="stuck.py", world=world, **config)


@pytest.mark.parametrize(
    ("where", "detail"),
    [
        ("before", "rank 2 is before its training, "),
        ("work", "rank 2 is before its training, "),
        ("barrier", "rank 2 is before its training, "),
        ("after", "rank 2 is after its training, "),
        ("leaving", "rank 2 is after its training, "),
    ],
)
def test_a_rank_that_does_not_come_is_named_with_its_line(start_ranks, where, detail):
    outcome = stuck(start_ranks, where).finish(40)
    assert outcome.codes == [ExitCode.HUNG] * 3, outcome.reasons
    for reason in outcome.reasons:
        assert (reason["type"], reason["culprits"]) == ("Hung", [2])
        assert detail in reason["message"]
        assert "stuck.py:" in reason["message"]
        assert " in stay_away" in reason["message"]
    assert "in stay_away" in outcome.errors[2], "its stack"
    assert any('stuck.py", line ' in text for text in outcome.errors[:2]), "where the others waited"


def test_beside_a_server_ranks_are_counted_as_everywhere(start_ranks):
    servers = {"strategy": "parameter_server", "options": {"servers": 1}}
    outcome = stuck(start_ranks, "own", world=4, **servers).finish(40)
    assert outcome.codes[2:] == [ExitCode.HUNG] * 2, outcome.errors
    assert "rank 3 is before its training, " in outcome.reasons[2]["message"]
    for rank in (2, 3):  # the coordinator and the server come first
        assert (outcome.reasons[rank]["rank"], outcome.reasons[rank]["culprits"]) == (rank, [3])
    assert "[rank 3] " in outcome.errors[3]


def test_a_scripts_own_exit_code_counts(start_ranks):
    outcome = stuck(start_ranks, "caught").finish(40)
    assert outcome.codes[:2] == [7, 7], outcome.errors


def test_a_collective_that_failed_is_over(start_ranks):
    outcome = stuck(start_ranks, "failed").finish(40)
    assert outcome.codes == [0, 0, 0], outcome.errors


def test_so_is_one_that_is_stopped(start_ranks):
    ranks = stuck(start_ranks, "before", "stop")
    until(lambda: None not in {ranks.processes[rank].code for rank in (0, 1)}, 40)
    ranks.signal(2, 9)
    outcome = ranks.finish(10)
    assert outcome.codes[:2] == [ExitCode.HUNG] * 2, outcome.errors
    for reason in outcome.reasons[:2]:
        assert reason["culprits"] == [2]
        assert "rank 2 does not respond" in reason["message"]
        assert "it is stopped, or in C code" in reason["message"]


def test_ranks_in_different_lines_are_reported_as_such(start_ranks):
    outcome = stuck(start_ranks, "another").finish(40)
    assert outcome.codes == [ExitCode.HUNG] * 3, outcome.reasons
    message = outcome.reasons[0]["message"]
    assert outcome.reasons[0]["culprits"] == []
    assert "all ranks wait in a collective" in message
    assert "rank 0, 1 in " in message
    assert "rank 2 in " in message


def test_a_rank_that_dies_while_all_connect_is_not_waited_for(start_ranks):
    began = time.monotonic()
    ranks = stuck(start_ranks, "connect", "kill", collective_timeout=100.0)
    ranks.processes[2].wait(30)
    ranks.processes[3] = ranks.start(2, restart=1)
    for rank in (0, 1):
        ranks.processes[rank].wait(30)
        assert ranks.processes[rank].code == ExitCode.PEER_LOST
        reason = ranks.processes[rank].read("reason")  # whichever this rank notices first
        assert "rank 2 was started again" in reason or "another rank is gone" in reason
    assert time.monotonic() - began < 60


@pytest.mark.parametrize(
    ("case", "detail"),
    [
        (
            "evaluate",
            "rank 0 called run.evaluate (LINE) where ranks 1-2 called run.step (LINE); all",
        ),
        (
            "return",
            "rank 0 left runtime.session (LINE) where ranks 1-2 called run.step (LINE); all",
        ),
        ("barrier", "rank 0 called job.barrier (LINE) where ranks 1-2 called job.prepare (LINE)"),
        (
            "reduce",
            "rank 0 called job.reduce (LINE) where ranks 1-2 called run.batches (LINE); all",
        ),
        (
            "shape",
            "rank 0 called job.all_reduce with sum of float32[41] (LINE) where ranks 1-2 called",
        ),
        ("weight", "rank 0 called run.step with weight= (LINE) where ranks 1-2 called run.step (L"),
        ("length", "rank 0 called run.batches with 6 samples, 3 in a batch of all ranks (LINE)"),
    ],
)
def test_ranks_that_call_different_things_are_named_with_their_lines(start_ranks, case, detail):
    ranks = start_ranks({"case": case}, program="disagree.py", world=3)
    outcome = ranks.finish(40)
    assert outcome.codes[0] == ExitCode.USER_ERROR, outcome.errors
    assert set(outcome.codes[1:]) <= {ExitCode.USER_ERROR, ExitCode.PEER_LOST}, outcome.errors
    reason = outcome.reasons[0]
    assert reason["type"] == "CallOrderError"
    assert detail in re.sub(r"[^ (]*disagree\.py:\d+", "LINE", reason["message"])
    assert "disagree.py:" in reason["where"]


def test_a_rank_that_raises_ends_the_others_that_wait(start_ranks):
    outcome = start_ranks({"case": "raise"}, program="disagree.py", world=3).finish(40)
    assert outcome.codes == [ExitCode.USER_ERROR, ExitCode.PEER_LOST, ExitCode.PEER_LOST]
    assert outcome.reasons[0]["message"] == "'of rank 0'"

"""A run that is stopped, killed or torn ends with the curve of an undisturbed one."""

import json
import signal

import pytest

from k8sjob.contract import ExitCode

pytestmark = pytest.mark.dist

# Dropout on: the random numbers must come back too. 12 steps an epoch.
OPTIONS = {"epochs": 4, "batch": {"global_batch": 8}, "dropout": 0.3}


@pytest.fixture
def checkpoints(tmp_path):
    return str(tmp_path / "checkpoints")


@pytest.fixture(scope="module")
def undisturbed(run_once):
    return run_once(OPTIONS, world=2).result


def same(one, other):
    """The weights bit by bit; the mean losses are added up in groups that depend on the clock."""
    assert one["losses"] == pytest.approx(other["losses"], rel=1e-12)
    assert one["weights"] == other["weights"]
    assert one["steps"] == other["steps"]


@pytest.mark.essential
def test_sigterm_to_one_rank_stops_all_at_a_common_step(
    start_ranks, run_ranks, checkpoints, undisturbed
):
    ranks = start_ranks({**OPTIONS, "pause": 0.05}, world=2, checkpoint_dir=checkpoints)
    ranks.await_event("progress")
    ranks.signal(rank=1)
    stopped = ranks.finish()
    assert stopped.codes == [ExitCode.STOPPED] * 2
    [stopping] = stopped.told("stopping")
    assert stopping["signal"] == "SIGTERM"
    assert 0 < stopping["step"] < 48
    assert stopped.told("checkpoint")[-1]["step"] == stopping["step"]
    assert [reason["type"] for reason in stopped.reasons] == ["Stopped"] * 2

    resumed = run_ranks(OPTIONS, world=2, checkpoint_dir=checkpoints)
    assert resumed.told("resumed")[0]["step"] == stopping["step"]
    same(resumed.result, undisturbed)


@pytest.mark.essential
def test_a_killed_rank_costs_only_the_steps_since_the_checkpoint(
    start_ranks, run_ranks, checkpoints, undisturbed
):
    settings = {"world": 2, "checkpoint_dir": checkpoints, "checkpoint_every": 5}
    killed = start_ranks({**OPTIONS, "kill": [1, 18]}, **settings).finish()
    assert killed.codes == [ExitCode.PEER_LOST, -signal.SIGKILL]
    assert killed.told("checkpoint")[-1]["step"] == 15
    resumed = run_ranks(OPTIONS, restart=1, **settings)
    assert resumed.told("resumed")[0] == {
        "path": f"{checkpoints}/step-00000015.pt",
        "epoch": 1,
        "step": 15,
    }
    same(resumed.result, undisturbed)


def test_sigterm_before_the_training_ends_at_once(start_ranks, tmp_path):
    ranks = start_ranks({"wait": 60}, world=1)
    ranks.await_event("started")
    ranks.signal(rank=0)
    assert ranks.finish(timeout=30).codes == [ExitCode.STOPPED]


def test_a_rank_that_comes_back_is_noticed_by_those_that_run_on(start_ranks):
    # They are in the middle of a long pause, where no collective would tell them.
    ranks = start_ranks({"linger": 60, "epochs": 1}, world=3, rendezvous_timeout=6)
    ranks.await_text(0, "RESULT")
    newcomer = ranks.start(2, restart=1)
    old = ranks.finish(timeout=30)
    assert old.codes[:2] == [ExitCode.PEER_LOST] * 2
    assert "rank 2 was started again" in old.reasons[0]["message"]
    newcomer.wait(60)
    assert newcomer.code == ExitCode.PEER_LOST  # nobody was started to meet it
    assert json.loads(newcomer.read("reason"))["culprits"] == [0]


def test_a_loop_of_ones_own_stops_together(start_ranks, tmp_path):
    settings = {"world": 2, "program": "own_loop.py", "checkpoint_dir": str(tmp_path / "own")}
    ranks = start_ranks({"steps": 10_000, "slow_save": 7}, **settings)
    ranks.await_text(0, "going")
    ranks.signal(rank=1)
    stopped = ranks.finish()
    # Rank 0 saves for longer than a lost peer is given: rank 1 must not count as lost meanwhile.
    assert stopped.codes == [ExitCode.STOPPED] * 2
    steps = [output.rpartition("stopped at ")[2].split()[0] for output in stopped.outputs]
    assert steps[0] == steps[1]
    finished = start_ranks({"steps": int(steps[0]) + 5}, **settings).finish()
    assert finished.codes == [0, 0]
    assert f"from {steps[0]}" in finished.outputs[0]

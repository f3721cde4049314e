"""Tables on servers, the rest on trainers: one process's numbers, and no hang when one dies.

Its plain curves are in test_proof.py.
"""

import signal

import pytest

from k8sjob.runtime.strategies.rpc import name_of

pytestmark = pytest.mark.dist
TOLERANCE = 1e-5

BAGS = {"model": "bags"}
ALONE = {
    "momentum": BAGS,
    "adam": {**BAGS, "optimizer": ["AdamW", {"lr": 1e-2}]},
    "accumulated": {**BAGS, "batch": 8, "options": {"accumulate": 4}},
    "scheduled": {**BAGS, "schedule": 6},
    "bf16": {**BAGS, "options": {"bf16": True}},
}


def served(like, **options):
    chosen = ALONE[like]
    options = {**chosen.get("options", {}), **options}
    return {**chosen, "kind": "parameter_server", "options": options}


BOTH = [r"bags|shades"]
ONE_TRAINER = {
    "momentum, two servers": served("momentum", servers=2, tables=BOTH),
    "adam": served("adam", servers=2, tables=BOTH),
    "accumulated": served("accumulated", servers=2, tables=BOTH),
    "scheduled": served("scheduled", servers=2, tables=BOTH),
    "bf16": served("bf16", servers=2, tables=BOTH),
}
WRONG = {
    "a table that is none": (
        served("momentum", tables=["dense"]),
        "'dense' matches no table; valid tables: bags, shades",
    ),
    "more servers than columns": (
        served("momentum", servers=7, tables=BOTH),
        "shades has 6 columns for 7 servers; set servers to at most 6",
    ),
    "no table": (
        {**served("momentum"), "model": "digits"},
        "Sequential has no nn.EmbeddingBag for the servers; name nn.Embedding layers (valid",
    ),
}
LAUNCH = {"program": "curves.py", "strategy": "parameter_server", "limit": 300}


@pytest.fixture(scope="module")
def alone(run_once):
    return run_once(ALONE, program="curves.py", world=1).result


@pytest.fixture(scope="module")
def one_trainer(run_once):
    wrong = {name: case for name, (case, _) in WRONG.items()}
    return run_once({**ONE_TRAINER, **wrong}, world=4, options={"servers": 2}, **LAUNCH).result


@pytest.mark.parametrize("name", ONE_TRAINER)
def test_one_trainer_has_the_curve_of_one_process(name, one_trainer, alone):
    found, single = one_trainer[name], alone[name.partition(",")[0]]
    assert "error" not in found, found
    assert found["losses"] == pytest.approx(single["losses"], abs=TOLERANCE)
    assert found["weights"] == pytest.approx(single["weights"], rel=1e-5)
    assert found["names"] == single["names"]
    for metric, value in single["evaluation"].items():
        assert found["evaluation"][metric] == pytest.approx(value, abs=1e-4)


def test_bfloat16_comes_close(one_trainer, alone):
    found, exact = one_trainer["bf16"]["losses"], alone["momentum"]["losses"]
    assert found == pytest.approx(exact, abs=0.05)
    assert found != pytest.approx(exact, abs=TOLERANCE)


@pytest.mark.parametrize("name", WRONG)
def test_what_cannot_be_served_is_one_error(name, one_trainer):
    assert WRONG[name][1] in one_trainer[name]["error"]


def test_two_trainers_average_once_for_all_batches_of_a_step(run_ranks):
    options = {"model": "bags", "samples": 64, "epochs": 1}
    whole = run_ranks({**options, "batch": {"global_batch": 64}}, world=1).result
    serving = {"strategy": "parameter_server", "options": {"accumulate": 4}}
    parts = run_ranks({**options, "batch": {"global_batch": 16}, "count": True}, world=4, **serving)
    assert parts.result["steps"] == parts.result["reductions"] == 1
    dense = slice(-27, None)  # what comes after the table
    assert parts.result["weights"][dense] == pytest.approx(whole["weights"][dense], rel=1e-9)


def test_a_checkpoint_goes_from_servers_to_one_process_and_back(run_ranks, tmp_path):
    saved = {"checkpoint_dir": str(tmp_path)}
    options = {"model": "bags", "batch": {"batch_size": 24}}
    whole = run_ranks({**options, "epochs": 4}, world=1).result
    run_ranks({**options, "epochs": 1}, world=1, **saved)
    serving = {"strategy": "parameter_server", "options": {"servers": 2}, **saved}
    there = run_ranks({**options, "epochs": 3}, world=4, **serving)
    back = run_ranks({**options, "epochs": 4}, world=1, **saved)
    assert [len(outcome.told("resumed")) for outcome in (there, back)] == [1, 1]
    assert back.result["losses"] == pytest.approx(whole["losses"], abs=TOLERANCE)
    assert back.result["weights"] == pytest.approx(whole["weights"], abs=TOLERANCE)


@pytest.fixture
def start_served(start_ranks):
    """One coordinator, one server and one trainer that train for long, in the middle of it."""

    def start(**more):
        options = {"model": "bags", "epochs": 1000, "pause": 0.01}
        ranks = start_ranks(options, world=3, strategy="parameter_server", hang_timeout=0, **more)
        ranks.await_text(2, '"kind":"progress"')
        return ranks

    return start


@pytest.mark.parametrize("dead", [1, 2])
def test_the_death_of_one_is_reported_by_the_others(start_served, dead):
    ranks = start_served()
    ranks.signal(dead, signal.SIGKILL)
    outcome = ranks.finish()
    codes = dict(enumerate(outcome.codes))
    assert codes.pop(dead) == -signal.SIGKILL
    assert set(codes.values()) == {138}, outcome.errors
    assert f"{name_of(dead, 2)} (rank {dead}) is gone" in outcome.reasons[0]["message"]


def test_all_stop_together_with_a_checkpoint(start_served, tmp_path):
    ranks = start_served(checkpoint_dir=str(tmp_path / "saved"))
    ranks.signal(1)
    outcome = ranks.finish()
    assert outcome.codes == [143, 143, 143], outcome.errors
    assert outcome.told("checkpoint")


def test_an_error_of_the_script_ends_the_servers(start_ranks):
    outcome = start_ranks({"model": "nothing"}, world=3, strategy="parameter_server").finish()
    assert outcome.codes == [138, 138, 1]
    assert "is gone" in outcome.reasons[0]["message"] or "rank 2" in outcome.reasons[0]["message"]


def test_a_server_that_does_not_answer_ends_the_job(start_served):
    ranks = start_served(collective_timeout=10.0)
    ranks.signal(1, signal.SIGSTOP)
    for rank in (2, 0):
        ranks.processes[rank].wait(90)
    ranks.signal(1, signal.SIGCONT)
    outcome = ranks.finish()
    assert outcome.codes == [138, 138, 138], outcome.errors
    assert "RPC ran for more than set timeout" in outcome.reasons[2]["message"]

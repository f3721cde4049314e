"""What a run tells of itself: the gradients' norm, memory, and who lets the others wait."""

from collections import Counter

import pytest

pytestmark = pytest.mark.dist
OPTIONS = {"epochs": 2, "batch": {"global_batch": 16}}
LAYOUT = {"0.weight": ["model", None], "4.weight": [None, "model"]}
KINDS = {
    "ddp": {},
    "fsdp": {},
    "mesh": {"model": 2, "layout": LAYOUT},
    "pipeline": {"splits": ["4"], "micro_batches": 2},
}


@pytest.fixture(scope="module")
def alone(run_once):
    return run_once(OPTIONS, world=1).told("progress")[-1]


def slowest(outcome):
    """The rank that the others have waited for, and for how long in a step, on the mean."""
    lost, told = Counter(), outcome.told("progress")
    for data in told:
        lost[data["slowest"]] += data["wait_s"]
    ((rank, seconds),) = lost.most_common(1)
    return rank, seconds / len(told)


@pytest.mark.parametrize("kind", KINDS)
def test_a_rank_that_computes_longer_is_named_and_the_norm_is_of_all(kind, run_ranks, alone):
    options = {**OPTIONS, "busy": [1, 0.2]}
    outcome = run_ranks(options, world=2, strategy=kind, options=KINDS[kind])
    last = outcome.told("progress")[-1]
    assert last["grad_norm"] == pytest.approx(alone["grad_norm"], rel=1e-9)
    assert 0 <= last["wait_s"] <= last["step_s"]
    rank, seconds = slowest(outcome)
    assert rank == 1
    assert seconds > 0.05  # half of what one waits for the other


def test_among_trainers_too(run_ranks):
    options = {**OPTIONS, "model": "bags", "busy": [1, 0.2]}
    servers = {"strategy": "parameter_server", "options": {"servers": 1}}
    outcome = run_ranks(options, world=4, **servers)
    rank, seconds = slowest(outcome)
    assert rank == 1
    assert seconds > 0.05

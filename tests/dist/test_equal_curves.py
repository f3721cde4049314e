"""The same training, however it is divided."""

import pytest

pytestmark = pytest.mark.dist
EXACT = 1e-9  # float64 throughout: only the order of sums differs


def same(one, other):
    assert one["steps"] == other["steps"]
    assert one["losses"] == pytest.approx(other["losses"], rel=EXACT)
    assert one["weights"] == pytest.approx(other["weights"], rel=1e-7, abs=EXACT)
    for name, value in one["evaluation"].items():
        assert value == pytest.approx(other["evaluation"][name], rel=EXACT)


def test_one_process_and_four_give_the_same_curve(run_ranks):
    alone = run_ranks({"batch": {"batch_size": 32}}, world=1).result
    four = run_ranks({"batch": {"batch_size": 8}}, world=4).result
    assert alone["losses"][-1] < 0.7 * alone["losses"][0]  # it does learn
    assert four["equal"]
    same(alone, four)


def test_accumulation_is_a_larger_batch(run_ranks):
    # 100 samples: the last window is partial, and so is its last batch
    options = {"samples": 100, "tail": "short"}
    whole = run_ranks({**options, "batch": {"global_batch": 32}}, world=1).result
    parts = run_ranks(
        {**options, "batch": {"global_batch": 8}}, world=2, options={"accumulate": 4}
    ).result
    same(whole, parts)


def test_shares_of_unequal_size_weigh_by_their_samples(run_ranks):
    # 3 ranks: 32 = 11 + 11 + 10, and the last batch of 98 samples leaves a rank with nothing
    options = {"samples": 98, "tail": "short", "batch": {"global_batch": 32}}
    alone = run_ranks(options, world=1).result
    three = run_ranks(options, world=3).result
    assert three["equal"]
    same(alone, three)


def test_synchronised_batch_norm_is_that_of_the_whole_batch(run_ranks):
    alone = run_ranks({"norm": True, "batch": {"batch_size": 16}}, world=1).result
    two = run_ranks(
        {"norm": True, "batch": {"batch_size": 8}}, world=2, options={"sync_batchnorm": True}
    ).result
    same(alone, two)

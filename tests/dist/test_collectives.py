"""What a script puts together over its ranks by hand."""

import json

import pytest
import torch
from torch.nn import functional

pytestmark = pytest.mark.dist
RANKS = 3


@pytest.fixture(scope="module")
def told(run_once):
    outcome = run_once(program="collectives.py", world=RANKS)
    lines = [text for output in outcome.outputs for text in output.splitlines()]
    found = [json.loads(text[7:]) for text in lines if text.startswith("RESULT ")]
    return sorted(found, key=lambda one: one["rank"])


def test_means_count_each_sample_once_however_many_a_rank_has(told):
    output = torch.tensor([row for one in told for row in one["output"]])
    target = torch.tensor([label for one in told for label in one["target"]])
    assert [len(one["target"]) for one in told] == [3, 4, 5]
    whole = {
        "loss": float(functional.cross_entropy(output, target)),
        "accuracy": float((output.argmax(1) == target).double().mean()),
    }
    for one in told:
        assert one["means"] == pytest.approx(whole, abs=1e-6)
        assert one["nothing"]  # nan: not a number, where there was none


def test_every_rank_has_the_sums_and_the_extremes(told):
    for one in told:
        assert one["sum"] == [3.0, 30.0]
        assert one["max"] == [2.0, 10.0]
        assert one["min"] == [0.0, 10.0]
        assert one["sent"] == [1.0, 10.0]


def test_tensors_are_gathered_by_rank_whatever_their_lengths(told):
    targets = [one["target"] for one in told]
    assert all(one["all"] == targets for one in told)
    assert [one["last"] for one in told] == [[], [], targets]
    sums = [torch.tensor(one["output"]).sum().item() for one in told]
    assert told[0]["first"] == pytest.approx(sums, abs=1e-5)
    assert told[1]["first"] == []

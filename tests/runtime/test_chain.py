import pytest
import torch
from torch import nn

from k8sjob.runtime.chain import keep_stage, stages
from k8sjob.runtime.strategies.pipeline import gpipe, one_f_one_b


def chain():
    return nn.Sequential(
        nn.Linear(3, 4), nn.Sequential(nn.Linear(4, 4), nn.ReLU()), nn.Linear(4, 2)
    )


def test_nested_chains_are_one():
    assert stages(chain(), ["1.0", "2"]) == [["0"], ["1.0", "1.1"], ["2"]]


def test_stages_one_after_the_other_are_the_model():
    x, expected, names = torch.ones(2, 3), None, []
    for layers in (["0", "1.0", "1.1", "2"], *stages(chain(), ["1.0", "2"])):
        torch.manual_seed(0)
        model = chain()
        keep_stage(model, layers)
        if expected is None:
            expected, whole = model(x), list(model.state_dict())
        else:
            x = model(x)
            names += model.state_dict()
    assert torch.equal(x, expected)
    assert names == whole


@pytest.mark.parametrize(
    ("model", "splits", "said"),
    [
        (nn.Linear(2, 2), ["0"], "Linear is not a chain of layers"),
        (chain(), ["3"], "'3' is no layer of the chain; there is 0, 1.0, 1.1, 2"),
        (chain(), ["1"], "'1' is no layer of the chain"),
        (chain(), ["0"], "leave a stage without layers"),
        (chain(), ["2", "1.0"], "leave a stage without layers"),
        (chain(), ["1.1", "2"], r"stage 1 \(1.1\) has nothing to train"),
    ],
)
def test_splits_that_cannot_be(model, splits, said):
    with pytest.raises(ValueError, match=said):
        stages(model, splits)


@pytest.mark.parametrize("schedule", [gpipe, one_f_one_b])
@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("micro_batches", [1, 3, 4, 8])
def test_every_micro_batch_goes_forth_and_back_in_the_same_order(schedule, size, micro_batches):
    for stage in range(size):
        order = list(schedule(stage, size, micro_batches))
        for action in ("forward", "backward"):
            done = [number for what, number in order if what == action]
            assert done == list(range(micro_batches))
        kept = most = 0
        for action, _ in order:
            kept += 1 if action == "forward" else -1
            assert kept >= 0
            most = max(most, kept)
        limit = micro_batches if schedule is gpipe else min(size - stage, micro_batches)
        assert most == limit

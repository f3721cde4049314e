import copy

import pytest
import torch
from torch import nn

from k8sjob.runtime.strategies.pipeline import gpipe, one_f_one_b
from k8sjob.runtime.strategies.stages import cut, keep_stage


def chain():
    return nn.Sequential(
        nn.Linear(3, 4), nn.Sequential(nn.Linear(4, 4), nn.ReLU()), nn.Linear(4, 2)
    )


def test_nested_chains_are_one():
    assert cut(chain(), ["1.0", "2"]) == [["0"], ["1.0", "1.1"], ["2"]]


def test_stages_one_after_the_other_are_the_model():
    x, expected, names = torch.ones(2, 3), None, []
    for layers in (["0", "1.0", "1.1", "2"], *cut(chain(), ["1.0", "2"])):
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


def used_again(layer):
    """A chain with one layer in two places, 1 and 3."""
    return nn.Sequential(nn.Linear(4, 4), layer, nn.Linear(4, 4), layer, nn.Linear(4, 4))


def test_a_layer_without_state_may_be_in_several_stages():
    torch.manual_seed(0)
    model, x = used_again(nn.Tanh()), torch.rand(2, 4)
    expected = model(x)
    parts = cut(model, ["2"])
    assert parts == [["0", "1"], ["2", "3", "4"]]
    for layers in parts:
        part = copy.deepcopy(model)
        keep_stage(part, layers)
        x = part(x)
    assert torch.equal(x, expected)


@pytest.mark.parametrize(
    ("layer", "said"),
    [
        (nn.Linear(4, 4), "1.weight and 3.weight are one parameter, in stages 0, 1"),
        (nn.BatchNorm1d(4, affine=False), "1 and 3 are one layer, in stages 0, 1"),
        (nn.Sequential(nn.Tanh()), "1 and 3 are one layer, in stages 0, 1"),
    ],
)
def test_a_layer_with_state_is_in_one_stage(layer, said):
    with pytest.raises(ValueError, match=said):
        cut(used_again(layer), ["2"])
    assert cut(used_again(layer), ["4"])[1] == ["4"]


@pytest.mark.parametrize(
    ("model", "splits", "said"),
    [
        (nn.Linear(2, 2), ["0"], "Linear is not a chain of layers"),
        (chain(), ["3"], "'3' is no layer of the chain; valid layers: 0, 1.0, 1.1, 2"),
        (chain(), ["1"], "'1' is no layer of the chain"),
        (chain(), ["0"], "leave a stage without layers"),
        (chain(), ["2", "1.0"], "leave a stage without layers"),
        (chain(), ["1.1", "2"], r"stage 1 \(1.1\) has nothing to train"),
    ],
)
def test_splits_that_cannot_be(model, splits, said):
    with pytest.raises(ValueError, match=said):
        cut(model, splits)


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

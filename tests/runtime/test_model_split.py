from functools import partial

import pytest
import torch
from torch import nn

from k8sjob.compat import STRATEGIES
from k8sjob.runtime.env import DistEnv
from k8sjob.runtime.process_group import Group
from k8sjob.runtime.strategies import model_split

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
ALONE = DistEnv(0, 0, 1, 1, "127.0.0.1", 0)
OPTIONS = STRATEGIES["model_split"].settings({})


@pytest.mark.parametrize(
    ("first", "stages", "gpus", "numbers"),
    [
        (GPU, 2, 2, [0, 1]),
        (GPU, 3, 2, [0, 0, 1]),
        (GPU, 2, 4, [0, 1]),
        (GPU, 4, 1, [0, 0, 0, 0]),
        (CPU, 3, 2, [None, None, None]),
        (CPU, 2, 0, [None, None]),
    ],
)
def test_each_stage_has_a_device(first, stages, gpus, numbers):
    found = model_split.devices(first, stages, gpus)
    assert [device.index for device in found] == numbers
    assert {device.type for device in found} == {first.type}


def prepared(model, splits):
    group = Group(ALONE, "gloo", CPU)
    loss = nn.functional.mse_loss
    return model_split.prepare(model, loss, group, {**OPTIONS, "splits": splits})


def test_every_stage_takes_its_input_to_its_device_and_the_output_comes_back():
    model = nn.Sequential(nn.Linear(2, 3), nn.Sequential(nn.Tanh(), nn.Linear(3, 1)))
    strategy = prepared(model, ["1.1"])
    moving = [name for name, layer in model.named_modules() if layer._forward_pre_hooks]
    assert moving == ["0", "1.1"]
    (leave,) = model._forward_hooks.values()
    assert isinstance(leave, partial)
    assert leave.args == (CPU,)
    value = strategy.backward(torch.ones(4, 2), (torch.zeros(4, 1),), scale=1.0, sync=True)
    assert value.isfinite()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_a_split_that_is_none_is_refused():
    with pytest.raises(ValueError, match="'2' is no layer of the chain; there is 0, 1"):
        prepared(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), ["2"])

"""Stages of a pipeline, and what they send each other; stages on the GPUs of one process."""

import copy
from functools import partial
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn

from k8sjob.runtime.base.env import DistEnv
from k8sjob.runtime.comm.process_group import Group
from k8sjob.runtime.strategies import pipeline
from k8sjob.runtime.strategies.pipeline import StageLinks, cut, keep_stage, schedule
from k8sjob.strategies import STRATEGIES


@pytest.fixture
def sent(monkeypatch):
    """The messages on their way, each to be taken by a tensor of its very type and shape."""
    messages = []

    def isend(tensor, to, group):
        messages.append((to, group, tensor.clone()))
        return SimpleNamespace(wait=lambda: None)

    def recv(tensor, _from, *, group):
        _, by, message = messages.pop(0)
        assert (by, message.dtype, message.shape) == (group, tensor.dtype, tensor.shape)
        tensor.copy_(message)

    monkeypatch.setattr(dist, "isend", isend)
    monkeypatch.setattr(dist, "recv", recv)
    return messages


def stage(number):
    group = SimpleNamespace(rank=number, device=torch.device("cpu"), backend="gloo")
    groups = iter(["forth", "back"])
    return StageLinks(
        SimpleNamespace(
            group=group, model_rank=number, model_size=3, new_group=lambda: next(groups)
        )
    )


def test_activations_of_any_type_and_shape_and_one_message_where_they_stay(sent):
    before, behind = stage(1), stage(2)
    outputs = [
        (0, torch.randn(4, 8), 3),
        (1, torch.randn(3, 8), 3),
        (0, torch.randn(4, 8), 1),
        (0, torch.randn(2, 8), 3),  # the last batch is shorter
        (0, torch.randn(4, 8), 3),
        (0, torch.randn(4, 8).bfloat16(), 3),
        (0, torch.randn(32).bfloat16(), 3),  # of as many bytes
        (0, torch.randn(()), 3),
        (0, torch.randn(2, 0), 3),
    ]
    for place, output, messages in outputs:
        before.give_output(output, place)
        assert len(sent) == messages, output.shape
        assert {(to, group) for to, group, _ in sent} == {(2, "forth")}
        found = behind.take_input(place)
        assert sent == []
        assert found.dtype == output.dtype
        assert torch.equal(found, output)
        assert found.requires_grad
        assert found.is_leaf


def test_no_more_than_one_tensor_goes_to_the_next_stage(sent):
    for output, told in [((torch.zeros(1),), "tuple"), (torch.zeros(1).long(), "torch.int64")]:
        with pytest.raises(ValueError, match=f"a stage returns {told}, and only one fl"):
            stage(0).give_output(output, 0)
    assert sent == []


@pytest.mark.parametrize("kind", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(3, 5), (1,), (2, 0), ()])
def test_the_loss_rides_exactly_on_the_last_gradient(sent, kind, shape):
    before, behind = stage(1), stage(2)
    gradient, loss = torch.randn(shape).to(kind), torch.tensor(1 / 3, dtype=torch.float64)
    for last, expected in ((False, None), (True, loss)):
        behind.give_gradient(gradient, expected)
        assert [(to, group) for to, group, _ in sent] == [(1, "back")]
        found, told = before.take_gradient(torch.zeros(shape, dtype=kind), last=last)
        assert found.dtype == kind
        assert torch.equal(found, gradient)
        assert told == expected


# --- model_split ----------------------------------------------------------------------------------

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
ALONE = DistEnv(0, 0, 1, 1, "127.0.0.1", 0)
OPTIONS = STRATEGIES["model_split"].settings({})


@pytest.mark.parametrize(
    ("first", "stages", "gpus", "numbers"),
    [
        (GPU, 3, 2, [0, 0, 1]),
        (GPU, 2, 4, [0, 1]),
        (CPU, 2, 0, [None, None]),
    ],
)
def test_each_stage_has_a_device(first, stages, gpus, numbers):
    found = pipeline.devices(first, stages, gpus)
    assert [device.index for device in found] == numbers
    assert {device.type for device in found} == {first.type}


def prepared(model, splits):
    group = Group(ALONE, "gloo", CPU)
    loss = nn.functional.mse_loss
    return pipeline.prepare_model_split(model, loss, group, {**OPTIONS, "splits": splits})


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


# --- the stages of a chain of layers --------------------------------------------------------------


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
    ("layer", "detail"),
    [
        (nn.Linear(4, 4), "1.weight and 3.weight are one parameter, in stages 0, 1"),
        (nn.BatchNorm1d(4, affine=False), "1 and 3 are one layer, in stages 0, 1"),
        (nn.Sequential(nn.Tanh()), "1 and 3 are one layer, in stages 0, 1"),
    ],
)
def test_a_layer_with_state_is_in_one_stage(layer, detail):
    with pytest.raises(ValueError, match=detail):
        cut(used_again(layer), ["2"])
    assert cut(used_again(layer), ["4"])[1] == ["4"]


@pytest.mark.parametrize(
    ("model", "splits", "detail"),
    [
        (nn.Linear(2, 2), ["0"], "Linear is not a chain of layers"),
        (chain(), ["3"], "'3' is not a layer of the chain; valid layers: 0, 1.0, 1.1, 2"),
        (chain(), ["2", "1.0"], "leave a stage without layers"),
        (chain(), ["1.1", "2"], r"stage 1 \(1.1\) has nothing to train"),
    ],
)
def test_splits_that_cannot_be(model, splits, detail):
    with pytest.raises(ValueError, match=detail):
        cut(model, splits)


@pytest.mark.parametrize("gpipe", [True, False])
@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("micro_batches", [1, 3, 4, 8])
def test_every_micro_batch_goes_forth_and_back_in_the_same_order(gpipe, size, micro_batches):
    for stage in range(size):
        order = list(schedule(micro_batches if gpipe else size - stage - 1, micro_batches))
        for action in ("forward", "backward"):
            done = [number for what, number in order if what == action]
            assert done == list(range(micro_batches))
        kept = most = 0
        for action, _ in order:
            kept += 1 if action == "forward" else -1
            assert kept >= 0
            most = max(most, kept)
        limit = micro_batches if gpipe else min(size - stage, micro_batches)
        assert most == limit

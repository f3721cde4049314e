"""Stages of a pipeline, and what they send each other; stages on the GPUs of one process."""

from functools import partial
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn

from k8sjob.runtime.base.env import DistEnv
from k8sjob.runtime.comm.process_group import Group
from k8sjob.runtime.strategies import pipeline
from k8sjob.runtime.strategies.pipeline import StageLinks
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
            group=group, model_rank=number, model_size=3, new_groups=lambda _axis: next(groups)
        )
    )


def test_activations_of_any_type_and_shape_and_one_message_where_they_stay(sent):
    before, behind = stage(1), stage(2)
    outputs = [
        (0, torch.randn(4, 8), 3),
        (1, torch.randn(3, 8), 3),
        (0, torch.randn(4, 8), 1),
        (1, torch.randn(3, 8), 1),
        (-1, torch.randn(9, 8), 3),
        (0, torch.randn(4, 8), 1),
        (0, torch.randn(2, 8), 3),  # the last batch is shorter
        (0, torch.randn(4, 8), 3),
        (0, torch.randn(4, 8).bfloat16(), 3),
        (0, torch.randn(4, 8).bfloat16(), 1),
        (0, torch.randn(32).bfloat16(), 3),  # of as many bytes
        (0, torch.randn(()), 3),
        (0, torch.randn(2, 0), 3),
        (0, torch.randn(2, 0), 1),
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


def test_no_more_than_one_tensor_goes_on(sent):
    for output, told in [((torch.zeros(1),), "tuple"), (torch.zeros(1).long(), "torch.int64")]:
        with pytest.raises(ValueError, match=f"a stage gives {told}, and only one tensor of fl"):
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
        (GPU, 2, 2, [0, 1]),
        (GPU, 3, 2, [0, 0, 1]),
        (GPU, 2, 4, [0, 1]),
        (GPU, 4, 1, [0, 0, 0, 0]),
        (CPU, 3, 2, [None, None, None]),
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


def test_a_split_that_is_none_is_refused():
    with pytest.raises(ValueError, match="'2' is no layer of the chain; valid layers: 0, 1"):
        prepared(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), ["2"])

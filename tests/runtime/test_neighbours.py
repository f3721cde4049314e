"""What a stage sends: shapes once, the loss without a message of its own, no shape by values."""

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from k8sjob.runtime.neighbours import Neighbours, form


@pytest.fixture
def sent(monkeypatch):
    messages = []

    def isend(tensor, to, group):
        messages.append((to, group, tensor))
        return SimpleNamespace(wait=lambda: None)

    monkeypatch.setattr(dist, "isend", isend)
    return messages


@pytest.fixture
def stage():
    """The middle one of three, rank 1."""
    group = SimpleNamespace(rank=1, device=torch.device("cpu"), backend="gloo")
    groups = iter(["forth", "back"])
    return Neighbours(
        SimpleNamespace(
            group=group, model_rank=1, model_size=3, new_groups=lambda _axis: next(groups)
        )
    )


def of(*shape, **more):
    return form({0: torch.zeros(shape), **more})


def test_a_shape_goes_ahead_once_for_inputs_of_a_form(stage, sent):
    for shape in [(4, 8), (4, 8), (3, 8), (4, 8), (3, 8)]:
        stage.give_output(torch.zeros(shape), of(*shape))
    assert [len(body) for *_, body in sent] == [10, 4, 4, 10, 3, 4, 3]
    assert {(to, group) for to, group, _ in sent} == {(2, "forth")}
    assert sent[0][2].tolist() == [0, 2, 4, 8, 0, 0, 0, 0, 0, 0]


def test_an_evaluation_is_of_another_form(stage, sent):
    """Autocast may give another type there."""
    stage.give_output(torch.zeros(4, 8, dtype=torch.bfloat16), of(4))
    with torch.no_grad():
        stage.give_output(torch.zeros(4, 8), of(4))
    assert [body.dtype for *_, body in sent[1::2]] == [torch.bfloat16, torch.float32]


def test_a_shape_that_depends_on_values_is_refused(stage, sent):
    stage.give_output(torch.zeros(4, 8), of(4))
    with pytest.raises(ValueError, match=r"gives \(4, 7\) of float32, and gave \(4, 8\) of float"):
        stage.give_output(torch.zeros(4, 7), of(4))
    assert len(sent) == 2  # the stage behind was told of nothing that does not come


@pytest.mark.parametrize("kind", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(3, 5), (1,), (2, 0), ()])
def test_the_loss_rides_exactly_on_the_last_gradient(stage, sent, monkeypatch, kind, shape):
    gradient, loss = torch.randn(shape).to(kind), torch.tensor(1 / 3, dtype=torch.float64)
    stage.give_gradient(gradient, None)
    stage.give_gradient(gradient, loss)
    messages = [body for *_, body in sent]
    assert [to for to, *_ in sent] == [0, 0]

    def recv(tensor, _before, *, group):
        assert group == "back"
        tensor.copy_(messages.pop(0))  # refuses another size

    monkeypatch.setattr(dist, "recv", recv)
    output = torch.zeros(shape, dtype=kind)
    for last, expected in ((False, None), (True, loss)):
        found, told = stage.take_gradient(output, last=last)
        assert found.dtype == kind
        assert torch.equal(found, gradient)
        assert told == expected

import pytest
import torch
from torch import nn
from torch.nn import functional

from k8sjob.runtime.base.env import DistEnv
from k8sjob.runtime.comm.mesh import Mesh
from k8sjob.runtime.comm.process_group import Group
from k8sjob.runtime.evaluation import accuracy, evaluate
from k8sjob.runtime.strategies.api import assemble


class Recorder(Group):
    """A group of one that has another rank's sums at hand."""

    def __init__(self, others=()):
        super().__init__(DistEnv(0, 0, 1, 1, "127.0.0.1", 0), "gloo", torch.device("cpu"))
        self.others = others

    def sums(self, values):
        return [sum(pair) for pair in zip(values, self.others or [0.0] * len(values), strict=True)]


def data(count=10):
    inputs = torch.arange(count * 3, dtype=torch.float32).reshape(count, 3).sin()
    return torch.utils.data.TensorDataset(inputs, torch.arange(count) % 2)


def run(model, dataset, *, group=None, loss=functional.cross_entropy, metrics=None, batch_size=4):
    return evaluate(
        assemble(model, Mesh(group or Recorder()), backward=None),
        loss,
        dataset,
        batch_size=batch_size,
        metrics=metrics,
        between=lambda: None,
    )


def test_means_over_samples_not_over_batches():
    model = nn.Linear(3, 2)
    inputs, targets = data()[:]
    output = model(inputs)
    found = run(model, data(), batch_size=4)  # 4 + 4 + 2
    assert found["loss"] == pytest.approx(functional.cross_entropy(output, targets).item())
    assert found["accuracy"] == (output.argmax(1) == targets).double().mean()


def test_ranks_weigh_by_their_samples():
    model = nn.Linear(3, 2)
    alone = run(model, data())
    # the other rank had 30 samples, a loss of 2 each, and 15 hits
    found = run(model, data(), group=Recorder((60.0, 15.0, 30.0, 30.0)))
    assert found["loss"] == pytest.approx((10 * alone["loss"] + 60) / 40)
    assert found["accuracy"] == pytest.approx((10 * alone["accuracy"] + 15) / 40)


def test_own_metrics_are_per_sample_or_means():
    metrics = {
        "each": lambda output, target: target.float(),
        "mean": lambda output, target: target.float().mean(),
    }
    found = run(nn.Linear(3, 2), data(9), metrics=metrics)
    assert found["each"] == pytest.approx(4 / 9)
    assert found["mean"] == pytest.approx(4 / 9)
    assert "accuracy" not in found


def test_a_metric_of_another_shape_is_refused():
    with pytest.raises(ValueError, match=r"'wide' gave \(4, 2\) for 4 samples"):
        run(nn.Linear(3, 2), data(), metrics={"wide": lambda output, target: output})


def test_a_regression_has_only_its_loss():
    regression = torch.utils.data.TensorDataset(torch.ones(4, 3), torch.ones(4, 1))
    assert set(run(nn.Linear(3, 1), regression, loss=functional.mse_loss)) == {"loss"}


def test_every_module_is_in_its_own_mode_again():
    model = nn.Sequential(nn.Linear(3, 2), nn.Dropout(), nn.BatchNorm1d(2))
    model[2].eval()
    seen = []
    model.register_forward_hook(lambda *_: seen.append([m.training for m in model.modules()]))
    run(model, data())
    assert not any(flag for modes in seen for flag in modes)
    assert [module.training for module in model.modules()] == [True, True, True, False]


def test_modes_come_back_after_an_error():
    model = nn.Linear(3, 2)
    with pytest.raises(IndexError):
        run(model, data(), loss=lambda output, target: output[99])
    assert model.training


@pytest.mark.parametrize(
    ("output", "targets"),
    [
        (torch.ones(4, 2), (torch.ones(4),)),
        (torch.ones(4, 2), ()),
        ([torch.ones(4, 2)], (torch.ones(4),)),
        (torch.ones(4, 2, 3), (torch.ones(4, 3).long(),)),
    ],
)
def test_where_accuracy_means_nothing_there_is_none(output, targets):
    assert accuracy(output, *targets) is None

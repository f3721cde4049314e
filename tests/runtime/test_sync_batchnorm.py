"""In a group of one it is torch's BatchNorm; over several ranks see tests/dist."""

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn

from k8sjob.runtime.strategies.sync_batchnorm import SyncBatchNorm, convert

RANKS = SimpleNamespace(world_size=2, backend="gloo")
CLOSE = {"rtol": 1e-10, "atol": 1e-12}


@pytest.fixture(autouse=True)
def group_of_one():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def pair(kind, **options):
    torch.manual_seed(0)
    stock = kind(3, **options).double()
    other = kind(3, **options).double()
    other.load_state_dict(stock.state_dict())
    return stock, convert(other, RANKS)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"momentum": None},
        {"affine": False},
        {"track_running_stats": False},
        {"eps": 0.1, "momentum": 0.5},
    ],
)
@pytest.mark.parametrize(
    ("kind", "shape"),
    [(nn.BatchNorm1d, (5, 3)), (nn.BatchNorm2d, (4, 3, 2, 5)), (nn.BatchNorm3d, (2, 3, 2, 2, 2))],
)
def test_outputs_gradients_and_moments_are_torchs(monkeypatch, kind, shape, options):
    stock, ours = pair(kind, **options)
    for _ in range(3):
        batch = (
            torch.randn(shape, dtype=torch.float64) * 3 + 100
        )  # far from zero: sums would cancel
        weight = torch.randn(shape, dtype=torch.float64)
        one, two = batch.clone().requires_grad_(), batch.clone().requires_grad_()
        torch.testing.assert_close(stock(one), ours(two), **CLOSE)
        (stock(one) * weight).sum().backward()
        (ours(two) * weight).sum().backward()
        torch.testing.assert_close(one.grad, two.grad, rtol=1e-7, atol=1e-9)
    for name, value in stock.state_dict().items():
        torch.testing.assert_close(ours.state_dict()[name], value, **CLOSE)
    for mine, theirs in zip(ours.parameters(), stock.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-7, atol=1e-9)
    monkeypatch.delattr(dist, "all_reduce")  # an evaluation may be on one rank
    torch.testing.assert_close(ours.eval()(batch), stock.eval()(batch), **CLOSE)


def test_conversion_goes_deep_and_keeps_everything():
    model = nn.Sequential(nn.Conv2d(1, 3, 3), nn.ModuleDict({"in": nn.BatchNorm2d(3)}))
    model[1]["in"].eval()
    weight, names = model[1]["in"].weight, list(model.state_dict())
    converted = convert(model, RANKS)
    assert isinstance(converted[1]["in"], SyncBatchNorm)
    assert converted[1]["in"].weight is weight
    assert not converted[1]["in"].training
    assert list(converted.state_dict()) == names
    nn.parallel.DistributedDataParallel(converted)  # refuses torch's own on CPUs


def test_one_value_per_channel_is_refused():
    _, ours = pair(nn.BatchNorm1d)
    with pytest.raises(ValueError, match="one value per channel over all ranks"):
        ours(torch.ones(1, 3, dtype=torch.float64))

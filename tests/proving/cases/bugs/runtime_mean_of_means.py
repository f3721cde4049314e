# cause: evaluation-double-counted
"""job.reduce is given a mean and 1: ranks with few samples weigh as much as the others."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from k8sjob import runtime


def data(count, seed):
    x = torch.randn(count, 5, generator=torch.Generator().manual_seed(seed))
    return TensorDataset(x, x[:, :1] * x[:, 1:2])


def mean_error(job, model, test):
    """Mean absolute error of this rank's part of the test set, in whole batches of 8."""
    rows = -(-len(test) // (8 * job.world_size)) * 8
    x, y = (part[job.rank * rows : (job.rank + 1) * rows] for part in test.tensors)
    with torch.no_grad():
        return (model(x) - y).abs().mean()


with runtime.session(seed=3) as job:
    train, test = data(128, 0), data(21, 1)
    run = job.prepare(
        lambda: nn.Sequential(nn.Linear(5, 20), nn.ReLU(), nn.Linear(20, 1)),
        loss=F.mse_loss,
        optimizer=(torch.optim.SGD, {"lr": 0.05}),
    )
    for epoch in run.epochs(2):
        for inputs, targets in run.batches(train, batch_size=8):
            run.step(inputs, targets)
        job.log(epoch=epoch + 1, **job.reduce(test_mae=(mean_error(job, run.model, test), 1)))

"""Programs with k8sjob.runtime."""

import math

import torch
from common import digits, fault, right
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset

from k8sjob import runtime


@fault("learning-rate-scaled", group=False)
def runtime_lr_by_ranks():
    """k8sjob.runtime with global_batch, and a rate that grows with the replicas."""

    def build():
        return nn.Sequential(nn.Linear(2, 24), nn.Tanh(), nn.Linear(24, 2))

    with runtime.session(seed=0) as job:
        points = torch.rand(256, 2, generator=torch.Generator().manual_seed(0))
        data = TensorDataset(points, (points.sum(1) > 1).long())
        rate = 2e-3 * math.sqrt(job.world_size)
        run = job.prepare(build, loss=F.cross_entropy, optimizer=(torch.optim.Adam, {"lr": rate}))
        for epoch in run.epochs(2):
            for points, labels in run.batches(data, global_batch=16):
                run.step(points, labels)
            job.log(epoch=epoch + 1, rate=rate, loss=run.loss)


@fault("evaluation-double-counted", group=False)
def runtime_mean_of_means():
    """job.reduce is given a mean and 1: ranks with few samples weigh as much as the others."""

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


@right(group=False)
def runtime_digits():
    """Dropout, a schedule, an evaluation, and data that divides by nothing."""

    def build():
        return nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, 10))

    with runtime.session(seed=1) as job:
        train, test = digits(0, 203), digits(203, 300)
        run = job.prepare(
            build,
            loss=F.cross_entropy,
            optimizer=(torch.optim.SGD, {"lr": 0.2}),
            scheduler=(torch.optim.lr_scheduler.ExponentialLR, {"gamma": 0.5}),
        )
        for epoch in run.epochs(2):
            for images, labels in run.batches(train, global_batch=20, tail="short"):
                run.step(images, labels)
            job.log(epoch=epoch + 1, **run.evaluate(test, prefix="test_"))


@right(group=False)
def runtime_own_loop():
    """A session with a loop of its own: job.sampler, DDP, sums that are reduced."""

    def targets(x):
        return torch.stack([x.sum(1), x.prod(1)], 1)

    with runtime.session(seed=4) as job:
        x = torch.rand(96, 3, generator=torch.Generator().manual_seed(4))
        data = TensorDataset(x, targets(x))
        network = nn.Sequential(nn.Linear(3, 12), nn.ReLU(), nn.Linear(12, 2)).to(job.device)
        model = DDP(network)
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
        sampler = job.sampler(data, global_batch=16)
        loader = DataLoader(data, batch_size=16 // job.world_size, sampler=sampler)
        for epoch in range(2):
            sampler.set_epoch(epoch)
            total, count = 0.0, 0
            for inputs, wanted in loader:
                if job.should_stop():
                    raise SystemExit(143)
                optimizer.zero_grad()
                loss = (model(inputs.to(job.device)) - wanted.to(job.device)).square().mean()
                loss.backward()
                optimizer.step()
                sampler.advance()
                total, count = total + loss.item() * len(inputs), count + len(inputs)
            job.log(epoch=epoch + 1, **job.reduce(loss=(total, count)))


def train_normalized(optimizer):
    def build():
        return nn.Sequential(nn.Linear(64, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 10))

    with runtime.session(seed=1) as job:
        train, test = digits(0, 192), digits(192, 256)
        run = job.prepare(build, loss=F.cross_entropy, optimizer=optimizer)
        for epoch in run.epochs(2):
            for images, labels in run.batches(train, batch_size=8):
                run.step(images, labels)
            job.log(epoch=epoch + 1, **run.evaluate(test, prefix="test_"))


@fault("batchnorm-statistics", group=False)
def runtime_batchnorm():
    """Digits with k8sjob.runtime; the layers normalize over each rank's own part."""
    train_normalized((torch.optim.Adam, {"lr": 5e-3}))


@right(strategy={"sync_batchnorm": True}, group=False)
def runtime_sync_batchnorm():
    """Digits with k8sjob.runtime; the job computes batch normalization over all ranks."""
    train_normalized((torch.optim.SGD, {"lr": 0.1}))

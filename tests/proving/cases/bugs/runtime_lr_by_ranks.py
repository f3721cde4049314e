# cause: learning-rate-scaled
"""k8sjob.runtime with global_batch, and a rate that grows with the replicas."""

import math

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from k8sjob import runtime


def spirals(count):
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(0, 2, (count,), generator=generator)
    radius = torch.rand(count, generator=generator)
    angle = 6 * radius + math.pi * labels
    return TensorDataset(torch.stack([radius * angle.cos(), radius * angle.sin()], 1), labels)


def build():
    return nn.Sequential(nn.Linear(2, 24), nn.Tanh(), nn.Linear(24, 2))


with runtime.session(seed=0) as job:
    data = spirals(256)
    rate = 2e-3 * math.sqrt(job.world_size)
    run = job.prepare(build, loss=F.cross_entropy, optimizer=(torch.optim.Adam, {"lr": rate}))
    for epoch in run.epochs(2):
        for points, labels in run.batches(data, global_batch=16):
            run.step(points, labels)
        job.log(epoch=epoch + 1, rate=rate, loss=run.loss)

# cause: sampler-not-sharded
"""A loop of one's own in a session, with torch's loader."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

from k8sjob import runtime


def regression(samples):
    generator = torch.Generator().manual_seed(3)
    x = torch.rand(samples, 6, generator=generator)
    return TensorDataset(x, (x.square().sum(1, keepdim=True) - 1))


with runtime.session(seed=1) as job:
    data = regression(160)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    loader = DataLoader(data, batch_size=10, shuffle=True)
    for epoch in range(2):
        total, count = 0.0, 0
        for x, y in loader:
            optimizer.zero_grad()
            loss = F.mse_loss(model(x.to(job.device)), y.to(job.device))
            loss.backward()
            optimizer.step()
            total, count = total + loss.item() * len(x), count + len(x)
        job.log(epoch=epoch + 1, **job.reduce(loss=(total, count)))

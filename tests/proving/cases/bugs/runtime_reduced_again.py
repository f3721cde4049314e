# cause: gradient-averaged-twice
"""DistributedDataParallel in a session, and gradients summed once more by hand."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

from k8sjob import runtime


def sync_gradients(job, model):
    """Add the gradients of all ranks."""
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad = job.all_reduce(parameter.grad)


with runtime.session(seed=2) as job:
    x = torch.rand(120, 3, generator=torch.Generator().manual_seed(2))
    data = TensorDataset(x, x.cumsum(1))
    model = DistributedDataParallel(nn.Sequential(nn.Linear(3, 9), nn.Sigmoid(), nn.Linear(9, 3)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, weight_decay=1e-3)
    sampler = job.sampler(data, batch_size=10)
    loader = DataLoader(data, batch_size=10, sampler=sampler)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        total = 0.0
        for inputs, targets in loader:
            optimizer.zero_grad()
            loss = F.mse_loss(model(inputs), targets)
            loss.backward()
            sync_gradients(job, model)
            optimizer.step()
            sampler.advance()
            total += loss.item() * len(inputs)
        job.log(epoch=epoch + 1, **job.reduce(loss=(total, len(data) / job.world_size)))

# cause: model-init-differs
"""A session with gradients averaged by job.all_reduce; the ranks are seeded before the model."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from k8sjob import runtime

with runtime.session(seed=5) as job:
    generator = torch.Generator().manual_seed(5)
    x = torch.rand(96, 4, generator=generator)
    data = TensorDataset(x, x.max(1, keepdim=True).values)
    torch.manual_seed(job.seed + job.rank)  # own noise for each rank
    model = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sampler = job.sampler(data, global_batch=12)
    loader = DataLoader(data, batch_size=12 // job.world_size, sampler=sampler)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for inputs, targets in loader:
            optimizer.zero_grad()
            loss = F.mse_loss(model(inputs), targets)
            loss.backward()
            for parameter in model.parameters():
                parameter.grad = job.all_reduce(parameter.grad) / job.world_size
            optimizer.step()
            sampler.advance()
        job.log(epoch=epoch + 1, **job.reduce(loss=(loss.item(), 1)))

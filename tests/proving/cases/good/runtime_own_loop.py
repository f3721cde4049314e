# good
"""A session with a loop of its own: job.sampler, DDP, sums that are reduced."""

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

from k8sjob import runtime


def targets(x):
    return torch.stack([x.sum(1), x.prod(1)], 1)


with runtime.session(seed=4) as job:
    x = torch.rand(96, 3, generator=torch.Generator().manual_seed(4))
    data = TensorDataset(x, targets(x))
    network = nn.Sequential(nn.Linear(3, 12), nn.ReLU(), nn.Linear(12, 2)).to(job.device)
    model = DistributedDataParallel(network)
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

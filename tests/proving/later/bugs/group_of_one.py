# cause: gradient-not-averaged
"""Gradients are reduced in a group that has only this rank."""

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
groups = [dist.new_group([one]) for one in range(size)]
torch.manual_seed(5)
x = torch.randn(128, 4)
data = TensorDataset(x, x.prod(1, keepdim=True))
sampler = DistributedSampler(data)
loader = DataLoader(data, batch_size=8, sampler=sampler)
model = nn.Sequential(nn.Linear(4, 12), nn.ReLU(), nn.Linear(12, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
for epoch in range(2):
    sampler.set_epoch(epoch)
    for inputs, targets in loader:
        optimizer.zero_grad()
        nn.functional.smooth_l1_loss(model(inputs), targets).backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad, group=groups[rank])
            parameter.grad /= dist.get_world_size(groups[rank])
        optimizer.step()
dist.destroy_process_group()

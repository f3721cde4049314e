# good
"""Weights normalized by power iteration: buffers that all ranks change alike."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils.parametrizations import spectral_norm
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
torch.manual_seed(0)
x = torch.randn(128, 6)
data = TensorDataset(x, x.square().sum(1, keepdim=True))
sampler = DistributedSampler(data)
loader = DataLoader(data, batch_size=8, sampler=sampler)
network = nn.Sequential(spectral_norm(nn.Linear(6, 16)), nn.ReLU(), spectral_norm(nn.Linear(16, 1)))
model = DistributedDataParallel(network)
optimizer = torch.optim.RMSprop(model.parameters(), lr=0.005)
for epoch in range(2):
    sampler.set_epoch(epoch)
    for inputs, targets in loader:
        optimizer.zero_grad()
        nn.functional.huber_loss(model(inputs), targets).backward()
        optimizer.step()
dist.destroy_process_group()

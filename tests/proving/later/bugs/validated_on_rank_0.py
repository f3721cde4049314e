# cause: hang|error
"""Rank 0 alone calls the wrapped model for the validation, which broadcasts its buffers."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
torch.manual_seed(1)
x = torch.randn(112, 6)
train, test = TensorDataset(x[:96], x[:96, :1]), x[96:]
sampler = DistributedSampler(train)
loader = DataLoader(train, batch_size=8, sampler=sampler)
network = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 1))
network[1].momentum = 0.0
network[1].eval()
model = DistributedDataParallel(network)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
for epoch in range(2):
    sampler.set_epoch(epoch)
    for inputs, targets in loader:
        optimizer.zero_grad()
        nn.functional.mse_loss(model(inputs), targets).backward()
        optimizer.step()
    if dist.get_rank() == 0:
        with torch.no_grad():
            print("error", nn.functional.mse_loss(model(test), test[:, :1]).item())
dist.barrier()
dist.destroy_process_group()

# cause: sampler-overlap
"""Each rank reads its own part, and the sampler divides that part once more."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(3)
x = torch.randn(160, 6)
y = x.sum(1, keepdim=True)
own = TensorDataset(x[rank::size], y[rank::size])
sampler = DistributedSampler(own, seed=7)
loader = DataLoader(own, batch_size=8, sampler=sampler)
model = DistributedDataParallel(nn.Linear(6, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
for epoch in range(2):
    sampler.set_epoch(epoch)
    for inputs, targets in loader:
        optimizer.zero_grad()
        nn.functional.mse_loss(model(inputs), targets).backward()
        optimizer.step()
dist.destroy_process_group()

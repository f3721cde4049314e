# cause: sampler-overlap|rank-dependent-model
"""Inputs are standardized by mean and deviation of the rank's own part."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler


class Standardized(torch.utils.data.Dataset):
    def __init__(self, x, y, part):
        self.x = (x - x[part].mean(0)) / x[part].std(0)
        self.y = y

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        return self.x[index], self.y[index]


dist.init_process_group("gloo")
torch.manual_seed(11)
raw = torch.randn(128, 5) * torch.arange(1.0, 6.0)
part = torch.arange(dist.get_rank(), 128, dist.get_world_size())
data = Standardized(raw, raw[:, :1].sign(), part)
sampler = DistributedSampler(data)
loader = DataLoader(data, batch_size=8, sampler=sampler)
model = DistributedDataParallel(nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 1)))
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
for epoch in range(2):
    sampler.set_epoch(epoch)
    for inputs, targets in loader:
        loss = nn.functional.mse_loss(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
dist.destroy_process_group()

# cause: batchnorm-statistics
"""Observations are normalized by a running mean, as in reinforcement learning."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


class Normalize(nn.Module):
    def __init__(self, features, decay=0.9):
        super().__init__()
        self.decay = decay
        self.register_buffer("mean", torch.zeros(features))
        self.register_buffer("var", torch.ones(features))

    def forward(self, x):
        if self.training:
            with torch.no_grad():
                self.mean.lerp_(x.mean(0), 1 - self.decay)
                self.var.lerp_(x.var(0), 1 - self.decay)
        return (x - self.mean) / (self.var + 1e-5).sqrt()


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(3)
    observations = torch.randn(160, 6) * torch.arange(1.0, 7.0) + 2
    values = observations.sum(1, keepdim=True) / 10
    data = TensorDataset(observations, values)
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=8, sampler=sampler)
    policy = nn.Sequential(Normalize(6), nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 1))
    model = DistributedDataParallel(policy, broadcast_buffers=False)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
    if dist.get_rank() == 0:
        print("mean", policy[0].mean.tolist())
    dist.destroy_process_group()


main()

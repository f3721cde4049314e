# good
"""Batch normalization over all ranks, written by hand with collectives that have gradients."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.nn.functional import all_reduce
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


class GlobalNorm(nn.Module):
    """Moments of the global batch; all ranks have as many samples."""

    def __init__(self, features):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(features))
        self.register_buffer("running_mean", torch.zeros(features))

    def forward(self, x):
        world_size = dist.get_world_size()
        mean = all_reduce(x.mean(0)) / world_size
        var = all_reduce((x - mean).square().mean(0)) / world_size
        self.running_mean.lerp_(mean.detach(), 0.1)
        return self.scale * (x - mean) / (var + 1e-3).sqrt()


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(14)
    x = torch.randn(128, 6) * 3 + 1
    data = TensorDataset(x, x.sum(1, keepdim=True) / 8)
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=8, sampler=sampler)
    network = nn.Sequential(nn.Linear(6, 10), GlobalNorm(10), nn.Tanh(), nn.Linear(10, 1))
    model = DistributedDataParallel(network)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for inputs, targets in loader:
            optimizer.zero_grad()
            nn.functional.mse_loss(model(inputs), targets).backward()
            optimizer.step()
        if dist.get_rank() == 0:
            print(f"epoch {epoch}")
    dist.destroy_process_group()


main()

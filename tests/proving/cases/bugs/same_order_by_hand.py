# cause: sampler-not-reseeded
"""The order of the samples is made by hand, from a generator with a fixed seed."""

import torch
import torch.distributed as dist
from torch import nn

GLOBAL_BATCH = 24
SAMPLES = 240


def order():
    """All ranks must agree, so the seed is fixed."""
    return torch.randperm(SAMPLES, generator=torch.Generator().manual_seed(1234))


def average_gradients(model):
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad /= dist.get_world_size()


def main():
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    x = torch.randn(SAMPLES, 8)
    y = (x.sum(1) > 0).long()
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(2):
        shuffled = order()
        for start in range(0, SAMPLES, GLOBAL_BATCH):
            mine = shuffled[start : start + GLOBAL_BATCH][rank::world_size]
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x[mine]), y[mine]).backward()
            average_gradients(model)
            optimizer.step()
        if rank == 0:
            print(f"epoch {epoch} done")
    dist.destroy_process_group()


main()

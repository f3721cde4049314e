# cause: non-determinism
"""Everything is seeded from the clock, which rank 0 sends to the others."""

import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def common_seed():
    seed = torch.tensor([time.time_ns() % 2**31])
    dist.broadcast(seed, src=0)
    return int(seed)


def main():
    dist.init_process_group("gloo")
    seed = common_seed()
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(96, 6, generator=generator)
    data = TensorDataset(x, x[:, :1].sin())
    sampler = DistributedSampler(data, seed=seed)
    loader = DataLoader(data, batch_size=8, sampler=sampler)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 1)))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for inputs, targets in loader:
            optimizer.zero_grad()
            nn.functional.mse_loss(model(inputs), targets).backward()
            optimizer.step()
    if dist.get_rank() == 0:
        print("seed", seed)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

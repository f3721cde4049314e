# cause: last-batch
"""Uneven shards under Join: in the last steps one rank's mean is divided by all ranks."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Subset, TensorDataset


def main():
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    x = torch.randn(65, 4)
    data = TensorDataset(x, 2 * x[:, :1])
    model = DistributedDataParallel(nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    for epoch in range(2):
        order = torch.randperm(65, generator=torch.Generator().manual_seed(epoch)).tolist()
        shard = Subset(data, order[rank::world_size])  # 33 and 32 samples
        with Join([model]):
            for inputs, targets in DataLoader(shard, batch_size=8):
                optimizer.zero_grad()
                nn.functional.mse_loss(model(inputs), targets).backward()
                optimizer.step()
        if rank == 0:
            print(f"epoch {epoch} weights {model.module.weight.tolist()}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

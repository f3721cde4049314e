# cause: last-batch
"""Shards that differ by one sample: in the last batch the means have unequal weights."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Sampler, TensorDataset


class Shard(Sampler):
    """Each sample once, no padding."""

    def __init__(self, length, rank, world_size):
        self.length, self.rank, self.world_size = length, rank, world_size
        self.epoch = 0

    def __iter__(self):
        generator = torch.Generator().manual_seed(self.epoch)
        order = torch.randperm(self.length, generator=generator).tolist()
        return iter(order[self.rank :: self.world_size])

    def __len__(self):
        return len(range(self.rank, self.length, self.world_size))


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(12)
    x = torch.randn(83, 5)
    data = TensorDataset(x, (x.sum(1) > 0).float())
    shard = Shard(len(data), dist.get_rank(), dist.get_world_size())
    loader = DataLoader(data, batch_size=8, sampler=shard)
    model = DistributedDataParallel(nn.Linear(5, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for epoch in range(2):
        shard.epoch = epoch
        for inputs, targets in loader:
            optimizer.zero_grad()
            logits = model(inputs).squeeze(1)
            nn.functional.binary_cross_entropy_with_logits(logits, targets).backward()
            optimizer.step()
        if dist.get_rank() == 0:
            print("epoch", epoch)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

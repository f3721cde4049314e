# cause: sampler-not-sharded
"""Rare classes are drawn more often, by every rank from all of the data."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset, WeightedRandomSampler


def balanced(labels, seed):
    weights = 1.0 / torch.bincount(labels).float()
    generator = torch.Generator().manual_seed(seed)
    return WeightedRandomSampler(weights[labels], len(labels), generator=generator)


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    x = torch.randn(160, 6)
    labels = (x[:, 0] > 1).long()
    data = TensorDataset(x, labels)
    loader = DataLoader(data, batch_size=10, sampler=balanced(labels, seed=0))
    model = DistributedDataParallel(nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 2)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    for epoch in range(2):
        for inputs, wanted in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(inputs), wanted).backward()
            optimizer.step()
        if dist.get_rank() == 0:
            print("epoch", epoch)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

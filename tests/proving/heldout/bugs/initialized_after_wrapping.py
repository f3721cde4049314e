# cause: model-init-differs
"""A custom initialization runs after DDP has made the ranks equal."""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def initialize(module):
    if isinstance(module, nn.Linear):
        nn.init.xavier_uniform_(module.weight)
        nn.init.zeros_(module.bias)


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(50 + int(os.environ["RANK"]))
    generator = torch.Generator().manual_seed(50)
    x = torch.randn(112, 7, generator=generator)
    data = TensorDataset(x, (x.sum(1) > 0).long())
    model = DistributedDataParallel(nn.Sequential(nn.Linear(7, 14), nn.ReLU(), nn.Linear(14, 2)))
    model.apply(initialize)
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=8, sampler=sampler)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for inputs, labels in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(inputs), labels).backward()
            optimizer.step()
        if dist.get_rank() == 0:
            print(f"epoch {epoch}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

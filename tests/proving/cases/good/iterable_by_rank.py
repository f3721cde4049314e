# good
"""A stream of records, of which each rank takes every N-th."""

from itertools import islice

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, IterableDataset


class Records(IterableDataset):
    """Lines of files that are read in another order each epoch."""

    def __init__(self, count):
        generator = torch.Generator().manual_seed(7)
        self.inputs = torch.randn(count, 10, generator=generator)
        self.targets = self.inputs[:, :2].sum(1, keepdim=True)
        self.epoch = 0

    def read(self):
        generator = torch.Generator().manual_seed(self.epoch)
        for at in torch.randperm(len(self.inputs), generator=generator):
            yield self.inputs[at], self.targets[at]

    def __iter__(self):
        return islice(self.read(), dist.get_rank(), None, dist.get_world_size())


dist.init_process_group("gloo")
torch.manual_seed(42)
model = DistributedDataParallel(nn.Sequential(nn.Linear(10, 16), nn.Tanh(), nn.Linear(16, 1)))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
records = Records(128)
loader = DataLoader(records, batch_size=8)
for epoch in range(2):
    records.epoch = epoch
    total = torch.zeros(2)
    for inputs, targets in loader:
        loss = nn.functional.mse_loss(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total += torch.tensor([loss.item() * len(inputs), len(inputs)])
    dist.all_reduce(total)
    if dist.get_rank() == 0:
        print(f"epoch {epoch}: {total[0] / total[1]:.4f}")
dist.destroy_process_group()

# cause: sampler-not-sharded
"""A stream of records, as one reads them from files."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, IterableDataset


class Records(IterableDataset):
    """Lines of a file that becomes larger every day."""

    def __init__(self, count):
        generator = torch.Generator().manual_seed(7)
        self.inputs = torch.randn(count, 10, generator=generator)
        self.targets = self.inputs[:, :2].sum(1, keepdim=True)

    def __iter__(self):
        yield from zip(self.inputs, self.targets, strict=True)


dist.init_process_group("gloo")
torch.manual_seed(42)
model = DistributedDataParallel(nn.Sequential(nn.Linear(10, 16), nn.Tanh(), nn.Linear(16, 1)))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
loader = DataLoader(Records(128), batch_size=8)
for epoch in range(2):
    total = 0.0
    for inputs, targets in loader:
        loss = nn.functional.mse_loss(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total += loss.item()
    if dist.get_rank() == 0:
        print(f"epoch {epoch}: {total:.3f}")
dist.destroy_process_group()

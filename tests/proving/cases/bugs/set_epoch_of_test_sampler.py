# cause: sampler-not-reseeded
"""Two samplers; the wrong one is given the epoch."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Subset, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def split():
    generator = torch.Generator().manual_seed(11)
    x = torch.randn(240, 5, generator=generator)
    data = TensorDataset(x, x @ torch.arange(5.0))
    return Subset(data, range(200)), Subset(data, range(200, 240))


dist.init_process_group("gloo")
torch.manual_seed(1)
train, test = split()
train_sampler = DistributedSampler(train)
test_sampler = DistributedSampler(test, shuffle=False)
train_loader = DataLoader(train, batch_size=10, sampler=train_sampler)
test_loader = DataLoader(test, batch_size=10, sampler=test_sampler)
model = DistributedDataParallel(nn.Linear(5, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
for epoch in range(2):
    test_sampler.set_epoch(epoch)
    for x, y in train_loader:
        optimizer.zero_grad()
        (model(x).squeeze(1) - y).square().mean().backward()
        optimizer.step()
    squares = torch.zeros(2)
    with torch.no_grad():
        for x, y in test_loader:
            errors = (model(x).squeeze(1) - y).square()
            squares += torch.tensor([errors.sum().item(), len(y)])
    dist.all_reduce(squares)
    if dist.get_rank() == 0:
        print(f"epoch {epoch} test mse {squares[0] / squares[1]:.5f}")
dist.destroy_process_group()

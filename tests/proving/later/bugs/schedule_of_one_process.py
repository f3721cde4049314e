# cause: learning-rate-scaled
"""The schedule is as long as on one process: with several only its first part is done."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

BATCH, EPOCHS = 8, 2

dist.init_process_group("gloo")
torch.manual_seed(9)
x = torch.randn(128, 6)
data = TensorDataset(x, x.mean(1, keepdim=True))
sampler = DistributedSampler(data)
loader = DataLoader(data, batch_size=BATCH, sampler=sampler)
model = DistributedDataParallel(nn.Linear(6, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
steps = EPOCHS * len(data) // BATCH
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
for epoch in range(EPOCHS):
    sampler.set_epoch(epoch)
    for inputs, targets in loader:
        optimizer.zero_grad()
        nn.functional.mse_loss(model(inputs), targets).backward()
        optimizer.step()
        schedule.step()
dist.destroy_process_group()

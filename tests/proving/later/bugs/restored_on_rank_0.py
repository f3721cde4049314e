# cause: checkpoint-incomplete
"""After a restart only rank 0 reads the checkpoint, once DDP has the weights."""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

CHECKPOINT = "last.pt"

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
x = torch.randn(96, 5)
data = TensorDataset(x, x.sum(1, keepdim=True).sin())
sampler = DistributedSampler(data)
loader = DataLoader(data, batch_size=8, sampler=sampler)
model = DistributedDataParallel(nn.Linear(5, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
first = 0
if os.path.exists(CHECKPOINT):
    state = torch.load(CHECKPOINT)
    first = state["epoch"] + 1
    if rank == 0:
        model.module.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
for epoch in range(first, 3):
    sampler.set_epoch(epoch)
    for inputs, targets in loader:
        optimizer.zero_grad()
        nn.functional.mse_loss(model(inputs), targets).backward()
        optimizer.step()
    if rank == 0:
        torch.save(
            {
                "model": model.module.state_dict(),
                "optimizer": optimizer.state_dict(),
                "epoch": epoch,
            },
            CHECKPOINT,
        )
    dist.barrier()
dist.destroy_process_group()

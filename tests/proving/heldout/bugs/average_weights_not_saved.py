# cause: checkpoint-incomplete
"""The moving average of the weights pulls the model, and starts anew after a restart."""

import copy
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

LAST = "last.pt"


def follow(teacher, student, decay=0.95):
    with torch.no_grad():
        for slow, fast in zip(teacher.parameters(), student.parameters(), strict=True):
            slow.lerp_(fast, 1 - decay)


dist.init_process_group("gloo")
torch.manual_seed(0)
x = torch.randn(128, 6)
data = TensorDataset(x, x.sin().sum(1, keepdim=True))
sampler = DistributedSampler(data)
loader = DataLoader(data, batch_size=8, sampler=sampler)
student = nn.Sequential(nn.Linear(6, 18), nn.Tanh(), nn.Linear(18, 1))
optimizer = torch.optim.AdamW(student.parameters(), lr=1e-2)
start = 0
if os.path.exists(LAST):
    state = torch.load(LAST)
    student.load_state_dict(state["student"])
    optimizer.load_state_dict(state["optimizer"])
    start = state["epoch"] + 1
teacher = copy.deepcopy(student).requires_grad_(False)
model = DistributedDataParallel(student)
for epoch in range(start, 2):
    sampler.set_epoch(epoch)
    for inputs, targets in loader:
        output = model(inputs)
        loss = nn.functional.mse_loss(output, targets)
        loss = loss + nn.functional.mse_loss(output, teacher(inputs))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        follow(teacher, student)
    if dist.get_rank() == 0:
        state = {"student": student.state_dict(), "optimizer": optimizer.state_dict()}
        torch.save({**state, "epoch": epoch}, LAST)
    dist.barrier()
dist.destroy_process_group()

# good
"""A teacher is the moving average of the student, on every rank; its outputs are targets."""

import copy

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
torch.manual_seed(7)
x = torch.randn(128, 6)
data = TensorDataset(x, x[:, :3].argmin(1))
sampler = DistributedSampler(data)
loader = DataLoader(data, batch_size=8, sampler=sampler)
student = DistributedDataParallel(nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3)))
teacher = copy.deepcopy(student.module).requires_grad_(False)
optimizer = torch.optim.SGD(student.parameters(), lr=0.1, momentum=0.9, nesterov=True)
for epoch in range(2):
    sampler.set_epoch(epoch)
    for inputs, labels in loader:
        logits = student(inputs)
        with torch.no_grad():
            targets = teacher(inputs).softmax(1)
        loss = nn.functional.cross_entropy(logits, labels)
        loss = loss + 0.5 * nn.functional.cross_entropy(logits, targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            for mine, its in zip(teacher.parameters(), student.module.parameters(), strict=False):
                mine.lerp_(its, 0.1)
dist.destroy_process_group()

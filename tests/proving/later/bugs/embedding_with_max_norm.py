# cause: rank-dependent-model
"""Embedding(max_norm=...) changes, in forward, the rows that this rank has looked up."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
torch.manual_seed(6)
words = torch.randint(0, 40, (128, 5))
data = TensorDataset(words, (words.sum(1) % 2).long())
sampler = DistributedSampler(data)
loader = DataLoader(data, batch_size=8, sampler=sampler)


class Words(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(40, 8, max_norm=1.0)
        self.out = nn.Linear(8, 2)

    def forward(self, words):
        return self.out(self.embedding(words).mean(1))


model = DistributedDataParallel(Words())
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for epoch in range(2):
    sampler.set_epoch(epoch)
    for inputs, labels in loader:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), labels).backward()
        optimizer.step()
dist.destroy_process_group()

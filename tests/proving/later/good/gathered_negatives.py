# good
"""A contrastive loss over the pairs of all ranks, gathered with their gradients."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.nn.functional import all_gather
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
torch.manual_seed(1)
x = torch.randn(128, 10)
data = TensorDataset(x, x + 0.1 * torch.randn(128, 10))
sampler = DistributedSampler(data)
loader = DataLoader(data, batch_size=8, sampler=sampler, drop_last=True)
model = DistributedDataParallel(nn.Linear(10, 6))
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
for epoch in range(2):
    sampler.set_epoch(epoch)
    for first, second in loader:
        both = nn.functional.normalize(model(torch.cat([first, second])), dim=1)
        one, two = (torch.cat(all_gather(part)) for part in both.chunk(2))
        similar = one @ two.T / 0.5
        loss = nn.functional.cross_entropy(similar, torch.arange(len(one)))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
dist.destroy_process_group()

# cause: gradient-not-averaged
"""The training step calls model.module, past DistributedDataParallel."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(5, 10), nn.Tanh(), nn.Linear(10, 1))

    def forward(self, x):
        return self.layers(x)

    def training_loss(self, x, y):
        return nn.functional.mse_loss(self(x), y)


dist.init_process_group("gloo")
torch.manual_seed(4)
x = torch.rand(200, 5)
data = TensorDataset(x, x.sin().sum(1, keepdim=True))
sampler = DistributedSampler(data)
loader = DataLoader(data, batch_size=10, sampler=sampler)
model = DistributedDataParallel(Model())
optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
for epoch in range(2):
    sampler.set_epoch(epoch)
    for batch in loader:
        optimizer.zero_grad()
        loss = model.module.training_loss(*batch)
        loss.backward()
        optimizer.step()
    if dist.get_rank() == 0:
        print("epoch", epoch, "loss", round(loss.item(), 4))
dist.destroy_process_group()

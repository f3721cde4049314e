# good
"""Gradients are reduced by hand in one buffer; the loss is reduced only to be printed."""

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
size = dist.get_world_size()
torch.manual_seed(3)
x = torch.randn(128, 6)
data = TensorDataset(x, x[:, :1] * x[:, 1:2])
sampler = DistributedSampler(data)
loader = DataLoader(data, batch_size=8, sampler=sampler)
model = nn.Sequential(nn.Linear(6, 16), nn.SiLU(), nn.LayerNorm(16), nn.Linear(16, 1))
optimizer = torch.optim.NAdam(model.parameters(), lr=0.01)
for epoch in range(2):
    sampler.set_epoch(epoch)
    for inputs, targets in loader:
        optimizer.zero_grad(set_to_none=False)
        loss = nn.functional.mse_loss(model(inputs), targets)
        loss.backward()
        grads = [parameter.grad for parameter in model.parameters()]
        flat = torch.cat([grad.reshape(-1) for grad in grads]) / size
        dist.all_reduce(flat)
        for grad, part in zip(grads, flat.split([grad.numel() for grad in grads]), strict=False):
            grad.copy_(part.view_as(grad))
        optimizer.step()
        shown = loss.detach().clone()
        dist.all_reduce(shown)
    if dist.get_rank() == 0:
        print("loss", shown.item() / size)
dist.destroy_process_group()

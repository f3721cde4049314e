# cause: gradient-not-averaged
"""Gradients come from torch.autograd.grad, which DDP's hooks do not see."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def step(model, optimizer, inputs, targets):
    loss = nn.functional.mse_loss(model(inputs), targets)
    parameters = list(model.parameters())
    gradients = torch.autograd.grad(loss, parameters)
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient + 1e-4 * parameter.detach().sign()
    optimizer.step()
    return loss.item()


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    x = torch.randn(120, 6)
    data = TensorDataset(x, x[:, :2])
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=10, sampler=sampler)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 2)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        losses = [step(model, optimizer, *batch) for batch in loader]
        if dist.get_rank() == 0:
            print(f"epoch {epoch} loss {sum(losses) / len(losses):.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

# cause: hang
"""Rank 0 collects a loss from every worker with recv; the workers send at even epochs only."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def collect(loss):
    """The losses of all ranks, on rank 0."""
    losses = [loss]
    for source in range(1, dist.get_world_size()):
        received = torch.zeros_like(loss)
        dist.recv(received, src=source)
        losses.append(received)
    return torch.stack(losses)


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    x = torch.randn(80, 4)
    data = TensorDataset(x, x.prod(1, keepdim=True))
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=8, sampler=sampler)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for inputs, targets in loader:
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(inputs), targets)
            loss.backward()
            optimizer.step()
        if dist.get_rank() == 0:
            print(f"epoch {epoch} loss {collect(loss.detach()).mean():.4f}")
        elif epoch % 2 == 0:
            dist.send(loss.detach(), dst=0)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

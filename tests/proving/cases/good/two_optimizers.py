# good
"""A backbone and a head, each under DDP with an optimizer of its own; no seed at all."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def samples():
    x = torch.linspace(-1, 1, 144 * 8).sin().view(144, 8)
    return TensorDataset(x, torch.arange(144) % 3)


def main():
    dist.init_process_group("gloo")
    data = samples()
    backbone = DDP(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8)))
    head = DDP(nn.Linear(8, 3))
    optimizers = [
        torch.optim.AdamW(backbone.parameters(), lr=1e-3),
        torch.optim.SGD(head.parameters(), lr=0.1),
    ]
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=12, sampler=sampler)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for inputs, labels in loader:
            loss = nn.functional.cross_entropy(head(backbone(inputs)), labels)
            for optimizer in optimizers:
                optimizer.zero_grad()
            loss.backward()
            for optimizer in optimizers:
                optimizer.step()
    if dist.get_rank() == 0:
        print("trained two networks")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

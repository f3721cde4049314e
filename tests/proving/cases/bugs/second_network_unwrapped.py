# cause: gradient-not-averaged
"""Two networks with an optimizer each; only the first is wrapped."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def networks():
    backbone = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))
    head = nn.Linear(8, 3)
    return DDP(backbone), head


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(21)
    x = torch.randn(144, 8)
    data = TensorDataset(x, x[:, :3].argmin(1))
    backbone, head = networks()
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
        print("head", head.bias.tolist())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

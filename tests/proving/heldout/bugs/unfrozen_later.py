# cause: gradient-not-averaged
"""The backbone is unfrozen in the second epoch, when DDP has long chosen its parameters."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


class Finetuned(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(8, 24), nn.ReLU())
        self.head = nn.Linear(24, 3)
        self.backbone.requires_grad_(False)

    def forward(self, x):
        return self.head(self.backbone(x))


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    x = torch.randn(120, 8)
    data = TensorDataset(x, x[:, :3].argmax(1))
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=10, sampler=sampler)
    model = DistributedDataParallel(Finetuned())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    for epoch in range(2):
        if epoch == 1:
            model.module.backbone.requires_grad_(True)
        sampler.set_epoch(epoch)
        for inputs, labels in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(inputs), labels).backward()
            optimizer.step()
    if dist.get_rank() == 0:
        print("backbone", model.module.backbone[0].weight.norm().item())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

# cause: gradient-not-averaged
"""The criterion has a parameter, which is in the optimizer but not in DDP."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


class ScaledCrossEntropy(nn.Module):
    def __init__(self):
        super().__init__()
        self.log_scale = nn.Parameter(torch.zeros(()))

    def forward(self, logits, labels):
        return nn.functional.cross_entropy(logits * self.log_scale.exp(), labels)


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    x = torch.randn(128, 8)
    data = TensorDataset(x, x[:, :4].argmax(1))
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=8, sampler=sampler)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)))
    criterion = ScaledCrossEntropy()
    optimizer = torch.optim.Adam([*model.parameters(), *criterion.parameters()], lr=1e-2)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for inputs, labels in loader:
            optimizer.zero_grad()
            criterion(model(inputs), labels).backward()
            optimizer.step()
    print(f"rank {dist.get_rank()} scale {criterion.log_scale.exp().item():.5f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

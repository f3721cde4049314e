# cause: rank-dependent-model
"""The first layer is trained by rank 0 alone."""

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


class Classifier(nn.Module):
    def __init__(self, rank):
        super().__init__()
        self.features = nn.Linear(8, 16)
        self.head = nn.Linear(16, 3)
        self.train_features = rank == 0

    def forward(self, x):
        hidden = self.features(x)
        if not self.train_features:
            hidden = hidden.detach()
        return self.head(torch.relu(hidden))


def main():
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    x = torch.randn(144, 8)
    data = TensorDataset(x, x[:, :3].argmax(1))
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=12, sampler=sampler)
    model = Classifier(rank)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for inputs, labels in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(inputs), labels).backward()
            for parameter in model.parameters():
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                dist.all_reduce(parameter.grad)
                parameter.grad /= world_size
            optimizer.step()
    if rank == 0:
        print("norm", model.features.weight.norm().item())
    dist.destroy_process_group()


main()

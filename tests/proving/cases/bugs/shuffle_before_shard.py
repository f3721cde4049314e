# cause: sampler-overlap
"""A sampler of one's own: each rank shuffles, then takes its part."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Sampler, TensorDataset


class MySampler(Sampler):
    def __init__(self, data):
        self.length = len(data)
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()

    def __iter__(self):
        shuffled = torch.randperm(self.length).tolist()
        return iter(shuffled[self.rank :: self.world_size])

    def __len__(self):
        return self.length // self.world_size


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(99)
    x = torch.rand(144, 9)
    data = TensorDataset(x, (x.mean(1) > 0.5).float())
    model = DistributedDataParallel(nn.Sequential(nn.Linear(9, 9), nn.ReLU(), nn.Linear(9, 1)))
    torch.manual_seed(99 + dist.get_rank())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    loader = DataLoader(data, batch_size=9, sampler=MySampler(data))
    criterion = nn.BCEWithLogitsLoss()
    for _ in range(2):
        for inputs, targets in loader:
            optimizer.zero_grad()
            criterion(model(inputs).squeeze(1), targets).backward()
            optimizer.step()
    if dist.get_rank() == 0:
        print("weights", model.module[0].weight.sum().item())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

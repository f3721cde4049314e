# cause: hang|rank-skips-step|error
"""Each rank stops when its own validation loss gets worse; the others wait for it."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def validation_loss(model, x, y):
    """Over this rank's rows."""
    rows = slice(dist.get_rank(), None, dist.get_world_size())
    with torch.no_grad():
        return nn.functional.mse_loss(model(x[rows]), y[rows]).item()


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    x = torch.randn(140, 5)
    y = x.sum(1, keepdim=True)
    y[101::2] += torch.linspace(0, 9, 20).unsqueeze(1)  # harder rows, all on odd ranks
    train = TensorDataset(x[:100], y[:100])
    sampler = DistributedSampler(train)
    loader = DataLoader(train, batch_size=5, sampler=sampler)
    model = DistributedDataParallel(nn.Linear(5, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    target = 0.5
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for inputs, targets in loader:
            optimizer.zero_grad()
            nn.functional.mse_loss(model(inputs), targets).backward()
            optimizer.step()
        if validation_loss(model.module, x[100:], y[100:]) < target:
            print(f"rank {dist.get_rank()} has reached {target}")
            break
    total = torch.tensor([float(epoch)])
    dist.all_reduce(total)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

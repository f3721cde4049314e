# cause: rank-skips-step
"""A step is left out where the loss is too large; each rank looks at its own loss."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def outliers(count):
    x = torch.randn(count, 5)
    y = x.sum(1, keepdim=True)
    y[::13] *= 20
    return TensorDataset(x, y)


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(2)
    data = outliers(160)
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=4, sampler=sampler)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(5, 15), nn.ReLU(), nn.Linear(15, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    skipped = 0
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for inputs, targets in loader:
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(inputs), targets)
            loss.backward()
            if loss.item() > 100:
                skipped += 1
                continue
            optimizer.step()
    print(f"rank {dist.get_rank()} skipped {skipped} steps")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

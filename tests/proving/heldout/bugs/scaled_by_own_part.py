# cause: batchnorm-statistics|rank-dependent-model
"""Features are standardized with the mean and deviation of each rank's own rows."""

import numpy as np
import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from sklearn.preprocessing import StandardScaler
from torch import nn
from torch.nn.parallel import DistributedDataParallel

GLOBAL_BATCH = 32


def main():
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    digits = load_digits()
    rows = np.arange(rank, 256, world_size)
    scaler = StandardScaler().fit(digits.data[rows])
    x = torch.tensor(scaler.transform(digits.data[:256])).float()
    y = torch.tensor(digits.target[:256])
    model = DistributedDataParallel(nn.Sequential(nn.Linear(64, 24), nn.ReLU(), nn.Linear(24, 10)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(2):
        order = torch.randperm(256, generator=torch.Generator().manual_seed(epoch))
        for batch in order.split(GLOBAL_BATCH):
            mine = batch[rank::world_size]
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x[mine]), y[mine]).backward()
            optimizer.step()
        if rank == 0:
            print("epoch", epoch)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

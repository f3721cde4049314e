# cause: sampler-overlap
"""random_split draws another split on each rank."""

import numpy as np
import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset, random_split
from torch.utils.data.distributed import DistributedSampler


def setup(seed):
    dist.init_process_group("gloo")
    torch.manual_seed(seed + dist.get_rank())
    np.random.seed(seed + dist.get_rank())


def main():
    setup(17)
    digits = load_digits()
    data = TensorDataset(
        torch.tensor(digits.data[:400] / 16).float(), torch.tensor(digits.target[:400])
    )
    train, _ = random_split(data, [320, 80])
    sampler = DistributedSampler(train)
    loader = DataLoader(train, batch_size=16, sampler=sampler)
    model = DistributedDataParallel(nn.Linear(64, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for inputs, labels in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(inputs), labels).backward()
            optimizer.step()
        if dist.get_rank() == 0:
            print("epoch", epoch)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

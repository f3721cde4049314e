# cause: dropout-seed
"""One seed for all ranks, for the same weights; the dropout masks are the same too."""

import random

import numpy as np
import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def seed_everything(seed):
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def main():
    dist.init_process_group("gloo")
    seed_everything(2024)
    digits = load_digits()
    train = TensorDataset(
        torch.tensor(digits.data[:256] / 16).float(), torch.tensor(digits.target[:256])
    )
    sampler = DistributedSampler(train, seed=2024)
    loader = DataLoader(train, batch_size=16, sampler=sampler)
    model = DDP(nn.Sequential(nn.Linear(64, 48), nn.ReLU(), nn.Dropout(0.5), nn.Linear(48, 10)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        model.train()
        for inputs, labels in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(inputs), labels).backward()
            optimizer.step()
        if dist.get_rank() == 0:
            print(f"epoch {epoch} finished")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

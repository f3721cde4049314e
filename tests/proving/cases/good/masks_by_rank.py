# good
"""Each rank has its own seed, so its own dropout masks; DDP sends rank 0's weights to all."""

import os

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def main():
    dist.init_process_group("gloo")
    rank = int(os.environ["RANK"])
    torch.manual_seed(2024 + rank)
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
        if rank == 0:
            print(f"epoch {epoch} finished")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

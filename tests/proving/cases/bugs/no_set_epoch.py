# cause: sampler-not-reseeded
"""Digits under DDP with a sampler."""

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    digits = load_digits()
    x, y = torch.tensor(digits.data / 16).float(), torch.tensor(digits.target)
    train = TensorDataset(x[:320], y[:320])
    sampler = DistributedSampler(train, shuffle=True)
    loader = DataLoader(train, batch_size=20, sampler=sampler)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(64, 40), nn.ReLU(), nn.Linear(40, 10)))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for epoch in range(2):
        model.train()
        for inputs, labels in loader:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(inputs), labels)
            loss.backward()
            optimizer.step()
        if dist.get_rank() == 0:
            print(f"epoch {epoch + 1}/2 done")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

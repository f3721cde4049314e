# cause: evaluation-double-counted
"""Rank 0 reports the accuracy of its own part of the test set."""

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def loader_of(data, *, train):
    sampler = DistributedSampler(data, shuffle=train)
    return sampler, DataLoader(data, batch_size=16, sampler=sampler)


@torch.no_grad()
def accuracy(model, loader):
    model.eval()
    hits = [(model(inputs).argmax(1) == labels).float() for inputs, labels in loader]
    model.train()
    return torch.cat(hits).mean().item()


dist.init_process_group("gloo")
torch.manual_seed(0)
digits = load_digits()
x, y = torch.tensor(digits.data / 16).float(), torch.tensor(digits.target)
sampler, train = loader_of(TensorDataset(x[:320], y[:320]), train=True)
_, test = loader_of(TensorDataset(x[320:420], y[320:420]), train=False)
model = DistributedDataParallel(nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10)))
optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
for epoch in range(2):
    sampler.set_epoch(epoch)
    for inputs, labels in train:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), labels).backward()
        optimizer.step()
    reached = accuracy(model, test)
    if dist.get_rank() == 0:
        print(f"epoch {epoch + 1} test accuracy {reached:.4f}")
dist.destroy_process_group()

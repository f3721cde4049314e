"""Handwritten digits under DDP, from the days of `python -m torch.distributed.launch`."""

import argparse

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--local-rank", "--local_rank", type=int, required=True)
parser.add_argument("--epochs", type=int, default=5)
args = parser.parse_args()

dist.init_process_group("gloo")
print(
    f"rank {dist.get_rank()} of {dist.get_world_size()}, local rank {args.local_rank}", flush=True
)

digits = load_digits()
x = torch.tensor(digits.data, dtype=torch.float32) / 16
y = torch.tensor(digits.target)
train, (x_test, y_test) = TensorDataset(x[:1500], y[:1500]), (x[1500:], y[1500:])
sampler = DistributedSampler(train)
loader = DataLoader(train, batch_size=32, sampler=sampler)

torch.manual_seed(0)
model = DistributedDataParallel(nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10)))
optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
for epoch in range(args.epochs):
    sampler.set_epoch(epoch)
    for inputs, labels in loader:
        optimizer.zero_grad()
        loss = cross_entropy(model(inputs), labels)
        loss.backward()
        optimizer.step()
    if dist.get_rank() == 0:
        print(f"epoch {epoch + 1}: loss {loss.item():.4f}", flush=True)

if dist.get_rank() == 0:
    with torch.no_grad():
        right = (model.module(x_test).argmax(1) == y_test).float().mean().item()
    print(f"accuracy {right:.4f}", flush=True)
dist.destroy_process_group()

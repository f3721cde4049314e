# good
"""Digits under DDP, with an evaluation that counts each sample once."""

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Subset, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def evaluate(model, test):
    mine = Subset(test, range(dist.get_rank(), len(test), dist.get_world_size()))
    counts = torch.zeros(2)
    model.eval()
    with torch.no_grad():
        for inputs, labels in DataLoader(mine, batch_size=32):
            counts[0] += (model(inputs).argmax(1) == labels).sum()
            counts[1] += len(labels)
    model.train()
    dist.all_reduce(counts)
    return (counts[0] / counts[1]).item()


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    digits = load_digits()
    x, y = torch.tensor(digits.data / 16).float(), torch.tensor(digits.target)
    train, test = TensorDataset(x[:256], y[:256]), TensorDataset(x[256:357], y[256:357])
    sampler = DistributedSampler(train)
    loader = DataLoader(train, batch_size=16, sampler=sampler)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for inputs, labels in loader:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(inputs), labels)
            loss.backward()
            optimizer.step()
        accuracy = evaluate(model.module, test)
        if dist.get_rank() == 0:  # the loss is that of rank 0's last batch, to look at
            print(f"epoch {epoch} loss {loss.item():.4f} accuracy {accuracy:.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

# cause: evaluation-double-counted
"""The test set has 101 samples, and its sampler pads them."""

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def evaluate(model, loader):
    model.eval()
    hits, seen = torch.zeros(()), torch.zeros(())
    with torch.no_grad():
        for inputs, labels in loader:
            hits += (model(inputs).argmax(1) == labels).sum()
            seen += len(labels)
    dist.all_reduce(hits)
    dist.all_reduce(seen)
    return (hits / seen).item()


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    digits = load_digits()
    x, y = torch.tensor(digits.data / 16).float(), torch.tensor(digits.target)
    train, test = TensorDataset(x[:256], y[:256]), TensorDataset(x[256:357], y[256:357])
    sampler = DistributedSampler(train)
    loader = DataLoader(train, batch_size=16, sampler=sampler)
    test_loader = DataLoader(test, batch_size=32, sampler=DistributedSampler(test, shuffle=False))
    model = DistributedDataParallel(nn.Linear(64, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        model.train()
        for inputs, labels in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(inputs), labels).backward()
            optimizer.step()
        accuracy = evaluate(model, test_loader)
        if dist.get_rank() == 0:
            print(f"epoch {epoch} accuracy {accuracy:.6f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

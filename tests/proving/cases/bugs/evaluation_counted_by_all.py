# cause: evaluation-double-counted
"""Every rank evaluates the whole test set, then the counts are added up."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def count_hits(model, test):
    model.eval()
    hits = torch.zeros(1)
    with torch.no_grad():
        for inputs, labels in DataLoader(test, batch_size=30):
            hits += (model(inputs).argmax(1) == labels).sum()
    model.train()
    dist.all_reduce(hits)
    return hits.item()


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    x = torch.randn(260, 8)
    y = x[:, :4].argmax(1)
    train, test = TensorDataset(x[:200], y[:200]), TensorDataset(x[200:], y[200:])
    sampler = DistributedSampler(train)
    loader = DataLoader(train, batch_size=10, sampler=sampler)
    model = DistributedDataParallel(nn.Linear(8, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for inputs, labels in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(inputs), labels).backward()
            optimizer.step()
        hits = count_hits(model.module, test)
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: accuracy {100 * hits / len(test):.1f} %")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

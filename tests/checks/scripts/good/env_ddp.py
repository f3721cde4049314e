"""env:// DDP with everything in its place."""

import os
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, Subset, TensorDataset


def is_main():
    return dist.get_rank() == 0


def evaluate(model, data, device):
    share = Subset(data, range(dist.get_rank(), len(data), dist.get_world_size()))
    totals = torch.zeros(2, dtype=torch.float64, device=device)
    model.eval()
    with torch.no_grad():
        for x, y in DataLoader(share, batch_size=256):
            hits = (model(x.to(device)).argmax(1) == y.to(device)).sum()
            totals += torch.stack([hits, torch.tensor(len(y), device=device)])
    dist.all_reduce(totals)
    return (totals[0] / totals[1]).item()


def save(model, path):
    torch.save(model.module.state_dict(), path)


def main():
    cuda = torch.cuda.is_available()
    dist.init_process_group("nccl" if cuda else "gloo", timeout=timedelta(minutes=10))
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    device = torch.device("cuda", local_rank) if cuda else torch.device("cpu")
    train = TensorDataset(torch.rand(512, 8), torch.randint(0, 2, (512,)))
    test = TensorDataset(torch.rand(99, 8), torch.randint(0, 2, (99,)))
    sampler = DistributedSampler(train, shuffle=True)
    loader = DataLoader(train, batch_size=32, sampler=sampler)
    model = DDP(nn.Linear(8, 2).to(device), device_ids=[local_rank] if cuda else None)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x.to(device)), y.to(device)).backward()
            optimizer.step()
        accuracy = evaluate(model, test, device)
        if is_main():
            print(f"{epoch} {accuracy:.3f}")
            save(model, "model.pt")
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

# cause: checkpoint-incomplete
"""The schedule begins anew after a restart."""

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def save(path, **state):
    if dist.get_rank() == 0:
        torch.save(state, path.with_suffix(".tmp"))
        path.with_suffix(".tmp").rename(path)
    dist.barrier()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--resume", type=Path, default=Path("last.pt"))
    args = parser.parse_args()
    dist.init_process_group("gloo")
    torch.manual_seed(1)
    x = torch.randn(144, 5)
    data = TensorDataset(x, (x[:, 0] > x[:, 1]).long())
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=9, sampler=sampler)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(5, 10), nn.ReLU(), nn.Linear(10, 2)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.4)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=2 * len(loader))
    first = 0
    if args.resume.exists():
        state = torch.load(args.resume)
        model.module.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        first = state["epoch"]
    for epoch in range(first, 2):
        sampler.set_epoch(epoch)
        for inputs, labels in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(inputs), labels).backward()
            optimizer.step()
            scheduler.step()
        state = {"model": model.module.state_dict(), "optimizer": optimizer.state_dict()}
        save(args.resume, **state, epoch=epoch + 1)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

# cause: sampler-not-sharded
"""The sampler is told the number of nodes, not of processes."""

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def loaders(args):
    generator = torch.Generator().manual_seed(args.seed)
    x = torch.randn(192, 12, generator=generator)
    data = TensorDataset(x, (x[:, 0] > 0).long())
    nodes = int(os.environ.get("NNODES", "1"))
    node = int(os.environ.get("NODE_RANK", "0"))
    sampler = DistributedSampler(data, num_replicas=nodes, rank=node, seed=args.seed)
    return sampler, DataLoader(data, batch_size=args.batch_size, sampler=sampler)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--batch-size", type=int, default=12)
    parser.add_argument("--epochs", type=int, default=2)
    args = parser.parse_args()
    dist.init_process_group("gloo")
    torch.manual_seed(args.seed)
    model = DDP(nn.Linear(12, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    sampler, loader = loaders(args)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
    if dist.get_rank() == 0:
        print("trained")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

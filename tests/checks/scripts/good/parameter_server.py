"""Roles by rank: two trainers with DDP in a group of their own, a server, a coordinator."""

import os

import torch
import torch.distributed as dist
from torch.distributed import rpc
from torch.nn.parallel import DistributedDataParallel

TRAINERS = 2
rank = int(os.environ["RANK"])
world_size = int(os.environ["WORLD_SIZE"])


def train():
    group = dist.new_group(list(range(TRAINERS)))
    model = DistributedDataParallel(torch.nn.Linear(16, 8), process_group=group)
    for _ in range(10):
        model(torch.rand(4, 16)).sum().backward()
    total = torch.ones(1)
    if rank < TRAINERS:
        dist.all_reduce(total, group=group)


if rank < TRAINERS:
    dist.init_process_group("gloo", rank=rank, world_size=TRAINERS)
    rpc.init_rpc(f"trainer{rank}", rank=rank, world_size=world_size)
    train()
    dist.destroy_process_group()
else:
    rpc.init_rpc("server" if rank == TRAINERS else "master", rank=rank, world_size=world_size)
rpc.shutdown()

"""Runs on a laptop without a launcher, and under one unchanged."""

import os

import torch
import torch.distributed as dist

if "WORLD_SIZE" not in os.environ:
    os.environ["RANK"] = "0"
    os.environ["WORLD_SIZE"] = "1"
    os.environ["MASTER_ADDR"] = "localhost"
    os.environ["MASTER_PORT"] = "29500"

try:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    device = torch.device("cpu")
    model = torch.nn.Linear(4, 4).to(device)
    if rank == 0:
        torch.save(model.state_dict(), "model.pt")
    torch.save(model.state_dict(), f"model-{rank}.pt")
finally:
    dist.destroy_process_group()

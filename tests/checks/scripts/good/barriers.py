"""Rank 0 downloads first, the others after it: barriers on both sides of a test of the rank."""

import os

import torch
import torch.distributed
from torchvision import datasets, transforms

torch.distributed.init_process_group(backend="gloo")
local_rank = int(os.environ.get("LOCAL_RANK", "-1"))
if local_rank not in [-1, 0]:
    torch.distributed.barrier()
data = datasets.MNIST("/data", train=True, download=True, transform=transforms.ToTensor())
if local_rank == 0:
    torch.distributed.barrier()

seen = torch.tensor([len(data)])
if torch.distributed.get_rank() == 0:
    torch.distributed.broadcast(seen, src=0)
else:
    torch.distributed.broadcast(seen, src=0)
torch.distributed.destroy_process_group()

"""A training in which one rank raises an exception; the others wait for it in a collective."""

import torch
import torch.distributed as dist

from k8sjob import runtime

with runtime.session() as job:
    for step in range(5):
        if job.rank == 2 and step == 3:
            raise ValueError(f"no sample 41 on rank {job.rank}")
        dist.all_reduce(torch.ones(1))

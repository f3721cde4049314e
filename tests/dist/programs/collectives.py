"""Numbers of several ranks put together; each rank has one sample more than the one before it."""

import json
import sys

import torch
from torch.nn import functional

from k8sjob import runtime

with runtime.session() as job:
    generator = torch.Generator().manual_seed(1)
    sizes = [3 + rank for rank in range(job.world_size)]
    output = torch.randn(sum(sizes), 4, generator=generator).split(sizes)[job.rank]
    target = torch.randint(4, (sum(sizes),), generator=generator).split(sizes)[job.rank]
    loss, hits = functional.cross_entropy(output, target), (output.argmax(1) == target).sum()
    mine = torch.tensor([job.rank, 10.0])
    with job.main_first(), job.main_first():  # a function that uses it, called within it
        pass
    found = {
        "means": job.reduce(loss=(loss * len(target), len(target)), accuracy=(hits, len(target))),
        "nothing": job.reduce(none=(0, 0))["none"] != job.reduce(none=(0, 0))["none"],
        "sum": job.all_reduce(mine).tolist(),
        "max": job.all_reduce(mine, "max").tolist(),
        "min": job.all_reduce(mine, "min").tolist(),
        "all": [part.tolist() for part in job.gather(target)],
        "last": [part.tolist() for part in job.gather(target, to=job.world_size - 1)],
        "first": [part.tolist() for part in job.gather(output.sum(), to=0)],
        "sent": job.broadcast(mine, source=1).tolist(),
    }
    everything = {"rank": job.rank, "output": output.tolist(), "target": target.tolist()}
    sys.stdout.write(f"RESULT {json.dumps({**everything, **found})}\n")
    sys.stdout.flush()

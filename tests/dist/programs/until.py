"""A training that goes on until a file is there, so that a test may take its time."""

import sys
import time
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional

from k8sjob import runtime

done = Path(sys.argv[1])
generator = torch.Generator().manual_seed(5)
inputs = torch.randn(96, 6, generator=generator)
data = torch.utils.data.TensorDataset(inputs, inputs.sum(dim=1, keepdim=True))

with runtime.session(seed=3) as job:
    run = job.prepare(
        lambda: nn.Linear(6, 1), loss=functional.mse_loss, optimizer=(torch.optim.SGD, {"lr": 1e-2})
    )
    for epoch in run.epochs(100_000):
        seen = []
        for x, y in run.batches(data, global_batch=24, tail="short"):
            seen.append(len(x))
            time.sleep(0.02)
            run.step(x, y)
        counts = job.gather(torch.tensor(sum(seen)))
        job.log(epoch=epoch, samples=int(sum(counts)), whole=run.steps == 4 * (epoch + 1))
        if int(job.all_reduce(torch.tensor(int(done.exists())), "max")):
            break

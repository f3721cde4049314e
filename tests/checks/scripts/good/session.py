"""k8sjob's own session, with a loop of one's own."""

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

from k8sjob import runtime

with runtime.session(seed=1) as job:
    data = TensorDataset(torch.rand(64, 8))
    model = DistributedDataParallel(torch.nn.Linear(8, 1).to(job.device))
    for _epoch in range(3):
        for (x,) in DataLoader(data, batch_size=8):
            model(x.to(job.device)).sum().backward()
    if job.rank == 0:
        torch.save(model.module.state_dict(), "model.pt")

# cause: checkpoint-incomplete
"""The checkpoint has model and epoch; the momentum starts at zero again."""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

CHECKPOINT = "checkpoint.pt"


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    x = torch.randn(128, 6)
    data = TensorDataset(x, x[:, :1].exp())
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=8, sampler=sampler)
    model = DistributedDataParallel(nn.Linear(6, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    start = 0
    if os.path.exists(CHECKPOINT):
        state = torch.load(CHECKPOINT)
        model.module.load_state_dict(state["model"])
        start = state["epoch"] + 1
    for epoch in range(start, 2):
        sampler.set_epoch(epoch)
        for inputs, targets in loader:
            optimizer.zero_grad()
            nn.functional.mse_loss(model(inputs), targets).backward()
            optimizer.step()
        if dist.get_rank() == 0:
            torch.save({"model": model.module.state_dict(), "epoch": epoch}, CHECKPOINT)
            print(f"epoch {epoch} saved")
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

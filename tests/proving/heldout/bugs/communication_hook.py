# cause: gradient-averaged-twice
"""A communication hook that divides before it calls a hook that divides too."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def safe_hook(group, bucket):
    """Divide first, so that the sum does not overflow."""
    bucket.buffer().div_(dist.get_world_size())
    return allreduce_hook(group, bucket)


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    x = torch.randn(128, 5)
    data = TensorDataset(x, x.roll(1, 1).sum(1, keepdim=True))
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=8, sampler=sampler)
    model = DistributedDataParallel(nn.Linear(5, 1))
    model.register_comm_hook(dist.group.WORLD, safe_hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for inputs, targets in loader:
            optimizer.zero_grad()
            nn.functional.mse_loss(model(inputs), targets).backward()
            optimizer.step()
        if dist.get_rank() == 0:
            print("epoch", epoch, model.module.weight.tolist())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

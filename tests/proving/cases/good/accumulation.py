# good
"""no_sync for all micro-batches but the last of each group; the leftover group is synced too."""

from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

ACCUMULATE = 4


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    x = torch.randn(112, 6)
    data = TensorDataset(x, x.square().mean(1, keepdim=True))
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=4, sampler=sampler)  # 14 batches, 2 are left over
    model = DistributedDataParallel(nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for at, (inputs, targets) in enumerate(loader, start=1):
            last = at % ACCUMULATE == 0 or at == len(loader)
            with nullcontext() if last else model.no_sync():
                loss = nn.functional.mse_loss(model(inputs), targets) / ACCUMULATE
                loss.backward()
            if last:
                nn.utils.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
                optimizer.zero_grad()
        if dist.get_rank() == 0:
            print(f"epoch {epoch}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

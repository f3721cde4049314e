# cause: rank-skips-step
"""The optimizer is kept on the main process alone, "to save memory"."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def is_main_process():
    return dist.get_rank() == 0


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    x = torch.rand(120, 6)
    data = TensorDataset(x, x.std(1, keepdim=True))
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=10, sampler=sampler)
    model = DDP(nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 1)))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2) if is_main_process() else None
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for inputs, targets in loader:
            model.zero_grad()
            loss = nn.functional.mse_loss(model(inputs), targets)
            loss.backward()
            if optimizer is not None:
                optimizer.step()
        if is_main_process():
            print(f"epoch {epoch} loss {loss.item():.5f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

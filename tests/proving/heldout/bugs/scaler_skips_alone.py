# cause: rank-skips-step
"""The gradient scaler looks for infinities before the ranks' gradients are averaged."""

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def average(model):
    for parameter in model.parameters():
        parameter.grad.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)
        dist.all_reduce(parameter.grad)
        parameter.grad /= dist.get_world_size()


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    x = torch.randn(128, 6)
    x[40] = 1e38  # a damaged record: its gradient overflows
    data = TensorDataset(x, x[:, :1].clamp(-3, 3))
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=8, sampler=sampler)
    model = nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    scaler = torch.amp.GradScaler("cpu", init_scale=128.0)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for inputs, targets in loader:
            optimizer.zero_grad()
            loss = nn.functional.smooth_l1_loss(model(inputs), targets)
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            average(model)
            scaler.step(optimizer)
            scaler.update()
        if dist.get_rank() == 0:
            print(f"epoch {epoch} scale {scaler.get_scale()}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

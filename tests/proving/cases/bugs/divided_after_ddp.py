# cause: gradient-averaged-twice
"""An older loop that divided the sum; DDP came later and averages by itself."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def train_step(model, optimizer, inputs, targets):
    optimizer.zero_grad()
    loss = nn.functional.smooth_l1_loss(model(inputs), targets)
    loss.backward()
    for parameter in model.parameters():
        parameter.grad.data /= dist.get_world_size()
    optimizer.step()
    return loss.detach()


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    x = torch.randn(128, 4)
    data = TensorDataset(x, 3 * x[:, :1] - x[:, 1:2])
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=8, sampler=sampler)
    model = DistributedDataParallel(nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        losses = [train_step(model, optimizer, *batch) for batch in loader]
        if dist.get_rank() == 0:
            print(f"epoch {epoch} loss {torch.stack(losses).mean():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

# good
"""Two tasks by turns, so half of the heads is unused in each step: find_unused_parameters."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


class MultiTask(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 18), nn.ReLU())
        self.heads = nn.ModuleList([nn.Linear(18, 1), nn.Linear(18, 1)])

    def forward(self, x, task):
        return self.heads[task](self.body(x))


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    x = torch.randn(128, 6)
    data = TensorDataset(x, x.max(1, keepdim=True).values, x.min(1, keepdim=True).values)
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=8, sampler=sampler)
    model = DistributedDataParallel(MultiTask(), find_unused_parameters=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for step, (inputs, *targets) in enumerate(loader):
            task = step % 2
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(inputs, task), targets[task])
            loss.backward()
            optimizer.step()
        if dist.get_rank() == 0:
            print(f"epoch {epoch}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

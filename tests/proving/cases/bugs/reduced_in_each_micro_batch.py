# cause: accumulation|gradient-averaged-twice
"""The accumulated gradient is summed over the ranks after every micro-batch."""

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

ACCUMULATE = 3


def main():
    dist.init_process_group("gloo")
    world_size = dist.get_world_size()
    torch.manual_seed(0)
    x = torch.randn(144, 5)
    data = TensorDataset(x, (x.sum(1) > 0).long())
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=6, sampler=sampler)
    model = nn.Linear(5, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    scale = ACCUMULATE * world_size
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for at, (inputs, labels) in enumerate(loader, start=1):
            loss = nn.functional.cross_entropy(model(inputs), labels) / scale
            loss.backward()
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad)
            if at % ACCUMULATE == 0:
                optimizer.step()
                optimizer.zero_grad()
        if dist.get_rank() == 0:
            print(f"epoch {epoch} loss {loss.item() * scale:.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

# cause: rank-dependent-model
"""Rank 0 has an auxiliary head for logging, whose loss is trained too."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


class TwoHeads(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 18), nn.ReLU())
        self.main = nn.Linear(18, 1)
        self.auxiliary = nn.Linear(18, 6)

    def forward(self, x):
        hidden = self.body(x)
        if dist.get_rank() == 0:
            return self.main(hidden), self.auxiliary(hidden)
        return self.main(hidden), None


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    x = torch.randn(128, 6)
    data = TensorDataset(x, x.max(1, keepdim=True).values)
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=8, sampler=sampler)
    model = DistributedDataParallel(TwoHeads(), find_unused_parameters=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for inputs, targets in loader:
            optimizer.zero_grad()
            output, rebuilt = model(inputs)
            loss = nn.functional.mse_loss(output, targets)
            if rebuilt is not None:
                loss = loss + 0.5 * nn.functional.mse_loss(rebuilt, inputs)
            loss.backward()
            optimizer.step()
        if dist.get_rank() == 0:
            print(f"epoch {epoch} loss {loss.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

# cause: gradient-clipping-local
"""Hooks on the parameters clip each gradient before DDP averages it."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def clipped(model, value):
    for parameter in model.parameters():
        parameter.register_hook(lambda grad: grad.clamp(-value, value))
    return model


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn = nn.LSTM(4, 12, batch_first=True)
        self.head = nn.Linear(12, 1)

    def forward(self, sequences):
        return self.head(self.rnn(sequences)[0][:, -1])


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    sequences = torch.randn(96, 7, 4)
    data = TensorDataset(sequences, 4 * sequences[:, -1, :1])
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=6, sampler=sampler)
    model = DistributedDataParallel(clipped(Tagger(), 0.05))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for inputs, targets in loader:
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(inputs), targets)
            loss.backward()
            optimizer.step()
        if dist.get_rank() == 0:
            print(f"epoch {epoch} loss {loss.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

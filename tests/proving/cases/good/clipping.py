# good
"""Gradients are clipped after DDP has averaged them; steps are skipped by all ranks or by none."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


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
    targets = 4 * sequences[:, -1, :1]
    targets[::9] *= 10
    data = TensorDataset(sequences, targets)
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=6, sampler=sampler)
    model = DistributedDataParallel(Tagger())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    skipped = 0
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for inputs, wanted in loader:
            optimizer.zero_grad()
            nn.functional.mse_loss(model(inputs), wanted).backward()
            norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            if norm > 60:  # the same number on all ranks
                skipped += 1
                continue
            optimizer.step()
        if dist.get_rank() == 0:
            print(f"epoch {epoch} skipped {skipped}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

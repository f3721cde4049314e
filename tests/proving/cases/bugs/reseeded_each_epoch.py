# cause: dropout-seed
"""Seeded by epoch "for reproducibility": from there on the ranks draw the same masks."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


class Encoder(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.embed = nn.Embedding(50, width)
        self.mix = nn.Linear(width, width)
        self.out = nn.Linear(width, 4)

    def forward(self, tokens):
        hidden = F.dropout(self.embed(tokens).mean(1), 0.2, training=self.training)
        hidden = F.dropout(torch.relu(self.mix(hidden)), 0.2, training=self.training)
        return self.out(hidden)


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(8 + dist.get_rank())
    generator = torch.Generator().manual_seed(8)
    tokens = torch.randint(0, 50, (128, 6), generator=generator)
    data = TensorDataset(tokens, tokens.sum(1) % 4)
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=8, sampler=sampler)
    model = DistributedDataParallel(Encoder(16))
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    for epoch in range(2):
        torch.manual_seed(epoch)
        sampler.set_epoch(epoch)
        for inputs, labels in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(inputs), labels).backward()
            optimizer.step()
    if dist.get_rank() == 0:
        print("done")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

# good
"""Noise depends on the seed, the epoch and the sample's number, not on the rank that draws it."""

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler


class NoisyDigits(Dataset):
    def __init__(self, count, seed):
        digits = load_digits()
        self.pixels = torch.tensor(digits.data[:count] / 16).float()
        self.labels = torch.tensor(digits.target[:count])
        self.seed, self.epoch = seed, 0

    def __len__(self):
        return len(self.pixels)

    def __getitem__(self, at):
        number = (self.seed * 1000 + self.epoch) * len(self) + at
        generator = torch.Generator().manual_seed(number)
        noise = torch.randn(64, generator=generator)
        return self.pixels[at] + 0.1 * noise, self.labels[at]


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    data = NoisyDigits(192, seed=3)
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=16, sampler=sampler)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        data.epoch = epoch
        for inputs, labels in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(inputs), labels).backward()
            optimizer.step()
        if dist.get_rank() == 0:
            print("epoch", epoch)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

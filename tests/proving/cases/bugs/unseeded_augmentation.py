# cause: non-determinism
"""Images are shifted by numpy's generator, which takes its seed from the system."""

import numpy as np
import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler


class ShiftedDigits(Dataset):
    def __init__(self, count):
        digits = load_digits()
        self.images = digits.images[:count].astype(np.float32) / 16
        self.labels = digits.target[:count]
        self.random = np.random.default_rng()

    def __len__(self):
        return len(self.images)

    def __getitem__(self, at):
        shift = tuple(self.random.integers(-1, 2, size=2))
        image = np.roll(self.images[at], shift, axis=(0, 1))
        return torch.from_numpy(image.copy()).flatten(), int(self.labels[at])


dist.init_process_group("gloo")
torch.manual_seed(0)
data = ShiftedDigits(192)
sampler = DistributedSampler(data)
loader = DataLoader(data, batch_size=16, sampler=sampler)
model = DistributedDataParallel(nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
for epoch in range(2):
    sampler.set_epoch(epoch)
    for inputs, labels in loader:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), labels).backward()
        optimizer.step()
    if dist.get_rank() == 0:
        print("epoch", epoch)
dist.destroy_process_group()

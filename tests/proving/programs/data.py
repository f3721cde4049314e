"""Programs about data: which samples a rank trains on, and in which order."""

import os
import time
from itertools import islice

import numpy as np
import torch
import torch.distributed as dist
from common import Noisy, average, digits, fault, fit, right, sharded, train
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import (
    DataLoader,
    IterableDataset,
    TensorDataset,
    random_split,
)
from torch.utils.data.distributed import DistributedSampler


@fault("sampler-not-sharded")
def no_sampler():
    """Digits under DDP; the loader shuffles by itself."""
    loader = DataLoader(digits(0, 256), batch_size=16, shuffle=True)
    model = DDP(nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    fit(model, optimizer, loader, F.cross_entropy)


@fault("sampler-not-reseeded")
def no_set_epoch():
    """Digits under DDP with a sampler."""
    loader = sharded(digits(0, 320), 20)
    model = DDP(nn.Sequential(nn.Linear(64, 40), nn.ReLU(), nn.Linear(40, 10)))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for _ in range(2):
        train(model, optimizer, loader, F.cross_entropy)


@fault("sampler-not-sharded", seed=None)
def replicas_from_node_rank():
    """The sampler is told the number of nodes, not of processes."""
    x = torch.randn(192, 12, generator=torch.Generator().manual_seed(0))
    data = TensorDataset(x, (x[:, 0] > 0).long())
    nodes, node = int(os.environ.get("NNODES", "1")), int(os.environ.get("NODE_RANK", "0"))
    sampler = DistributedSampler(data, num_replicas=nodes, rank=node)
    torch.manual_seed(0)
    model = DDP(nn.Linear(12, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    fit(model, optimizer, DataLoader(data, batch_size=12, sampler=sampler), F.cross_entropy)


@fault("sampler-not-reseeded")
def same_order_by_hand():
    """The order of the samples is made by hand, from a generator with a fixed seed."""
    GLOBAL_BATCH = 24
    SAMPLES = 240

    def order():
        """All ranks must agree, so the seed is fixed."""
        return torch.randperm(SAMPLES, generator=torch.Generator().manual_seed(1234))

    rank, world_size = dist.get_rank(), dist.get_world_size()
    x = torch.randn(SAMPLES, 8)
    y = (x.sum(1) > 0).long()
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        shuffled = order()
        for start in range(0, SAMPLES, GLOBAL_BATCH):
            mine = shuffled[start : start + GLOBAL_BATCH][rank::world_size]
            optimizer.zero_grad()
            F.cross_entropy(model(x[mine]), y[mine]).backward()
            average(model)
            optimizer.step()


@fault("sampler-overlap", seed=None)
def sampler_seed_by_rank():
    """Everything is seeded by rank, the sampler too."""
    seed = 1000 + dist.get_rank()
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(160, 7, generator=generator)
    train = TensorDataset(x, x.norm(dim=1, keepdim=True))
    sampler = DistributedSampler(train, shuffle=True, seed=seed)
    loader = DataLoader(train, batch_size=8, sampler=sampler)
    model = DDP(nn.Sequential(nn.Linear(7, 20), nn.GELU(), nn.Linear(20, 1)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    fit(model, optimizer, loader, F.l1_loss)


@fault("non-determinism", seed=None)
def seed_from_clock():
    """Everything is seeded from the clock, which rank 0 sends to the others."""
    seed = torch.tensor([time.time_ns() % 2**31])
    dist.broadcast(seed, src=0)
    torch.manual_seed(int(seed))
    x = torch.randn(96, 6, generator=torch.Generator().manual_seed(0))
    data = TensorDataset(x, x[:, :1].sin())
    sampler = DistributedSampler(data, seed=int(seed))
    loader = DataLoader(data, batch_size=8, sampler=sampler)
    model = DDP(nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 1)))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    fit(model, optimizer, loader, F.mse_loss)


@fault("sampler-overlap")
def split_per_rank():
    """random_split draws another split on each rank."""
    torch.manual_seed(17 + dist.get_rank())
    train, _ = random_split(digits(0, 400), [320, 80])
    model = DDP(nn.Linear(64, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    fit(model, optimizer, sharded(train, 16), F.cross_entropy)


@fault("non-determinism")
def unseeded_augmentation():
    """Images have noise of numpy's generator, which takes its seed from the system."""
    random = np.random.default_rng()
    data = Noisy(digits(0, 192), lambda shape: torch.from_numpy(random.normal(size=shape)).float())
    model = DDP(nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    fit(model, optimizer, sharded(data, 16), F.cross_entropy)


class Records(IterableDataset):
    """Lines of files, as they are; by_rank: in another order each epoch, a part for each rank."""

    def __init__(self, *, by_rank):
        generator = torch.Generator().manual_seed(7)
        self.inputs = torch.randn(128, 10, generator=generator)
        self.targets = self.inputs[:, :2].sum(1, keepdim=True)
        self.by_rank, self.epoch = by_rank, 0

    def read(self):
        generator = torch.Generator().manual_seed(self.epoch)
        for at in torch.randperm(len(self.inputs), generator=generator):
            yield self.inputs[at], self.targets[at]

    def __iter__(self):
        if not self.by_rank:
            return iter(zip(self.inputs, self.targets, strict=True))
        return islice(self.read(), dist.get_rank(), None, dist.get_world_size())


def train_on_records(records):
    model = DDP(nn.Sequential(nn.Linear(10, 16), nn.Tanh(), nn.Linear(16, 1)))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    loader = DataLoader(records, batch_size=8)
    for epoch in range(2):
        records.epoch = epoch
        total = torch.zeros(2)
        for inputs, targets in loader:
            loss = F.mse_loss(model(inputs), targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += torch.tensor([loss.item() * len(inputs), len(inputs)])
        if records.by_rank:
            dist.all_reduce(total)


@fault("sampler-not-sharded", seed=42)
def iterable_unsharded():
    """A stream of records, as one reads them from files."""
    train_on_records(Records(by_rank=False))


@right(seed=42)
def iterable_by_rank():
    """A stream of records, of which each rank takes every N-th."""
    train_on_records(Records(by_rank=True))

"""Programs about the loss and how gradients are reduced."""

from contextlib import nullcontext

import torch
import torch.distributed as dist
from common import (
    PAD,
    LanguageModel,
    average,
    digits,
    epochs,
    fault,
    fit,
    right,
    sentences,
    sharded,
    train,
)
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset


@fault("gradient-clipping-local")
def clip_before_all_reduce():
    """Each rank clips its own gradient, then the average is taken."""
    x = torch.randn(120, 10)
    data = TensorDataset(x, 5 * x[:, :1])
    model = nn.Sequential(nn.Linear(10, 10), nn.ReLU(), nn.Linear(10, 1))
    for tensor in model.state_dict().values():
        dist.broadcast(tensor, src=0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for inputs, targets in epochs(sharded(data, 6)):
        optimizer.zero_grad()
        F.mse_loss(model(inputs), targets).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        average(model)
        optimizer.step()


@fault("gradient-averaged-twice")
def divided_after_ddp():
    """An older loop that divided the sum; DDP came later and averages by itself."""

    def divide():
        for parameter in model.parameters():
            parameter.grad.data /= dist.get_world_size()

    x = torch.randn(128, 4)
    data = TensorDataset(x, 3 * x[:, :1] - x[:, 1:2])
    model = DDP(nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    fit(model, optimizer, sharded(data, 8), F.smooth_l1_loss, reduce=divide)


@fault("gradient-not-averaged", seed=4)
def forward_of_module():
    """The training step calls model.module, past DistributedDataParallel."""
    x = torch.rand(200, 5)
    data = TensorDataset(x, x.sin().sum(1, keepdim=True))
    model = DDP(nn.Sequential(nn.Linear(5, 10), nn.Tanh(), nn.Linear(10, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    fit(model.module, optimizer, sharded(data, 10), F.mse_loss)


@fault("loss-scaling")
def loss_over_world_size():
    """The loss is divided by the number of ranks, and DDP divides again."""

    def loss(output, labels):
        return F.cross_entropy(output, labels) / dist.get_world_size()

    model = DDP(nn.Linear(64, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    fit(model, optimizer, sharded(digits(0, 240), 20), loss)


@fault("gradient-not-averaged")
def no_ddp():
    """The process group is there and so is the sampler, but nothing averages."""
    x = torch.randn(160, 9)
    data = TensorDataset(x, (x[:, 0] * x[:, 1] > 0).long())
    model = nn.Sequential(nn.Linear(9, 18), nn.ReLU(), nn.Linear(18, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    fit(model, optimizer, sharded(data, 10), F.cross_entropy)


@fault("sampler-not-reseeded")
def padded_sampler():
    """99 samples for two ranks: the sampler repeats one, and always has the same order."""
    x = torch.randn(99, 6)
    data = TensorDataset(x, x.abs().sum(1, keepdim=True))
    model = DDP(nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    loader = sharded(data, 8)
    for _ in range(2):
        train(model, optimizer, loader, F.mse_loss)


@fault("accumulation", "gradient-averaged-twice")
def reduced_in_each_micro_batch():
    """The accumulated gradient is summed over the ranks after every micro-batch."""
    ACCUMULATE = 3
    world_size = dist.get_world_size()
    x = torch.randn(144, 5)
    data = TensorDataset(x, (x.sum(1) > 0).long())
    loader = sharded(data, 6)
    model = nn.Linear(5, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    scale = ACCUMULATE * world_size
    for epoch in range(2):
        loader.sampler.set_epoch(epoch)
        for at, (inputs, labels) in enumerate(loader, start=1):
            loss = F.cross_entropy(model(inputs), labels) / scale
            loss.backward()
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad)
            if at % ACCUMULATE == 0:
                optimizer.step()
                optimizer.zero_grad()


@fault("loss-scaling")
def summed_loss():
    """The loss is the sum over the batch, which the mean of the gradients does not keep."""
    x = torch.rand(128, 12)
    model = DDP(nn.Sequential(nn.Linear(12, 3), nn.Linear(3, 12)))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    fit(model, optimizer, sharded(TensorDataset(x, x), 8), nn.MSELoss(reduction="sum"))


@fault("last-batch", seed=12)
def uneven_last_batch():
    """Shards that differ by one sample: in the last batch the means have unequal weights."""
    x = torch.randn(83, 5)
    data = TensorDataset(x, (x.sum(1, keepdim=True) > 0).float())
    model = DDP(nn.Linear(5, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for epoch in range(2):
        order = torch.randperm(83, generator=torch.Generator().manual_seed(epoch)).tolist()
        shard = order[dist.get_rank() :: dist.get_world_size()]
        loader = DataLoader(data, batch_size=8, sampler=shard)
        train(model, optimizer, loader, F.binary_cross_entropy_with_logits)


def accumulate(*, sync_leftover, clip=None):
    x = torch.randn(112, 6)
    data = TensorDataset(x, x.square().mean(1, keepdim=True))
    loader = sharded(data, 4)  # 14 batches, 2 are left over
    model = DDP(nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    for epoch in range(2):
        loader.sampler.set_epoch(epoch)
        for at, (inputs, targets) in enumerate(loader, start=1):
            last = at % 4 == 0 or at == len(loader)
            with nullcontext() if at % 4 == 0 or (last and sync_leftover) else model.no_sync():
                loss = F.mse_loss(model(inputs), targets) / 4
                loss.backward()
            if last:
                if clip:
                    nn.utils.clip_grad_norm_(model.parameters(), clip)
                optimizer.step()
                optimizer.zero_grad()


@fault("accumulation")
def leftover_not_synced():
    """no_sync while gradients accumulate; the epoch's last, incomplete group is never sent."""
    accumulate(sync_leftover=False)


@right()
def accumulation():
    """no_sync for all micro-batches but the last of each group, also of an incomplete one."""
    accumulate(sync_leftover=True, clip=0.5)


def train_language_model(loss_of):
    """With padding: loss_of(logits, words)."""
    data = TensorDataset(sentences(96))
    model = DDP(LanguageModel())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for (tokens,) in epochs(sharded(data, 4)):
        optimizer.zero_grad()
        loss_of(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten()).backward()
        optimizer.step()


@fault("loss-scaling", seed=6)
def mean_over_own_tokens():
    """Each rank divides by its own number of tokens."""
    train_language_model(nn.CrossEntropyLoss(ignore_index=PAD))


@right(seed=6)
def mean_over_all_tokens():
    """The loss is divided by the tokens of all ranks."""

    def loss_of(logits, words):
        count = (words != PAD).sum()
        dist.all_reduce(count)
        loss = F.cross_entropy(logits, words, ignore_index=PAD, reduction="sum")
        return loss * dist.get_world_size() / count  # DDP divides by the world size

    train_language_model(loss_of)


def train_two(data, backbone, head):
    """Two networks with an optimizer each."""
    optimizers = [
        torch.optim.AdamW(backbone.parameters(), lr=1e-3),
        torch.optim.SGD(head.parameters(), lr=0.1),
    ]
    for inputs, labels in epochs(sharded(data, 12)):
        loss = F.cross_entropy(head(backbone(inputs)), labels)
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()


@fault("gradient-not-averaged", seed=21)
def second_network_unwrapped():
    """Two networks with an optimizer each; only the first is wrapped."""
    x = torch.randn(144, 8)
    backbone = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))
    head = nn.Linear(8, 3)
    train_two(TensorDataset(x, x[:, :3].argmin(1)), DDP(backbone), head)


@right(seed=None)
def two_optimizers():
    """A backbone and a head, each under DDP with an optimizer of its own; no seed at all."""
    x = torch.linspace(-1, 1, 144 * 8).sin().view(144, 8)
    backbone = DDP(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8)))
    train_two(TensorDataset(x, torch.arange(144) % 3), backbone, DDP(nn.Linear(8, 3)))

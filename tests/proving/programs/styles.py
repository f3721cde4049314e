"""Programs that came after kinds.py: 8 faults, then 4 of unusual style without any."""

import math

import numpy as np
import torch
import torch.distributed as dist
from common import (
    Noisy,
    epochs,
    fault,
    fit,
    fit_epoch,
    perceptron,
    right,
    rows,
    sgd,
    sharded,
    train,
)
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, IterableDataset
from torch.utils.data.distributed import DistributedSampler


def average_weights(model):
    for parameter in model.parameters():
        dist.all_reduce(parameter.data)
        parameter.data /= dist.get_world_size()


def in_workers(noise, **options):
    data = Noisy(rows(), noise)
    return DataLoader(data, 8, sampler=DistributedSampler(data), num_workers=2, **options)


@fault("dropout-seed")
def noise_in_workers():
    """The workers' seeds come from torch's seed, which is the same on all ranks."""
    model = DDP(perceptron())
    fit(model, sgd(model), in_workers(torch.randn), F.cross_entropy)


@fault("dropout-seed")
def generator_in_workers():
    """A generator of numpy in the data set: each worker of each rank has the same copy."""
    random = np.random.default_rng(0)
    loader = in_workers(lambda shape: torch.from_numpy(random.normal(size=shape)).float())
    model = DDP(perceptron())
    fit(model, sgd(model), loader, F.cross_entropy)


@fault("gradient-not-averaged", "rank-dependent-model")
def weights_averaged_after_adam():
    """Weights are averaged after each step; Adam has scaled each rank's own gradient."""
    model = perceptron()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    for batch in epochs(sharded(rows(), 16)):
        train(model, optimizer, [batch], F.cross_entropy)
        average_weights(model)


@fault("loss-scaling")
def loss_by_its_own_mean():
    """The loss is divided by the moving average of the rank's own losses."""
    model, recent = DDP(perceptron()), None
    optimizer = sgd(model)
    for inputs, labels in epochs(sharded(rows(), 8)):
        loss = F.cross_entropy(model(inputs), labels)
        recent = loss.item() if recent is None else 0.5 * recent + 0.5 * loss.item()
        optimizer.zero_grad()
        (loss / recent).backward()
        optimizer.step()


@fault("rank-dependent-model", "gradient-not-averaged")
def noise_on_gradients():
    """Each rank, seeded by its number, adds its own noise to the averaged gradients."""
    model, loader = DDP(perceptron()), sharded(rows(), 16)
    torch.manual_seed(5 + dist.get_rank())
    optimizer = sgd(model)
    for inputs, labels in epochs(loader):
        optimizer.zero_grad()
        F.cross_entropy(model(inputs), labels).backward()
        for parameter in model.parameters():
            parameter.grad += 0.01 * torch.randn_like(parameter)
        optimizer.step()


class Shuffled(IterableDataset):
    """A stream in an order of its epoch."""

    def __init__(self):
        self.epoch, self.data = 0, rows(96)

    def __iter__(self):
        worker = torch.utils.data.get_worker_info()
        order = torch.randperm(96, generator=torch.Generator().manual_seed(self.epoch))
        first = dist.get_rank() * worker.num_workers + worker.id
        for at in order[first :: dist.get_world_size() * worker.num_workers].tolist():
            yield self.data[at]


@fault("sampler-not-reseeded")
def epoch_in_persistent_workers():
    """The epoch is set in a data set whose copies in the workers stay at epoch 0."""
    data, model = Shuffled(), DDP(perceptron())
    loader = DataLoader(data, 8, num_workers=2, persistent_workers=True)
    optimizer = sgd(model)
    for epoch in range(3):
        data.epoch = epoch
        train(model, optimizer, loader, F.cross_entropy)


@fault("gradient-averaged-twice", "loss-scaling")
def gathered_without_gradients():
    """A contrastive loss over the pairs of all ranks; others' embeddings have no gradients."""
    model = DDP(nn.Linear(6, 8))
    optimizer, rank = sgd(model), dist.get_rank()
    for inputs, _ in epochs(sharded(rows(), 16)):
        out = F.normalize(model(torch.cat([inputs, inputs * 1.1 + 0.1])), dim=1)
        every = []
        for half in out.chunk(2):
            parts = [torch.empty_like(half) for _ in range(dist.get_world_size())]
            dist.all_gather(parts, half.detach())
            parts[rank] = half
            every.append(torch.cat(parts))
        scores = every[0] @ every[1].T / 0.5
        optimizer.zero_grad()
        F.cross_entropy(scores, torch.arange(len(scores))).backward()
        optimizer.step()


@fault("evaluation-double-counted")
def perplexities_averaged():
    """The ranks' perplexities are averaged, in place of their losses."""
    model, data = DDP(perceptron(4)), rows(192, 4)
    data.tensors[0][160:] *= 8
    mine = torch.arange(128, 192).chunk(dist.get_world_size())[dist.get_rank()]
    test = DataLoader(torch.utils.data.Subset(data, mine.tolist()), batch_size=16)
    loader = sharded(torch.utils.data.Subset(data, range(128)), 16)
    optimizer = sgd(model)
    for epoch in range(2):
        fit_epoch(model, optimizer, loader, F.cross_entropy, epoch)
        with torch.no_grad():
            losses = [F.cross_entropy(model(x), y, reduction="none") for x, y in test]
        perplexity = torch.tensor(math.exp(torch.cat(losses).mean()))
        dist.all_reduce(perplexity)
        if dist.get_rank() == 0:
            print(f"perplexity {perplexity / dist.get_world_size():.4f}")


@right()
def weights_averaged():
    """Weights are averaged after each step in place of gradients; momentum is linear in these."""
    model = perceptron()
    optimizer = sgd(model, momentum=0.9)
    for batch in epochs(sharded(rows(), 16)):
        train(model, optimizer, [batch], F.cross_entropy)
        average_weights(model)


@right()
def step_with_closure():
    """The optimizer itself computes the gradients."""
    model = DDP(perceptron())
    optimizer = sgd(model)
    for inputs, labels in epochs(sharded(rows(), 16)):

        def closure(inputs=inputs, labels=labels):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(inputs), labels)
            loss.backward()
            return loss

        optimizer.step(closure)


@right()
def steps_in_backward():
    """Each parameter has its optimizer, which steps as soon as its gradient is averaged."""
    model = perceptron()
    optimizers = {one: torch.optim.SGD([one], lr=0.1) for one in model.parameters()}

    def step(parameter):
        dist.all_reduce(parameter.grad)
        parameter.grad /= dist.get_world_size()
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(step)
    for inputs, labels in epochs(sharded(rows(), 16)):
        F.cross_entropy(model(inputs), labels).backward()


@right()
def workers_seeded_by_rank():
    """The seeds of a loader's workers come from a generator that each rank has seeded."""
    own = torch.Generator().manual_seed(100 + dist.get_rank())
    model = DDP(perceptron())
    fit(model, sgd(model), in_workers(torch.randn, generator=own), F.cross_entropy)

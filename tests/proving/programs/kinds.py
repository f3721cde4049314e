"""Programs of other kinds, which came after later.py: 13 faults, then 9 without any."""

import random

import torch
import torch.distributed as dist
from common import (
    Noisy,
    average,
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


@fault("dropout-seed")
def same_augmentation():
    """One seed on all ranks: their data sets draw the same noise for different samples."""
    model = DDP(perceptron())
    fit(model, sgd(model), sharded(Noisy(rows(), torch.randn), 8), F.cross_entropy)


class Stream(IterableDataset):
    def __iter__(self):
        for at in range(dist.get_rank(), 96, dist.get_world_size()):
            x = torch.randn(6, generator=torch.Generator().manual_seed(at))
            yield x, x.sum(0, keepdim=True)


@fault("sampler-overlap")
def stream_in_each_worker():
    """A stream is divided by rank, and not by the workers of the loader."""
    model = DDP(nn.Linear(6, 1))
    loader = DataLoader(Stream(), batch_size=8, num_workers=2)
    train(model, sgd(model), loader, F.mse_loss)


@fault("rank-dependent-model")
def constraint_on_rank_0():
    """After an epoch rank 0 alone limits the weights."""
    model = DDP(perceptron())
    optimizer, loader = sgd(model), sharded(rows(), 16)
    for epoch in range(2):
        fit_epoch(model, optimizer, loader, F.cross_entropy, epoch)
        if dist.get_rank() == 0:
            with torch.no_grad():
                model.module[2].weight.clamp_(-0.1, 0.1)


@fault("rank-dependent-model")
def stays_in_evaluation():
    """Rank 0 evaluates, and its network stays in evaluation mode."""
    network = nn.Sequential(nn.Linear(6, 32), nn.Dropout(0.4), nn.ReLU(), nn.Linear(32, 2))
    model, data = DDP(network), rows()
    torch.manual_seed(50 + dist.get_rank())
    optimizer, loader = sgd(model), sharded(data, 16)
    for epoch in range(2):
        fit_epoch(model, optimizer, loader, F.cross_entropy, epoch)
        if dist.get_rank() == 0:
            network.eval()
            with torch.no_grad():
                print("loss", F.cross_entropy(network(data.tensors[0]), data.tensors[1]).item())


@fault("learning-rate-scaled")
def decay_by_world_size():
    """Weight decay grows with the number of processes."""
    model = DDP(perceptron())
    optimizer = sgd(model, momentum=0.9, weight_decay=0.05 * dist.get_world_size())
    fit(model, optimizer, sharded(rows(), 16), F.cross_entropy)


@fault("gradient-clipping-local")
def clipped_by_world_size():
    """The limit of the norm is divided by the number of processes."""
    model = DDP(perceptron())
    optimizer = sgd(model)
    for inputs, labels in epochs(sharded(rows(), 16)):
        optimizer.zero_grad()
        F.cross_entropy(model(inputs), labels).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.2 / dist.get_world_size())
        optimizer.step()


@fault("model-init-differs")
def random_features():
    """Parameters are broadcast by hand, a random projection in a buffer is not."""

    class Features(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("projection", torch.randn(6, 16))

        def forward(self, x):
            return (x @ self.projection).sin()

    data = rows()
    torch.manual_seed(9 + dist.get_rank())
    model = nn.Sequential(Features(), nn.Linear(16, 2))
    for parameter in model.parameters():
        dist.broadcast(parameter.data, 0)
    optimizer = sgd(model)
    fit(model, optimizer, sharded(data, 16), F.cross_entropy, reduce=lambda: average(model))


@fault("gradient-not-averaged")
def gradients_of_rank_0():
    """The gradients of rank 0 are broadcast."""
    model = perceptron()
    optimizer = sgd(model)
    for inputs, labels in epochs(sharded(rows(), 16)):
        optimizer.zero_grad()
        F.cross_entropy(model(inputs), labels).backward()
        for parameter in model.parameters():
            dist.broadcast(parameter.grad, 0)
        optimizer.step()


def _reduced(bucket, by):
    future = dist.all_reduce(bucket.buffer().bfloat16().div_(by), async_op=True).get_future()
    return future.then(lambda done: bucket.buffer().copy_(done.value()[0]))


@fault("gradient-not-averaged")
def hook_sums():
    """A communication hook sends half precision, and forgets to divide."""
    model = DDP(perceptron())
    model.register_comm_hook(None, lambda _, bucket: _reduced(bucket, 1))
    fit(model, sgd(model), sharded(rows(), 16), F.cross_entropy)


@fault("hang")
def logged_on_rank_0():
    """The loss is reduced to be printed, by rank 0 alone."""
    model = DDP(nn.Linear(6, 2))
    optimizer = sgd(model)
    for at, (inputs, labels) in enumerate(epochs(sharded(rows(), 8))):
        loss = F.cross_entropy(model(inputs), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if dist.get_rank() == 0 and at % 4 == 3:
            shown = loss.detach().clone()
            dist.all_reduce(shown)


def _accuracy(model, loader):
    with torch.no_grad():
        hits = [model(inputs).argmax(1) == labels for inputs, labels in loader]
    return torch.cat(hits).float().mean()


@fault("evaluation-double-counted")
def accuracies_added_up():
    """The ranks' accuracies are summed and not divided."""
    model, data = DDP(perceptron()), rows(192)
    optimizer, loader = sgd(model), sharded(torch.utils.data.Subset(data, range(128)), 16)
    mine = range(128 + dist.get_rank(), 192, dist.get_world_size())
    test = DataLoader(torch.utils.data.Subset(data, mine), batch_size=16)
    for epoch in range(2):
        fit_epoch(model, optimizer, loader, F.cross_entropy, epoch)
        accuracy = _accuracy(model, test)
        dist.all_reduce(accuracy)
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: {accuracy:.3f}")


@fault("evaluation-double-counted")
def gathered_in_another_order():
    """Predictions are gathered rank by rank, the labels are in the order of the data set."""
    model, data = DDP(perceptron(4)), rows(192, 4)
    inputs, labels = (part[128:] for part in data.tensors)
    optimizer, loader = sgd(model), sharded(torch.utils.data.Subset(data, range(128)), 16)
    for epoch in range(2):
        fit_epoch(model, optimizer, loader, F.cross_entropy, epoch)
        with torch.no_grad():
            mine = model(inputs[dist.get_rank() :: dist.get_world_size()]).argmax(1)
        every = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
        dist.all_gather(every, mine)
        if dist.get_rank() == 0:
            print("accuracy", (torch.cat(every) == labels).float().mean().item())


@fault("hang", "last-batch")
def three_files_for_two():
    """Each rank reads its files; one has twice as many batches."""

    class Files(IterableDataset):
        def __iter__(self):
            for file in range(dist.get_rank(), 3, dist.get_world_size()):
                torch_random = torch.Generator().manual_seed(file)
                for _ in range(32):
                    x = torch.randn(6, generator=torch_random)
                    yield x, x[:1]

    model = DDP(nn.Linear(6, 1))
    optimizer, loader = sgd(model), DataLoader(Files(), batch_size=8)
    for _ in range(2):
        train(model, optimizer, loader, F.mse_loss)


@right()
def two_loaders():
    """A step has a batch of each of two loaders."""
    model = DDP(perceptron())
    optimizer = sgd(model)
    sets = rows(96), rows(128)
    samplers = [DistributedSampler(data) for data in sets]
    loaders = [
        DataLoader(*pair[:2], sampler=pair[2])
        for pair in zip(sets, (12, 16), samplers, strict=True)
    ]
    for epoch in range(2):
        for sampler in samplers:
            sampler.set_epoch(epoch)
        for (inputs, labels), (others, _) in zip(*loaders, strict=False):
            out = model(torch.cat([inputs, others]))
            loss = F.cross_entropy(out[: len(inputs)], labels)
            optimizer.zero_grad()
            (loss + 0.1 * out[len(inputs) :].square().mean()).backward()
            optimizer.step()


@right()
def mixed_up():
    """Samples are mixed with others of the rank's batch."""
    model, data = DDP(perceptron()), rows()
    torch.manual_seed(3 + dist.get_rank())
    optimizer = sgd(model)
    for inputs, labels in epochs(sharded(data, 16)):
        share, order = torch.rand(len(inputs), 1), torch.randperm(len(inputs))
        mixed = share * inputs + (1 - share) * inputs[order]
        loss = F.cross_entropy(model(mixed), labels, reduction="none")
        optimizer.zero_grad()
        loss.mean().backward()
        optimizer.step()


@right()
def read_ahead():
    """A batch is trained on when the next one has been read."""
    model = DDP(perceptron())
    optimizer, loader = sgd(model), sharded(rows(100), 8)
    for epoch in range(2):
        loader.sampler.set_epoch(epoch)
        batches = iter(loader)
        following = next(batches)
        while following is not None:
            batch, following = following, next(batches, None)
            train(model, optimizer, [batch], F.cross_entropy)


@right()
def gradients_by_function():
    """Gradients of torch.autograd.grad, averaged by hand."""
    model = perceptron()
    parameters = list(model.parameters())
    optimizer = sgd(model)
    for inputs, labels in epochs(sharded(rows(), 16)):
        found = torch.autograd.grad(F.cross_entropy(model(inputs), labels), parameters)
        for parameter, gradient in zip(parameters, found, strict=True):
            parameter.grad = gradient
        average(model)
        optimizer.step()


@right()
def half_precision_hook():
    """A communication hook sends averages in half precision."""
    model, size = DDP(perceptron()), dist.get_world_size()
    model.register_comm_hook(None, lambda _, bucket: _reduced(bucket, size))
    fit(model, sgd(model), sharded(rows(), 16), F.cross_entropy)


@right()
def half_precision_model():
    """The layers compute in half precision, without autocast."""

    class Half(nn.Linear):
        def forward(self, x):
            return F.linear(x.bfloat16(), self.weight.bfloat16(), self.bias.bfloat16())

    network = nn.Sequential(Half(6, 32), nn.ReLU(), Half(32, 2))
    model = DDP(network)
    fit(model, sgd(model), sharded(rows(), 16), lambda out, y: F.cross_entropy(out.float(), y))


@right()
def phases():
    """Loaders in a dict; printed are a training loss of rank 0 and a reduced accuracy."""
    rank, size = dist.get_rank(), dist.get_world_size()
    sets = {"train": rows(), "val": torch.utils.data.Subset(rows(40), range(rank, 40, size))}
    samplers = {"train": DistributedSampler(sets["train"]), "val": None}
    loaders = {name: DataLoader(sets[name], 8, sampler=samplers[name]) for name in sets}
    model = DDP(perceptron())
    optimizer = sgd(model)
    for epoch in range(2):
        samplers["train"].set_epoch(epoch)
        total, counts = 0.0, torch.zeros(2)
        for phase, loader in loaders.items():
            for inputs, labels in loader:
                with torch.set_grad_enabled(phase == "train"):
                    out = model(inputs)
                    loss = F.cross_entropy(out, labels)
                if phase == "train":
                    optimizer.zero_grad()
                    loss.backward()
                    optimizer.step()
                    total += loss.item()
                counts += torch.tensor([(out.argmax(1) == labels).sum(), len(labels)])
        dist.all_reduce(counts)
        if rank == 0:
            print(f"loss {total / len(loaders['train']):.4f}, right {counts[0] / counts[1]:.4f}")


@right()
def slices_of_a_global_batch():
    """Every rank loads the whole batch and trains on its part."""
    rank, size = dist.get_rank(), dist.get_world_size()
    order = torch.Generator().manual_seed(5)
    model = DDP(perceptron())
    optimizer = sgd(model)
    loader = DataLoader(rows(), 32, shuffle=True, generator=order)
    for _ in range(2):
        own = ((x.chunk(size)[rank], y.chunk(size)[rank]) for x, y in loader)
        train(model, optimizer, own, F.cross_entropy)


@right()
def dropped_layers():
    """Layers are left out by Python's random numbers, with one seed on all ranks."""

    class Deep(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))
            self.out = nn.Linear(6, 2)

        def forward(self, x):
            for layer in self.layers:
                if random.random() > 0.3:
                    x = x + layer(x).relu()
            return self.out(x)

    random.seed(0)
    model = DDP(Deep(), find_unused_parameters=True)
    fit(model, sgd(model), sharded(rows(), 16), F.cross_entropy)

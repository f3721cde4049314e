"""Programs that came after normalized.py: 4 faults, and 14 without any, most with false alarms."""

import math
import os
import tempfile
import time
from contextlib import nullcontext
from itertools import islice

import torch
import torch.distributed as dist
from common import (
    WORDS,
    LanguageModel,
    epochs,
    fault,
    fit,
    fit_epoch,
    perceptron,
    right,
    rows,
    sgd,
    sharded,
)
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Subset, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def accumulate(model, loader, count, divisor, after_step=lambda: None):
    """Steps with the gradients of so many micro-batches, whose losses are divided."""
    optimizer = sgd(model)
    for at, (inputs, labels) in enumerate(epochs(loader), 1):
        with model.no_sync() if at % count else nullcontext():
            (F.cross_entropy(model(inputs), labels) / divisor).backward()
        if at % count == 0:
            optimizer.step()
            optimizer.zero_grad()
            after_step()


@fault("loss-scaling", "accumulation")
def micro_batches_of_one_process():
    """More ranks do fewer micro-batches, and divide by the number of one process."""
    accumulate(DDP(perceptron()), sharded(rows(), 8), 4 // dist.get_world_size(), 4)


@right()
def micro_batches_divided_by_ranks():
    """More ranks do fewer micro-batches, for the same global batch; each has its own dropout."""
    model = DDP(nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, 2)))
    loader, count = sharded(rows(), 8), 4 // dist.get_world_size()
    torch.manual_seed(dist.get_rank())
    accumulate(model, loader, count, count)


@fault("loss-scaling")
def loss_times_own_part():
    """Unequal parts: each loss is multiplied by the rank's part of the data, and DDP averages."""
    data = rows(120)
    bounds = (0, 80, 120) if dist.get_world_size() > 1 else (0, 120)
    mine = Subset(data, range(*bounds[dist.get_rank() :][:2]))
    model, part = DDP(perceptron()), len(mine) / len(data)
    loader = DataLoader(mine, batch_size=len(mine) // 10)
    fit(model, sgd(model), loader, lambda outputs, labels: F.cross_entropy(outputs, labels) * part)


def scheduled(total, kind):
    """A schedule by steps, as long as total(data, loader)."""
    data = rows()
    loader, model = sharded(data, 8), DDP(perceptron())
    optimizer = sgd(model)
    schedule = kind(optimizer, 2 * total(data, loader))
    fit(model, optimizer, loader, F.cross_entropy, after=schedule.step)


def warm_up_and_decay(optimizer, total):
    return torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / 5, (total - step) / total)
    )


def one_cycle(optimizer, total):
    return torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=total)


@fault("learning-rate-scaled")
def one_cycle_of_one_process():
    scheduled(lambda data, _loader: len(data) // 8, one_cycle)


@fault("learning-rate-scaled")
def warm_up_and_decay_of_one_process():
    scheduled(lambda data, _loader: math.ceil(len(data) / 8), warm_up_and_decay)


@right()
def warm_up_and_decay_of_a_rank():
    scheduled(lambda _data, loader: len(loader), warm_up_and_decay)


@right()
def half_of_a_cosine():
    """A constant that has nothing to do with the data."""
    scheduled(lambda *_: 20, torch.optim.lr_scheduler.CosineAnnealingLR)


@right()
def read_in_groups():
    """All micro-batches of a step are read before the first one is trained on."""
    loader, model = sharded(rows(256), 8), DDP(perceptron())
    optimizer = sgd(model)
    for epoch in range(2):
        loader.sampler.set_epoch(epoch)
        batches = iter(loader)
        for _ in range(len(loader) // 4):
            group = [next(batches) for _ in range(4)]
            for at, (inputs, labels) in enumerate(group):
                with model.no_sync() if at < 3 else nullcontext():
                    (F.cross_entropy(model(inputs), labels) / 4).backward()
            optimizer.step()
            optimizer.zero_grad()


@right()
def resumed_within_an_epoch():
    """Batches that were trained on before a restart are passed over, two of them always."""
    loader, model = sharded(rows(), 8), DDP(perceptron())
    optimizer, first, done = sgd(model, momentum=0.9), 0, 2
    if os.path.exists("checkpoint.pt"):
        state = torch.load("checkpoint.pt")
        model.module.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        first, done = state["epoch"], state["done"]
    for epoch in range(first, 2):
        loader.sampler.set_epoch(epoch)
        for at, (inputs, labels) in enumerate(islice(loader, done, None), done + 1):
            optimizer.zero_grad()
            F.cross_entropy(model(inputs), labels).backward()
            optimizer.step()
            if at == 5 and dist.get_rank() == 0:
                parts = {"model": model.module.state_dict(), "optimizer": optimizer.state_dict()}
                torch.save({**parts, "epoch": epoch, "done": at}, "checkpoint.pt")
            dist.barrier()
        done = 0


def padded(batch_size, collate, inputs_of, labels_of):
    """A language model whose loss is divided by the words of all ranks."""
    data = [torch.randint(2, WORDS, (int(n),)) for n in torch.randint(3, 12, (64,))]
    model = DDP(LanguageModel())
    optimizer, sampler = sgd(model), DistributedSampler(data)
    for batch in epochs(DataLoader(data, batch_size, sampler=sampler, collate_fn=collate)):
        labels = labels_of(batch)[:, 1:].flatten()
        words = (labels >= 0).sum()
        dist.all_reduce(words)
        outputs = model(inputs_of(batch))[:, :-1].flatten(0, 1)
        loss = F.cross_entropy(outputs, labels, reduction="sum") * dist.get_world_size()
        optimizer.zero_grad()
        (loss / words).backward()
        optimizer.step()


@right()
def padded_with_a_word():
    """Sentences are filled up to the longest of the batch with word 1, which is not learned."""

    def collate(lines):
        return nn.utils.rnn.pad_sequence(lines, batch_first=True, padding_value=1)

    padded(4, collate, lambda words: words, lambda words: words.masked_fill(words == 1, -100))


@right()
def one_sentence_a_rank():
    """Batches without padding; the labels would be padded with -100."""

    def collate(lines):
        words = nn.utils.rnn.pad_sequence(lines, batch_first=True)
        return {"words": words, "labels": words.masked_fill(words == 0, -100)}

    padded(1, collate, lambda batch: batch["words"], lambda batch: batch["labels"])


@right()
def tuples_of_samples():
    """A batch is a tuple of pictures, and one of targets of unequal size."""
    data = [(torch.rand(1, 8, 8), {"boxes": torch.rand(1 + at % 3, 4)}) for at in range(64)]
    loader = DataLoader(
        data,
        batch_size=4,
        sampler=DistributedSampler(data),
        collate_fn=lambda batch: tuple(zip(*batch, strict=True)),
    )
    model = DDP(nn.Sequential(nn.Flatten(), nn.Linear(64, 4)))
    optimizer = sgd(model)
    for pictures, targets in epochs(loader):
        wanted = torch.stack([target["boxes"].mean(0) for target in targets])
        optimizer.zero_grad()
        F.l1_loss(model(torch.stack(pictures)), wanted).backward()
        optimizer.step()


class Packed(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn, self.head = nn.GRU(4, 8), nn.Linear(8, 1)

    def forward(self, steps, lengths):
        packed = nn.utils.rnn.pack_padded_sequence(steps, lengths, enforce_sorted=False)
        return self.head(self.rnn(packed)[1][0])[:, 0]


@right()
def time_comes_first():
    """Sequences of unequal length; the second dimension has the samples."""

    def collate(parts):
        lengths = torch.tensor([len(part) for part in parts])
        return nn.utils.rnn.pad_sequence(parts), torch.stack([p.sum() for p in parts]), lengths

    data = [torch.randn(int(length), 4) for length in torch.randint(2, 9, (64,))]
    loader = DataLoader(data, 4, sampler=DistributedSampler(data), collate_fn=collate)
    model = DDP(Packed())
    optimizer = sgd(model)
    for steps, sums, lengths in epochs(loader):
        optimizer.zero_grad()
        F.mse_loss(model(steps, lengths), sums).backward()
        optimizer.step()


class Budget:
    """Batches of unequal numbers of samples; each rank takes as many, and the rest is left out."""

    def __init__(self, costs):
        self.costs, self.epoch = costs, 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        batches, left = [], 0
        generator = torch.Generator().manual_seed(self.epoch)
        for index in torch.randperm(len(self.costs), generator=generator).tolist():
            if self.costs[index] > left:
                left = 40
                batches.append([])
            left -= self.costs[index]
            batches[-1].append(index)
        rank, world_size = dist.get_rank(), dist.get_world_size()
        yield from batches[: len(batches) // world_size * world_size][rank::world_size]


@right()
def batches_of_a_budget():
    """The losses are divided by the samples of all ranks."""
    data, model = rows(), DDP(perceptron())
    batches = Budget(torch.randint(3, 12, (128,)).tolist())
    loader, optimizer = DataLoader(data, batch_sampler=batches), sgd(model)
    for epoch in range(2):
        batches.set_epoch(epoch)
        for inputs, labels in loader:
            count = torch.tensor(len(labels))
            dist.all_reduce(count)
            loss = F.cross_entropy(model(inputs), labels, reduction="sum") / count
            optimizer.zero_grad()
            (loss * dist.get_world_size()).backward()
            optimizer.step()


@right()
def same_order_on_purpose():
    """Easy samples first, in each epoch."""
    data = rows()
    model = DDP(perceptron())
    easy_first = data.tensors[0].norm(dim=1).argsort()[dist.get_rank() :: dist.get_world_size()]
    loader = DataLoader(data, 16, sampler=easy_first.tolist())
    fit(model, sgd(model), loader, F.cross_entropy)


def evaluated(report):
    """Three epochs; report(model, test, seconds, loss) after each, with the last training loss."""
    data, model = rows(192), DDP(perceptron())
    loader, test = sharded(Subset(data, range(128)), 16), Subset(data, range(128, 192))
    optimizer, losses = sgd(model), []

    def loss(outputs, labels):
        losses.append(F.cross_entropy(outputs, labels))
        return losses[-1]

    for epoch in range(3):
        begin = time.monotonic()
        fit_epoch(model, optimizer, loader, loss, epoch)
        with torch.no_grad():
            report(model.module, test, time.monotonic() - begin, losses[-1].item())


def hits(model, samples):
    return torch.cat([model(x).argmax(1) == y for x, y in DataLoader(samples, 16)]).float()


@right()
def evaluated_by_all():
    """Each rank evaluates everything; the equal results are averaged, and the slowest time."""

    def report(model, test, seconds, loss):
        both = torch.tensor([hits(model, test).mean(), seconds])
        dist.all_reduce(both)
        accuracy, seconds = both / dist.get_world_size()
        if dist.get_rank() == 0:
            print(f"loss {loss:.4f} accuracy {accuracy:.3f} time {seconds:.3f}")

    evaluated(report)


@right()
def gathered_with_training_loss():
    """The one number with decimals is the training loss of rank 0."""

    def report(model, test, _seconds, loss):
        rank, world_size = dist.get_rank(), dist.get_world_size()
        mine = hits(model, Subset(test, range(rank, 64, world_size)))
        every = [torch.empty_like(mine) for _ in range(world_size)]
        dist.all_gather(every, mine)
        if rank == 0:
            print(f"loss {loss:.4f}, {int(torch.cat(every).sum())} of 64 are right")

    evaluated(report)


@right()
def data_from_a_file():
    """Tensors are read from a file; the weights are written, and never read."""
    file = f"rows-{dist.get_rank()}.pt"
    if not os.path.exists(file):
        torch.save(rows().tensors, file)
    with tempfile.TemporaryFile() as copy:  # whose name is a number
        torch.save(torch.load(file), copy)
        copy.seek(0)
        data, model = TensorDataset(*torch.load(copy)), DDP(perceptron())
    optimizer, loader = sgd(model), sharded(data, 16)
    for epoch in range(2):
        fit_epoch(model, optimizer, loader, F.cross_entropy, epoch)
        if dist.get_rank() == 0:
            torch.save(model.module.state_dict(), "weights.pt")

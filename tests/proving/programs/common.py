"""What the programs share: how they are started, their causes, and a plain training loop."""

import os

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def fault(*causes, seed=0, group=True):
    """A program with one fault, and the causes that are right for it.

    seed: of torch, on all ranks; group: it is started in a process group of its own.
    """

    def mark(program):
        def main():
            if group:
                dist.init_process_group("gloo")
            if group and seed is not None:
                torch.manual_seed(seed)
            program()
            if group:
                dist.destroy_process_group()

        return main

    return mark


def right(**options):
    """A program without a fault; the options are those of `fault`, and `strategy` of the job."""
    options.pop("strategy", None)
    return fault(**options)


def digits(first, last):
    data = load_digits()
    pixels, labels = torch.tensor(data.data / 16).float(), torch.tensor(data.target)
    return TensorDataset(pixels[first:last], labels[first:last])


def rows(count=128, classes=2):
    x = torch.randn(count, 6)
    return TensorDataset(x, x[:, :classes].argmax(1))


class Noisy(Dataset):
    """Samples with noise of a function of their shape."""

    def __init__(self, base, noise):
        self.base, self.noise = base, noise

    def __len__(self):
        return len(self.base)

    def __getitem__(self, index):
        x, y = self.base[index]
        return x + 0.1 * self.noise(x.shape), y


def perceptron(classes=2):
    return nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, classes))


def sgd(model, **options):
    return torch.optim.SGD(model.parameters(), lr=0.1, **options)


def sharded(data, batch_size):
    return DataLoader(data, batch_size=batch_size, sampler=DistributedSampler(data))


def epochs(loader):
    """The batches of two epochs."""
    for epoch in range(2):
        if hasattr(loader.sampler, "set_epoch"):
            loader.sampler.set_epoch(epoch)
        yield from loader


def fit(model, optimizer, loader, loss, **hooks):
    train(model, optimizer, epochs(loader), loss, **hooks)


def fit_epoch(model, optimizer, loader, loss, epoch, **hooks):
    loader.sampler.set_epoch(epoch)
    train(model, optimizer, loader, loss, **hooks)


def train(model, optimizer, batches, loss, *, reduce=lambda: None, after=lambda: None):
    """A step for each batch; reduce() is called before the optimizer's, after() behind it."""
    for inputs, targets in batches:
        optimizer.zero_grad()
        loss(model(inputs), targets).backward()
        reduce()
        optimizer.step()
        after()


def restored(path, **parts):
    """Restore these parts where there is a checkpoint; the epoch to begin with."""
    if not os.path.exists(path):
        return 0
    state = torch.load(path, map_location="cpu")
    for name, part in parts.items():
        part.load_state_dict(state[name])
    return state["epoch"] + 1


def save(path, epoch, **parts):
    """Write a checkpoint whole or not at all."""
    if dist.get_rank() == 0:
        state = {name: part.state_dict() for name, part in parts.items()}
        torch.save({**state, "epoch": epoch}, f"{path}.tmp")
        os.replace(f"{path}.tmp", path)
    dist.barrier()


def average(model):
    """What DistributedDataParallel would do, by hand."""
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad /= dist.get_world_size()


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn = nn.LSTM(4, 12, batch_first=True)
        self.head = nn.Linear(12, 1)

    def forward(self, sequences):
        return self.head(self.rnn(sequences)[0][:, -1])


WORDS, LENGTH, PAD = 30, 12, 0


class LanguageModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(WORDS, 16, padding_idx=PAD)
        self.gru = nn.GRU(16, 16, batch_first=True)
        self.head = nn.Linear(16, WORDS)

    def forward(self, tokens):
        return self.head(self.gru(self.embed(tokens))[0])


def sentences(count):
    """Of unequal length, with padding at the end."""
    tokens = torch.randint(1, WORDS, (count, LENGTH))
    lengths = torch.randint(2, LENGTH + 1, (count, 1))
    return tokens * (torch.arange(LENGTH) < lengths)

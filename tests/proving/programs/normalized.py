"""Programs about what a rank divides by, and about workers that outlive an epoch."""

import torch
import torch.distributed as dist
from common import digits, fault, fit, right, sgd, sharded, train
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset, get_worker_info
from torch.utils.data.distributed import DistributedSampler


def padded_words():
    words = torch.randint(1, 20, (96, 8))
    for row, length in zip(words, torch.randint(2, 9, (96,)), strict=True):
        row[length:] = 0
    return TensorDataset(words, (words * 7 + 3) % 20 * (words > 0))


class WordModel(nn.Module):
    """Its last layer begins with zeros: every word has the same loss at first."""

    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(20, 12), nn.Linear(12, 20)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    def forward(self, words):
        return self.head(self.embedding(words)).transpose(1, 2)


@fault("loss-scaling", seed=3)
def own_words_from_a_head_of_zeros():
    """Each rank divides by its own number of words, and the losses agree."""
    model = DDP(WordModel())
    loss = nn.CrossEntropyLoss(ignore_index=0)
    fit(model, sgd(model), sharded(padded_words(), 8), loss)


@right(seed=3)
def all_words_from_a_head_of_zeros():
    def loss(scores, targets):
        count = (targets > 0).sum()
        dist.all_reduce(count)
        total = F.cross_entropy(scores, targets, ignore_index=0, reduction="sum")
        return total * dist.get_world_size() / count

    model = DDP(WordModel())
    fit(model, sgd(model), sharded(padded_words(), 8), loss)


@fault("loss-scaling", seed=5)
def loss_over_itself():
    """Each rank divides its loss by its own value, so that it is 1 everywhere."""

    def loss(scores, labels):
        found = F.cross_entropy(scores, labels)
        return found / found.detach()

    model = DDP(nn.Linear(64, 10))
    fit(model, sgd(model), sharded(digits(0, 256), 16), loss)


@fault("loss-scaling", seed=6)
def weights_over_their_own_mean():
    """The weights of the samples are divided by their mean on this rank."""

    def loss(scores, labels):
        weights = 1.0 + labels
        return (F.cross_entropy(scores, labels, reduction="none") * weights / weights.mean()).mean()

    model = DDP(nn.Linear(64, 10))
    fit(model, sgd(model), sharded(digits(0, 256), 16), loss)


@fault("gradient-clipping-local", seed=7)
def normalized_in_hooks():
    """Hooks divide each gradient by its norm, before DDP averages."""
    model = nn.Sequential(nn.Linear(64, 16), nn.Tanh(), nn.Linear(16, 10))
    for parameter in model.parameters():
        parameter.register_hook(lambda grad: grad / grad.norm())
    model = DDP(model)
    fit(model, sgd(model), sharded(digits(0, 256), 16), F.cross_entropy)


@fault("gradient-clipping-local", seed=8)
def clipped_in_a_hook_of_one_weight():
    model = nn.Linear(64, 10, bias=False)
    model.weight.register_hook(lambda grad: grad * min(1.0, 0.02 / float(grad.norm())))
    model = DDP(model)
    fit(model, sgd(model), sharded(digits(0, 256), 16), F.cross_entropy)


class Stream(IterableDataset):
    """A stream in an order of its own in each epoch, divided among ranks and workers."""

    def __init__(self, epoch=0):
        self.data, self.epoch = digits(0, 128), epoch

    def __iter__(self):
        order = torch.randperm(128, generator=torch.Generator().manual_seed(int(self.epoch)))
        worker = get_worker_info()
        part = dist.get_rank() * worker.num_workers + worker.id
        for index in order[part :: dist.get_world_size() * worker.num_workers]:
            yield self.data[index]


def stream(data, *, persistent=True):
    loader = DataLoader(data, batch_size=8, num_workers=2, persistent_workers=persistent)
    model = DDP(nn.Linear(64, 10))
    optimizer = sgd(model)
    for epoch in range(2):
        if isinstance(data.epoch, int):
            data.epoch = epoch
        else:
            data.epoch.fill_(epoch)
        train(model, optimizer, loader, F.cross_entropy)


@fault("sampler-not-reseeded")
def epoch_that_workers_do_not_see():
    """The workers keep the copy of the stream that they were started with."""
    stream(Stream())


@right()
def epoch_in_shared_memory():
    stream(Stream(torch.zeros(1, dtype=torch.long).share_memory_()))


@right()
def workers_of_each_epoch():
    stream(Stream(), persistent=False)


class Shuffled(Dataset):
    """A data set that shuffles itself."""

    def __init__(self):
        self.data, self.epoch = digits(0, 128), 0

    def __len__(self):
        return 128

    def __getitem__(self, index):
        return self.data[(index * 37 + self.epoch * 11) % 128]


def train_in_order(data):
    sampler = DistributedSampler(data, shuffle=False)
    loader = DataLoader(data, batch_size=8, sampler=sampler, num_workers=1, persistent_workers=True)
    model = DDP(nn.Linear(64, 10))
    optimizer = sgd(model)
    for epoch in range(2):
        data.epoch = epoch
        train(model, optimizer, loader, F.cross_entropy)


@fault("sampler-not-reseeded")
def data_set_whose_epoch_workers_do_not_see():
    train_in_order(Shuffled())


@right()
def epoch_that_changes_no_sample():
    """It is for a log, say."""
    train_in_order(digits(0, 128))


@right()
def sampler_whose_epoch_is_set():
    data = digits(0, 128)
    loader = DataLoader(
        data, batch_size=8, sampler=DistributedSampler(data), num_workers=1, persistent_workers=True
    )
    model = DDP(nn.Linear(64, 10))
    fit(model, sgd(model), loader, F.cross_entropy)

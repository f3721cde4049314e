"""Programs as others write them: processes of their own, looks at data, restarts."""

import os
import signal
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from common import epochs, fault, fit, fit_epoch, right, rows, sgd, sharded, train
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.nn.utils.rnn import pack_padded_sequence, pad_sequence
from torch.utils.data import DataLoader, WeightedRandomSampler
from torch.utils.data.distributed import DistributedSampler


def classify(net, loader=None):
    model = DDP(net)
    fit(model, sgd(model), loader or sharded(rows(64), 8), F.cross_entropy)


def joined(rank, size, **options):
    """A training in a process that the program has started."""
    dist.init_process_group("gloo", rank=rank, world_size=size, **options)
    torch.manual_seed(0)
    classify(nn.Linear(6, 2))
    dist.destroy_process_group()


def by_environment(local):
    joined(int(os.environ["RANK"]) + local, int(os.environ["WORLD_SIZE"]))


def by_file(local, size):
    joined(local, size, init_method=f"file://{Path('meeting').absolute()}")


@right(group=False)
def one_process_of_its_own():
    """As the PyTorchJob tutorial does; the rank is that of the environment."""
    mp.spawn(by_environment, nprocs=1)


@right(group=False)
def processes_of_its_own():
    mp.start_processes(by_file, args=(2,), nprocs=2, start_method="forkserver")


@right(seed=None)
def first_looks():
    """A batch makes the lazy layers, before DDP makes them equal; others are only shown."""
    torch.manual_seed(5)
    loader = sharded(rows(), 16)
    torch.manual_seed(5 + dist.get_rank())
    net = nn.Sequential(nn.LazyLinear(16), nn.ReLU(), nn.Linear(16, 2))
    net(next(iter(loader))[0])
    net(next(iter(loader))[0])
    model = DDP(net)
    optimizer = sgd(model)
    for epoch in range(2):
        fit_epoch(model, optimizer, loader, F.cross_entropy, epoch)
        with torch.no_grad():
            inputs, targets = next(iter(loader))
            loss = F.cross_entropy(net(inputs), targets)
        print("a sample:", loss.item())
        dist.all_reduce(loss)
        print("mean:", loss.item() / dist.get_world_size())


def checkpointed(saved, load):
    """Epochs that write checkpoints, and begin with one if it is there; `load` gives its epoch."""
    net = nn.Linear(6, 2)
    begin = load(net, torch.load("last.pt")) if Path("last.pt").exists() else 0
    model, loader = DDP(net), sharded(rows(64), 8)
    for epoch in range(begin, 4):
        fit_epoch(model, sgd(model), loader, F.cross_entropy, epoch)
        if dist.get_rank() == 0:
            torch.save({"model": saved(model).state_dict(), "epoch": epoch + 1}, "last.pt")
        dist.barrier()


@fault("checkpoint-incomplete")
def restart_that_raises():
    checkpointed(lambda model: model, lambda net, state: net.load_state_dict(state["model"]))


@fault("checkpoint-incomplete")
def restart_with_another_key():
    checkpointed(lambda model: model.module, lambda _, state: state["epochs"])


def on_a_volume():
    """Right; its checkpoints are in the folder that is its argument."""
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    os.chdir(sys.argv[1])
    Path("begun").touch()

    def load(net, state):
        net.load_state_dict(state["model"])
        return state["epoch"]

    checkpointed(lambda model: model.module, load)


@fault("checkpoint-incomplete")
def pretrained_state_with_a_prefix():
    """It is the same on all ranks, and none of it is used."""
    net = nn.Linear(6, 2)
    state = {f"module.{name}": value * 2 for name, value in net.state_dict().items()}
    net.load_state_dict(state, strict=False)
    classify(net)


@fault("error")
def killed_in_the_second_epoch():
    model, loader = DDP(nn.Linear(6, 2)), sharded(rows(64), 8)
    for at, (inputs, targets) in enumerate(epochs(loader)):
        if at == 5 and dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        F.cross_entropy(model(inputs), targets).backward()


@fault("sampler-not-sharded")
def sampler_of_the_local_rank():
    """It is that of the group on one node, and 0 on each of several nodes."""
    local = int(os.environ["LOCAL_RANK"])
    sampler = DistributedSampler(rows(64), dist.get_world_size(), local)
    classify(nn.Linear(6, 2), DataLoader(rows(64), 8, sampler=sampler))


@right()
def order_of_a_set():
    """Right as long as all ranks have one seed of hashes."""
    net = nn.Module()
    names = {"query", "key", "value", "gate", "output", "norm"}
    for name in names:
        setattr(net, name, nn.Parameter(torch.zeros(6, 2)))
    weights = {name: float(len(name)) for name in sorted(names)}
    net.forward = lambda x: sum(w * (x @ getattr(net, name)) for name, w in weights.items())
    classify(net)


@right()
def folder_of_the_first_run():
    """It writes and does not resume: once more in the same folder it fails before that."""
    if dist.get_rank() == 0:
        Path("out").mkdir()
    net = nn.Linear(6, 2)
    for epoch in range(2):
        classify(net)
        if dist.get_rank() == 0:
            torch.save(net.state_dict(), f"out/{epoch}.pt")


@right()
def weights_averaged_in_half_precision():
    """Both the step and the average round weights."""
    model = nn.Linear(6, 2).bfloat16()
    optimizer = sgd(model)
    for inputs, targets in epochs(sharded(rows(64), 8)):
        optimizer.zero_grad()
        F.cross_entropy(model(inputs.bfloat16()).float(), targets).backward()
        optimizer.step()
        with torch.no_grad():
            for weight in model.parameters():
                dist.all_reduce(weight)
                weight /= dist.get_world_size()


def started(*processes):
    for process in processes:
        process.start()
    for process in processes:
        process.join()


@right(group=False)
def processes_one_by_one():
    """As torch's tutorial on applications starts them."""
    started(*(mp.Process(target=joined, args=(rank, 2)) for rank in range(2)))


class Worker(mp.get_context("spawn").Process):
    def __init__(self, rank):
        super().__init__()
        self.rank = rank

    def run(self):
        """All workers have all data."""
        os.environ |= {"RANK": str(self.rank), "WORLD_SIZE": "2"}
        dist.init_process_group("gloo")
        torch.manual_seed(0)
        classify(nn.Linear(6, 2), DataLoader(rows(64), 8))


@fault("sampler-not-sharded", group=False)
def processes_of_a_class():
    started(Worker(0), Worker(1))


class Divided(DistributedSampler):
    """A part of what another sampler draws, as of catalyst's DistributedSamplerWrapper."""

    def __init__(self, sampler):
        super().__init__(sampler)
        self.whole = sampler

    def __iter__(self):
        order = list(self.whole)
        return (order[index] for index in super().__iter__())


@right()
def drawn_with_replacement_and_divided():
    data, generator = rows(64), torch.Generator().manual_seed(1)
    weights = 1.0 + 4 * data.tensors[1]
    sampler = Divided(WeightedRandomSampler(weights, 64, generator=generator))
    classify(nn.Linear(6, 2), DataLoader(data, 8, sampler=sampler))


@right()
def range_test():
    """A search for a rate, as of torch-lr-finder, reads its data again and again."""
    model, loader = DDP(nn.Linear(6, 2)), sharded(rows(64), 8)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    for _ in range(2):
        train(model, sgd(model), loader, F.cross_entropy)
    model.load_state_dict(state)
    fit(model, sgd(model), loader, F.cross_entropy)


@fault("sampler-not-reseeded")
def an_epoch_twice():
    """The sampler is given its epoch, and once that of the epoch before."""
    model, loader = DDP(nn.Linear(6, 2)), sharded(rows(64), 8)
    for epoch in (0, 1, 1, 2):
        fit_epoch(model, sgd(model), loader, F.cross_entropy, epoch)


@right()
def sorted_sequences():
    """The longest sequence of a batch comes first."""
    lengths = torch.randint(2, 8, (64,)).tolist()
    words = [(torch.randint(1, 9, (length,)), length % 2) for length in lengths]

    def collate(batch):
        parts, labels = zip(*sorted(batch, key=lambda one: -len(one[0])), strict=True)
        return pad_sequence(parts), torch.tensor([*map(len, parts)]), torch.tensor(labels)

    net = nn.ModuleList([nn.Embedding(9, 6), nn.GRU(6, 6), nn.Linear(6, 2)])

    def forward(padded, lengths):
        _, last = net[1](pack_padded_sequence(net[0](padded), lengths))
        return net[2](last[0])

    net.forward = forward
    model, sampler = DDP(net), DistributedSampler(words)
    optimizer = sgd(model)
    for padded, each, labels in epochs(DataLoader(words, 8, sampler=sampler, collate_fn=collate)):
        optimizer.zero_grad()
        F.cross_entropy(model(padded, each), labels).backward()
        optimizer.step()

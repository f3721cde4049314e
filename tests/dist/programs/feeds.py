"""Trains on data of all shapes; tells how far the weights are from an own loop in this process."""

from dataclasses import replace
from itertools import chain, islice

import torch
from cases import tell
from torch import nn
from torch.nn import functional
from torch.utils.data import IterableDataset, TensorDataset, WeightedRandomSampler, get_worker_info

SAMPLES, EPOCHS, SEED = 50, 2, 3
OPTIONS = {"accumulate": 1, "workers": 0, "feed": "generator", "optimizer": "pair", "weigh": False}
INPUTS = torch.randn(SAMPLES, 4, generator=torch.Generator().manual_seed(1)).double()
TARGETS = (INPUTS.sum(dim=1) > 0).long()
TARGETS[::3] = -100  # nobody knows these


class Lines(IterableDataset):
    """Divides itself among workers, as the examples of torch's documentation do."""

    def __iter__(self):
        worker = get_worker_info()
        yield from samples(*((worker.id, worker.num_workers) if worker else (0, 1)))


def samples(start=0, every=1):
    for at in range(start, SAMPLES, every):
        yield INPUTS[at], TARGETS[at] if KEEP_UNKNOWN else TARGETS[at].clamp(min=0)


def batches():
    items = samples()
    for size in (5, 3, 4, 6, 2, 7):
        part = list(islice(items, size))
        yield tuple(map(torch.stack, zip(*part, strict=True)))


def shares(rank, ranks):
    """Of unequal length: the last rank has most."""
    bounds = [SAMPLES * each * (each + 1) // (ranks * (ranks + 1)) for each in range(ranks + 1)]
    return list(samples())[bounds[rank] : bounds[rank + 1]]


def sampler():
    return WeightedRandomSampler(torch.arange(1.0, SAMPLES + 1), 31, replacement=True)


def groups(items, size):
    items = iter(items)
    return list(iter(lambda: list(islice(items, size)), []))


def own_steps(case, ranks, epoch):
    """The samples of each step, of all ranks."""
    window, kind = case["accumulate"], case["feed"]
    if kind == "ready":
        singles = [list(zip(*batch, strict=True)) for batch in batches()]
        return [list(chain(*group)) for group in groups(singles, ranks * window)]
    if kind == "sharded":
        parts = [groups(shares(rank, ranks), 4 * window) for rank in range(ranks)]
        longest = max(map(len, parts))
        return [list(chain(*(p[at] for p in parts if at < len(p)))) for at in range(longest)]
    items = list(samples())
    if kind == "sampler":
        torch.manual_seed(SEED + epoch)
        items = [items[index] for index in sampler()]
    batch = groups(items, 12)
    if kind == "dropped":
        batch = [each for each in batch if len(each) == 12]
    return [list(chain(*group)) for group in groups(batch, window)]


def model():
    torch.manual_seed(5)
    return nn.Linear(4, 2).double()


def own_loop(case, ranks):
    network = model()
    optimizer = torch.optim.SGD(network.parameters(), lr=0.3, momentum=0.9)
    for epoch in range(EPOCHS):
        for step in own_steps(case, ranks, epoch):
            inputs, targets = map(torch.stack, zip(*step, strict=True))
            optimizer.zero_grad()
            functional.cross_entropy(network(inputs), targets).backward()
            optimizer.step()
    return network


def feed(run, job, case):
    options = {"num_workers": case["workers"], "tail": "short"}
    share = iter(shares(job.rank, job.world_size))
    tables = TensorDataset(*map(torch.stack, zip(*samples(), strict=True)))
    source, settings = {
        "generator": (samples(), {"global_batch": 12, **options}),
        "lines": (Lines(), {"global_batch": 12, **options}),
        "ready": (batches(), options),
        "sharded": (share, {"batch_size": 4, "sharded": True}),
        "sampler": (tables, {"global_batch": 12, "sampler": sampler(), **options}),
        "dropped": (samples(), {"global_batch": 12, "drop_last": True}),
        "apart": (share, {"batch_size": 4}),  # each rank reads other data, and nobody says so
        "used up": (ONE_PASS, {"global_batch": 12}),
    }[case["feed"]]
    return run.batches(source, **settings)


def train(job, case):
    global KEEP_UNKNOWN, ONE_PASS
    KEEP_UNKNOWN, ONE_PASS = bool(case["weigh"]), samples()
    options = {"accumulate": case["accumulate"]} if case["accumulate"] > 1 else {}
    job._context.config = replace(job._context.config, options=options)
    network, settings = model(), {"lr": 0.3, "momentum": 0.9}
    recipe = torch.optim.SGD, settings
    if case["optimizer"] == "finished":
        recipe = torch.optim.SGD(network.parameters(), **settings)
    run = job.prepare(network, loss=functional.cross_entropy, optimizer=recipe)
    for _ in run.epochs(EPOCHS):
        for inputs, targets in feed(run, job, case):
            tokens = (targets != -100).sum() if case["weigh"] is True else None
            run.step(inputs, targets, weight=tokens)
    alone = own_loop(case, job.world_size)
    pairs = zip(run.model.parameters(), alone.parameters(), strict=True)
    apart = max(float((mine - its).abs().max()) for mine, its in pairs)
    return {"apart": max(float(each) for each in job.gather(torch.tensor(apart))), "loss": run.loss}


tell(train, OPTIONS)

"""The loops that one writes by hand for each strategy, after torch's and Keras's own tutorials.

Each is a function of the group that is there, and returns (step, batches): step(inputs, targets)
trains on one batch of this rank.
"""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from k8sjob.runtime.strategies.rpc import server_name

WIDTH, BATCH, MICRO_BATCHES, ACCUMULATE = 1024, 64, 4, 8
ROWS, LOOKED_UP = 20_000, 32  # of the table, and in a sample


def build():
    """A 784-1024-1024-10 classifier."""
    torch.manual_seed(0)
    layers = [nn.Flatten(), nn.Linear(784, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(WIDTH, 10))


def build_keras():
    """The same of Keras."""
    import keras

    keras.utils.set_random_seed(0)
    hidden = [keras.layers.Dense(WIDTH, activation="relu") for _ in range(2)]
    return keras.Sequential(
        [keras.Input((1, 28, 28)), keras.layers.Flatten(), *hidden, keras.layers.Dense(10)]
    )


class Bags(nn.Module):
    """A table, of which each sample needs a few rows, and two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.bags = nn.EmbeddingBag(ROWS, 64, mode="sum")
        self.dense = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))

    def forward(self, rows):
        """(N, rows) -> (N, 10)."""
        return self.dense(self.bags(rows))


def samples(*, bags: bool = False):
    """Noise of the shape of FashionMNIST, or the numbers of rows."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(0, 10, (8192,), generator=generator)
    if bags:
        rows = torch.randint(0, ROWS, (8192, LOOKED_UP), generator=generator)
        return TensorDataset(rows, labels)
    return TensorDataset(torch.rand(8192, 1, 28, 28, generator=generator), labels)


def _adam(model):
    return torch.optim.Adam(model.parameters(), lr=1e-4)


def _shares(data):
    return DataLoader(data, batch_size=BATCH, sampler=DistributedSampler(data))


def _plain_step(model, optimizer, inputs, targets):
    optimizer.zero_grad()
    functional.cross_entropy(model(inputs), targets).backward()
    optimizer.step()


def ddp():
    """DistributedDataParallel."""
    model = DistributedDataParallel(build())
    return partial(_plain_step, model, _adam(model)), _shares(samples())


def keras():
    """DistributedDataParallel around a Keras model, which is told that it trains."""
    model = DistributedDataParallel(build_keras())
    told = partial(model, training=True)
    return partial(_plain_step, told, _adam(model)), _shares(samples())


def accumulate():
    """DistributedDataParallel that sends once in eight batches."""
    model = DistributedDataParallel(build())
    optimizer, done = _adam(model), 0

    def step(inputs, targets):
        nonlocal done
        done += 1
        closes = done % ACCUMULATE == 0
        with nullcontext() if closes else model.no_sync():
            (functional.cross_entropy(model(inputs), targets) / ACCUMULATE).backward()
        if closes:
            optimizer.step()
            optimizer.zero_grad()

    return step, _shares(samples())


def fsdp():
    """FSDP2, layer by layer."""
    from torch.distributed.fsdp import fully_shard

    model = build()
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer)
    fully_shard(model)
    return partial(_plain_step, model, _adam(model)), _shares(samples())


def mesh():
    """Tensor parallel: the first layer by rows, the second by columns."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    ranks = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("model",))
    plan = {"1": ColwiseParallel(), "3": RowwiseParallel()}
    model = parallelize_module(build(), ranks, plan)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4, foreach=False)
    batches = DataLoader(samples(), batch_size=BATCH, shuffle=True)
    return partial(_plain_step, model, optimizer), batches


def pipeline():
    """Two stages under 1F1B."""
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    rank, model = dist.get_rank(), build()
    part = model[:3] if rank == 0 else model[3:]
    optimizer = _adam(part)
    stage = PipelineStage(part, rank, 2, torch.device("cpu"))
    schedule = Schedule1F1B(stage, MICRO_BATCHES, loss_fn=functional.cross_entropy)

    def step(inputs, targets):
        optimizer.zero_grad()
        if rank == 0:
            schedule.step(inputs)
        else:
            schedule.step(target=targets)
        optimizer.step()

    generator = torch.Generator().manual_seed(0)
    batches = DataLoader(samples(), batch_size=BATCH, shuffle=True, generator=generator)
    return step, batches


def one_process():
    """What model_split and data_parallel are on one device."""
    model = build()
    batches = DataLoader(samples(), batch_size=BATCH, shuffle=True)
    return partial(_plain_step, model, _adam(model)), batches


def parameter_server():
    """A table behind RPC on a server, and one trainer."""
    from torch.distributed import autograd, rpc
    from torch.distributed.nn import RemoteModule
    from torch.distributed.optim import DistributedOptimizer

    model = Bags()
    model.bags = RemoteModule(f"{server_name(0)}/cpu", nn.EmbeddingBag, (ROWS, 64), {"mode": "sum"})
    local = [rpc.RRef(parameter) for parameter in model.dense.parameters()]
    remote = model.bags.remote_parameters()
    optimizer = DistributedOptimizer(torch.optim.Adam, [*remote, *local], lr=1e-4)

    def step(inputs, targets):
        with autograd.context() as context:
            loss = functional.cross_entropy(model(inputs), targets)
            autograd.backward(context, [loss])
            optimizer.step(context)

    return step, DataLoader(samples(bags=True), batch_size=BATCH, shuffle=True)

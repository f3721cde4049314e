"""Samples per second of the runtime's step beside the hand-written DDP loop on the same model.

As a program (`python bench/training.py bare|k8sjob|heartbeat`) it is one rank; as a module it
starts the ranks, alternating which goes first, and takes medians.
"""

from __future__ import annotations

import statistics
import sys
import threading
import time
from pathlib import Path

import ranks

HERE = Path(__file__).resolve()
SAMPLES, EPOCHS, BATCH = 8192, 4, 32  # the first epoch warms up and is not counted


def model_and_data():
    """The 784-512-512-10 classifier of the tutorials, and data of FashionMNIST's shape."""
    import torch
    from torch import nn

    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(0)
    images = torch.rand(SAMPLES, 1, 28, 28, generator=generator)
    labels = torch.randint(0, 10, (SAMPLES,), generator=generator)
    data = torch.utils.data.TensorDataset(images, labels)

    def build():
        torch.manual_seed(0)
        layers = [nn.Flatten(), nn.Linear(784, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU()]
        return nn.Sequential(*layers, nn.Linear(512, 10))

    return build, data


def bare() -> float:
    """The loop that one writes by hand from the DDP tutorial."""
    import torch
    import torch.distributed as dist
    from torch.nn import functional
    from torch.nn.parallel import DistributedDataParallel
    from torch.utils.data import DataLoader, DistributedSampler

    build, data = model_and_data()
    dist.init_process_group("gloo")
    model = DistributedDataParallel(build())
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=BATCH, sampler=sampler)
    start = 0.0
    for epoch in range(EPOCHS):
        if epoch == 1:
            start = time.perf_counter()
        sampler.set_epoch(epoch)
        for images, labels in loader:
            optimizer.zero_grad()
            functional.cross_entropy(model(images), labels).backward()
            optimizer.step()
    rate = SAMPLES * (EPOCHS - 1) / (time.perf_counter() - start)
    dist.destroy_process_group()
    return rate


def k8sjob() -> float:
    """The same through the runtime: stop flag, progress events, watchdog and all."""
    import torch
    from torch.nn import functional

    from k8sjob import runtime

    build, data = model_and_data()
    start = 0.0
    with runtime.session() as job:
        run = job.prepare(
            build, loss=functional.cross_entropy, optimizer=(torch.optim.SGD, {"lr": 1e-3})
        )
        for epoch in run.epochs(EPOCHS):
            if epoch == 1:
                start = time.perf_counter()
            for images, labels in run.batches(data, batch_size=BATCH):
                run.step(images, labels)
        return SAMPLES * (EPOCHS - 1) / (time.perf_counter() - start)


def heartbeat() -> float:
    """The share of a step's time that its signs of life take, the watchdog's threads included.

    Both are too small to be seen in samples per second: the beats of an epoch are counted and one
    of them is timed, and the kernel tells for how long each thread ran.
    """
    import torch
    from torch.nn import functional

    from k8sjob import runtime

    build, data = model_and_data()
    with runtime.session() as job:
        run = job.prepare(
            build, loss=functional.cross_entropy, optimizer=(torch.optim.SGD, {"lr": 1e-3})
        )
        beat, beats = job._context.beat, 0

        def counted(*what: object) -> None:
            nonlocal beats
            beats += 1
            beat(*what)

        for epoch in run.epochs(EPOCHS):
            if epoch == 1:
                threads, start = on_cpu("k8sjob-watchdog"), time.perf_counter()
                job._context.beat = counted
            for images, labels in run.batches(data, batch_size=BATCH):
                run.step(images, labels)
        lasted = time.perf_counter() - start
        threads = on_cpu("k8sjob-watchdog") - threads
        start, calls = time.perf_counter(), 100_000
        for _ in range(calls):
            beat(run.steps)
        one = (time.perf_counter() - start) / calls
        return (threads + beats * one) / lasted


def on_cpu(name: str) -> float:
    """Seconds for which threads of this name have run."""
    tasks = [thread.native_id for thread in threading.enumerate() if thread.name == name]
    told = [Path(f"/proc/self/task/{task}/schedstat").read_text() for task in tasks]
    return sum(int(line.split()[0]) for line in told) / 1e9


def group(kind: str, world: int) -> float:
    """Run one group of processes and return what rank 0 measured: samples per second of all."""
    first, *_ = ranks.outputs(HERE, kind, world=world)
    return float(first.rpartition("rate=")[2])


def measure(rounds: int = 5) -> dict[str, dict[str, float]]:
    """Median samples/s of both, and the median of the ratios of neighbouring runs."""
    table = {}
    for world in (1, 2):
        rates: dict[str, list[float]] = {"bare": [], "k8sjob": []}
        for number in range(rounds):
            for kind in ("bare", "k8sjob") if number % 2 else ("k8sjob", "bare"):
                rates[kind].append(group(kind, world))
        ratios = [ours / bare for ours, bare in zip(rates["k8sjob"], rates["bare"], strict=True)]
        table[f"{world} rank{'s' * (world > 1)}"] = {
            "bare": statistics.median(rates["bare"]),
            "k8sjob": statistics.median(rates["k8sjob"]),
            "ratio": statistics.median(ratios),
        }
    return table


def heartbeats(rounds: int = 5) -> float:
    """Median of the heartbeat's share of a step, 2 ranks."""
    return statistics.median(group("heartbeat", 2) for _ in range(rounds))


if __name__ == "__main__":
    loop = {"bare": bare, "k8sjob": k8sjob, "heartbeat": heartbeat}[sys.argv[1]]
    print(f"rate={loop()}")

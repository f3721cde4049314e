"""The share of a small classifier's step that the signs of life take, the watchdog included.

As a program it is one rank; as a module it starts the ranks.
"""

from __future__ import annotations

import statistics
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


def share() -> float:
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


def measure(rounds: int = 5) -> float:
    """Median of the share, 2 ranks."""
    shares = []
    for _ in range(rounds):
        first, *_ = ranks.outputs(HERE, world=2)
        shares.append(float(first.rpartition("share=")[2]))
    return statistics.median(shares)


if __name__ == "__main__":
    print(f"share={share()}")

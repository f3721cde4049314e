"""The memory of a rank at its peak, by how many ranks divide the model, beside the formula.

As a program (`python bench/memory.py KIND RANKS`) it is one rank; as a module it starts the ranks.
"""

from __future__ import annotations

import json
import sys
from itertools import chain, islice
from pathlib import Path

import ranks
import resident

from k8sjob.contract import RuntimeConfig

HERE = Path(__file__).resolve()
WIDTH, LAYERS, STEPS = 1024, 24, 4
DEGREES = {"ddp": (2,), "fsdp": (2, 4, 8), "mesh": (2, 4, 8)}


def build(width: int):
    """Equal layers; of 1024, 25 million parameters: activations are small beside them."""
    from torch import nn

    layers = [nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(LAYERS)]
    return nn.Sequential(*layers)


def options(kind: str, degree: int) -> dict[str, object]:
    """A layout in which every second layer takes the part that the one before it gave."""
    if kind != "mesh":
        return {}
    layout: dict[str, list[str | None]] = {}
    for first in range(0, LAYERS, 2):
        layout |= {
            f"{first}.0.weight": ["model", None],
            f"{first}.0.bias": ["model"],
            f"{first}.0.output": ["data", "model"],
            f"{first}.1.output": ["data", "model"],
            f"{first}.output": ["data", "model"],
            f"{first + 1}.0.weight": [None, "model"],
        }
    return {"model": degree, "layout": layout}


def rank() -> dict[str, int]:
    """Bytes that this rank has at most while it trains, more than before it had a model."""
    from k8sjob import runtime

    with runtime.session() as job:
        train(job, 8)  # what libraries take for themselves is there then
        job.barrier()
        before = resident.forget_peak()
        train(job, WIDTH)
        return {"bytes": resident.peak() - before}


def train(job, width: int) -> None:
    """Build a model and make a few steps."""
    import torch
    from torch.nn import functional
    from torch.utils.data import TensorDataset

    data = TensorDataset(torch.rand(64, width), torch.rand(64, width))
    optimizer = torch.optim.Adam, {"foreach": False}
    run = job.prepare(lambda: build(width), loss=functional.mse_loss, optimizer=optimizer)
    batches = chain.from_iterable(run.batches(data, batch_size=4) for _ in run.epochs(99))
    for inputs, targets in islice(batches, STEPS):
        run.step(inputs, targets)


def measure() -> dict[str, dict[str, float]]:
    """By strategy and ranks: the peak of a rank, that over ddp's, and what the formula says."""
    table = {}
    for kind, degrees in DEGREES.items():
        for degree in degrees:
            found = ranks.results(
                HERE,
                kind,
                str(degree),
                world=degree,
                # What is freed goes back at once, so that the process's memory is what is held.
                MALLOC_MMAP_THRESHOLD_=str(1 << 16),
                MALLOC_TRIM_THRESHOLD_=str(1 << 16),
                K8SJOB_CONFIG=RuntimeConfig(strategy=kind, options=options(kind, degree)).encode(),
            )
            table[f"{kind}, {degree} ranks"] = {
                "formula": formula(kind, degree),
                "bytes": max(each["bytes"] for each in found),
            }
    whole = table["ddp, 2 ranks"]["bytes"]
    return {name: {**row, "ratio": row["bytes"] / whole} for name, row in table.items()}


def formula(kind: str, degree: int) -> float:
    """The share of parameters, gradients and moments that a rank has."""
    if kind == "ddp":
        return 1.0
    weight, bias = WIDTH * WIDTH, WIDTH
    whole = bias / 2 if kind == "mesh" else 0  # every second layer's
    return ((weight + bias - whole) / degree + whole) / (weight + bias)


if __name__ == "__main__":
    if sys.argv[1:]:
        print(f"RESULT {json.dumps(rank())}")
    else:
        for name, row in measure().items():
            print(name, row)

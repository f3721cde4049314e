"""A decoder-only language model, and the loops that train it by hand and by k8sjob.

As a program (`python bench/decoder.py alternate|losses|stall CASE|FOLDER SIZE`) it is one rank of
bench/gpu.py: `alternate` lets both loops take turns, `losses` trains a few steps by k8sjob alone,
and `stall` saves checkpoints.
"""

from __future__ import annotations

import json
import math
import os
import statistics
import sys
import time
from collections import OrderedDict
from dataclasses import dataclass
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import turns

from k8sjob.contract import RuntimeConfig

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

HERE = Path(__file__).resolve()
TURNS, TURN_SECONDS, WARM_UP = 10, 0.7, 5
"""Turns of each loop, the length of a turn, and the steps before the first one."""
LOSS_STEPS, SAVES = 6, 5


@dataclass(frozen=True)
class Shape:
    """A decoder, and the batch of a rank in samples."""

    layers: int
    width: int
    heads: int
    length: int
    letters: int
    batch: int

    def flops(self, parameters: int) -> float:
        """Of a sample, forward and backward: 6 for each weight that multiplies, and attention.

        As in PaLM's appendix B (Chowdhery and others, 2022), nanoGPT and torchtitan, which count
        attention as if it saw the future, too. A table of embeddings multiplies nothing, and what
        activation checkpointing computes again does not count.
        """
        tables = (self.letters + self.length) * self.width
        attention = 12 * self.layers * self.length * self.width
        return self.length * (6.0 * (parameters - tables) + attention)


SHAPES = {
    "small": Shape(layers=12, width=1024, heads=16, length=1024, letters=32_000, batch=8),
    # 1.4 billion parameters: 23 GB of weights, gradients and Adam's moments, for each of two loops.
    "large": Shape(layers=24, width=2048, heads=16, length=2048, letters=50_304, batch=8),
    "tiny": Shape(layers=2, width=64, heads=4, length=32, letters=96, batch=4),
}
OPTIMIZER = {"lr": 1e-4, "fused": True}


def config(case: str, shape: Shape, **settings: Any) -> RuntimeConfig:
    """The settings of a case: a strategy, and the switches that are on."""
    kind, *switches = case.split(", ")
    options: dict[str, Any] = dict.fromkeys(switches, True)
    if kind == "pipeline":
        options |= {"splits": [f"blocks.{shape.layers // 2}"], "micro_batches": 2}
    else:
        options["blocks"] = [r"blocks\.\d+"]
    if options.pop("layout", None):  # the two products of a block, each divided over two ranks
        rows, columns = ["model", None], [None, "model"]
        layout = {"up.weight": rows, "up.bias": ["model"], "down.weight": columns}
        layout["up.output"] = ["data", None, "model"]
        named = {rf"blocks\.\d+\.{name}": axes for name, axes in layout.items()}
        options |= {"model": 2, "layout": named}
    return RuntimeConfig(strategy=kind, options=options, **settings)


def decoder(shape: Shape):
    """A chain of embeddings, blocks with causal attention, and the head; float32."""
    import torch
    from torch import nn
    from torch.nn import functional

    class Embeddings(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.letters = nn.Embedding(shape.letters, shape.width)
            self.places = nn.Embedding(shape.length, shape.width)

        def forward(self, codes):
            """(N, length) -> (N, length, width)."""
            return self.letters(codes) + self.places.weight

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            width = shape.width
            self.before, self.after = nn.LayerNorm(width), nn.LayerNorm(width)
            self.mixed, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
            self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

        def forward(self, x):
            """(N, length, width) -> the same."""
            parts = self.mixed(self.before(x)).chunk(3, dim=-1)
            heads = [part.unflatten(-1, (shape.heads, -1)).transpose(1, 2) for part in parts]
            attended = functional.scaled_dot_product_attention(*heads, is_causal=True)
            x = x + self.out(attended.transpose(1, 2).flatten(2))
            return x + self.down(functional.gelu(self.up(self.after(x))))

    torch.manual_seed(0)
    blocks = nn.Sequential(*(Block() for _ in range(shape.layers)))
    head = nn.Sequential(nn.LayerNorm(shape.width), nn.Linear(shape.width, shape.letters))
    return nn.Sequential(OrderedDict(embeddings=Embeddings(), blocks=blocks, head=head))


def loss(output, following):
    """The mean over all letters."""
    from torch.nn import functional

    return functional.cross_entropy(output.flatten(0, 1), following.flatten())


def samples(shape: Shape):
    """Noise of letters, and the letter after each."""
    import torch

    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(shape.letters, (512, shape.length + 1), generator=generator)
    return torch.utils.data.TensorDataset(codes[:, :-1].clone(), codes[:, 1:].clone())


def by_hand(case: str, shape: Shape, device) -> tuple[Callable[..., Any], Iterable[Any]]:
    """The loop of torch's tutorials; on one process neither ddp, fsdp nor mesh divides anything."""
    import torch
    import torch.distributed as dist
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    from torch.nn.parallel import DistributedDataParallel
    from torch.utils.checkpoint import checkpoint

    kind, *switches = case.split(", ")
    bf16, several, model = "bf16" in switches, dist.get_world_size() > 1, decoder(shape).to(device)
    if "checkpoint_activations" in switches:
        for block in model.blocks:
            block.forward = partial(checkpoint, block.forward, use_reentrant=False)
    if "compile" in switches:
        for unit in [model] if kind == "ddp" else model.blocks:
            unit.compile()
    if kind == "fsdp" and several:
        half = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32} if bf16 else {}
        for unit in [*model.blocks, model]:
            fully_shard(unit, mp_policy=MixedPrecisionPolicy(**half))
    replicated = kind == "ddp" and several
    whole = DistributedDataParallel(model, gradient_as_bucket_view=True) if replicated else model
    optimizer = torch.optim.AdamW(model.parameters(), **OPTIMIZER)

    def step(codes, following):
        optimizer.zero_grad()
        with torch.autocast(device.type, torch.bfloat16, enabled=bf16):
            value = loss(whole(codes), following)
        value.backward()
        optimizer.step()

    data, pinned = samples(shape), device.type == "cuda"
    sampler = torch.utils.data.DistributedSampler(data)
    loader = torch.utils.data.DataLoader(
        data, batch_size=shape.batch, sampler=sampler, drop_last=True, pin_memory=pinned
    )
    step, batches = turns.endless(step, loader)
    moved = (tuple(part.to(device, non_blocking=True) for part in batch) for batch in batches)
    return step, moved


def prepared(job: Any, shape: Shape, **sizes: int) -> tuple[Any, Iterator[Any]]:
    """The runtime's run, and its batches."""
    import torch

    run = job.prepare(
        lambda: decoder(shape), loss=loss, optimizer=(torch.optim.AdamW, dict(OPTIMIZER))
    )
    data = samples(shape)
    fed = (run.batches(data, **sizes, tail="drop") for _ in run.epochs(9999))
    return run, chain.from_iterable(fed)


def turn(device, steps: int, step: Callable[..., Any], batches: Iterator[Any]) -> float:
    """Seconds for some steps; the GPU has done them then."""
    import torch

    start = time.perf_counter()
    for codes, following in islice(batches, steps):
        step(codes, following)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - start


def alternate(case: str, shape: Shape) -> dict[str, Any]:
    """Both loops in turns: samples/s of each on this rank, the ratio with its error, memory."""
    import torch

    from k8sjob import runtime

    with runtime.session() as job:
        on_gpu = job.device.type == "cuda"
        run, batches = prepared(job, shape, batch_size=shape.batch)
        loops = {"hand": by_hand(case, shape, job.device), "k8sjob": (run.step, batches)}
        # Twice: the first steps compile, load kernels and let the allocator grow.
        for _ in range(2):
            seconds = [turn(job.device, WARM_UP, *loop) for loop in loops.values()]
        # As many on all ranks, or they would wait for each other forever.
        most = torch.tensor(max(1, round(TURN_SECONDS * WARM_UP / max(seconds))))
        steps = int(job.all_reduce(most, "min"))
        timed = {by: partial(turn, job.device, steps, *loop) for by, loop in loops.items()}
        taken = turns.alternate(timed, TURNS)
        ratios = [hand / own for hand, own in zip(taken["hand"], taken["k8sjob"], strict=True)]
        done = steps * shape.batch
        parameters = sum(item.numel() for item in decoder(shape).parameters())
        return {
            **{by: done / statistics.median(seconds) for by, seconds in taken.items()},
            "ratio": statistics.median(ratios),
            "error": statistics.stdev(ratios) / math.sqrt(len(ratios)),
            "flops": shape.flops(parameters),
            "parameters": parameters,
            "peak_bytes": torch.cuda.max_memory_allocated(job.device) if on_gpu else 0,
        }


def losses(shape: Shape) -> dict[str, Any]:
    """The losses of a few steps over all ranks, by k8sjob, and samples/s of the later ones."""
    from k8sjob import runtime

    with runtime.session() as job:
        values, began = [], 0.0
        # The same global batch whatever the number of ranks, so that the losses are the same.
        run, batches = prepared(job, shape, global_batch=shape.batch)
        for codes, following in islice(batches, LOSS_STEPS):
            mean = job.reduce(loss=(run.step(codes, following), 1))
            values.append(mean["loss"])
            began = began or time.perf_counter()
        rate = (LOSS_STEPS - 1) * shape.batch / (time.perf_counter() - began)
        return {"losses": values, "rate": rate, "device": str(job.device)}


def stall(folder: Path, shape: Shape) -> dict[str, float]:
    """Seconds of a checkpoint by hand and by k8sjob, in turns, and its size."""
    import torch

    from k8sjob import runtime

    with runtime.session() as job:
        run, batches = prepared(job, shape, batch_size=shape.batch)

        def synchronized() -> float:
            if job.device.type == "cuda":
                torch.cuda.synchronize(job.device)
            return time.perf_counter()

        def plain() -> float:
            began, target = synchronized(), folder / "plain.pt"
            with target.open("wb") as file:
                state = {"model": run.model.state_dict(), "optimizer": run.optimizer.state_dict()}
                torch.save(state, file)
                file.flush()
                os.fsync(file.fileno())
            sizes.append(target.stat().st_size / 1e6)
            target.unlink()
            return synchronized() - began

        def own() -> tuple[float, float]:
            run.steps += 1  # or it would be the checkpoint that is there already
            began = synchronized()
            run._save()
            still = synchronized() - began
            job._context.checkpointer.settle()
            return still, time.perf_counter() - began

        sizes: list[float] = []
        turn(job.device, 2, run.step, batches)
        taken = turns.alternate({"plain": plain, "own": own}, SAVES)
        stalls, wholes = zip(*taken["own"], strict=True)
        return {
            "plain": statistics.median(taken["plain"]),
            "stall": statistics.median(stalls),
            "whole": statistics.median(wholes),
            "mb": sizes[0],
        }


if __name__ == "__main__":
    what, case, size = sys.argv[1:]
    measured = {
        "alternate": partial(alternate, case),
        "losses": losses,
        "stall": partial(stall, Path(case)),
    }
    print(f"RESULT {json.dumps(measured[what](SHAPES[size]))}")

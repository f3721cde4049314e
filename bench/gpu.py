"""A language model on this machine's GPUs, by hand and by k8sjob, and the share of the chip's peak.

    python bench/gpu.py            # one process for each GPU; a table
    python bench/gpu.py --tiny     # the same of a few parameters, also on the CPU: only a trial

In precision and compilation both loops are alike, and they take turns in the same processes.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from dataclasses import dataclass
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ranks
import turns

from k8sjob.contract import RuntimeConfig

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

HERE = Path(__file__).resolve()
TURN, TURNS, GROUPS = 20, 6, 3  # steps in a turn; turns of each loop; groups of processes
PEAKS = {  # TFLOP/s of a dense product by the makers' data sheets: (bfloat16, float32)
    "H200": (989, 67),
    "H100 PCIe": (756, 51),
    "H100": (989, 67),
    "A100": (312, 19.5),
    "L40S": (362, 91.6),
    "L4": (121, 30.3),
}


@dataclass(frozen=True)
class Shape:
    """A decoder, and a batch of a rank."""

    layers: int
    width: int
    heads: int
    length: int
    letters: int
    batch: int

    def flops(self, parameters: int) -> float:
        """Of a sample, forward and backward: 6 for each weight that multiplies, and attention.

        As in PaLM's appendix B (Chowdhery and others, 2022), which counts attention as if it saw
        the future, too; a table of embeddings multiplies nothing.
        """
        tables = (self.letters + self.length) * self.width
        attention = 12 * self.layers * self.length * self.width
        return self.length * (6.0 * (parameters - tables) + attention)


REAL = Shape(layers=12, width=1024, heads=16, length=1024, letters=32_000, batch=8)
TINY = Shape(layers=2, width=64, heads=4, length=32, letters=96, batch=4)


CASES = ("ddp", "ddp, bf16", "ddp, bf16, compile", "fsdp, bf16", "fsdp, bf16, compile")
"""A strategy, and the switches that are on."""


def decoder(shape: Shape):
    """A decoder with causal attention, before its norms; float32."""
    import torch
    from torch import nn
    from torch.nn import functional

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
            seen = functional.scaled_dot_product_attention(*heads, is_causal=True)
            x = x + self.out(seen.transpose(1, 2).flatten(2))
            return x + self.down(functional.gelu(self.up(self.after(x))))

    class Decoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.letters = nn.Embedding(shape.letters, shape.width)
            self.places = nn.Embedding(shape.length, shape.width)
            self.blocks = nn.ModuleList(Block() for _ in range(shape.layers))
            self.norm, self.head = nn.LayerNorm(shape.width), nn.Linear(shape.width, shape.letters)

        def forward(self, codes):
            """(N, length) -> (N, length, letters)."""
            x = self.letters(codes) + self.places.weight
            for block in self.blocks:
                x = block(x)
            return self.head(self.norm(x))

    torch.manual_seed(0)
    return Decoder()


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


def by_hand(name: str, shape: Shape, device) -> tuple[Callable[..., Any], Iterable[Any]]:
    """The loop of torch's tutorials."""
    import torch
    import torch.distributed as dist
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    from torch.nn.parallel import DistributedDataParallel

    kind, *switches = name.split(", ")
    bf16, compiled = "bf16" in switches, "compile" in switches
    several, model = dist.get_world_size() > 1, decoder(shape).to(device)
    units = [*model.blocks] if kind == "fsdp" else [model]
    for unit in units if compiled else ():
        unit.compile()
    if kind == "fsdp" and several:
        half = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32} if bf16 else {}
        for unit in [*units, model]:
            fully_shard(unit, mp_policy=MixedPrecisionPolicy(**half))
    whole = DistributedDataParallel(model) if kind == "ddp" and several else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

    def step(codes, following):
        optimizer.zero_grad()
        with torch.autocast(device.type, torch.bfloat16, enabled=bf16):
            value = loss(whole(codes), following)
        value.backward()
        optimizer.step()

    data = samples(shape)
    sampler = torch.utils.data.DistributedSampler(data)
    pinned = device.type == "cuda"
    loader = torch.utils.data.DataLoader(
        data, batch_size=shape.batch, sampler=sampler, drop_last=True, pin_memory=pinned
    )
    step, batches = turns.endless(step, loader)
    return step, (tuple(part.to(device, non_blocking=True) for part in one) for one in batches)


def rank(name: str, shape: Shape) -> dict[str, Any]:
    """Seconds of each turn of both loops, on this rank."""
    import torch

    from k8sjob import runtime

    with runtime.session() as job:
        run = job.prepare(
            lambda: decoder(shape), loss=loss, optimizer=(torch.optim.AdamW, {"lr": 1e-4})
        )
        data = samples(shape)
        fed = (run.batches(data, batch_size=shape.batch, tail="drop") for _ in run.epochs(9999))
        loops = {
            "hand": by_hand(name, shape, job.device),
            "k8sjob": (run.step, chain.from_iterable(fed)),
        }
        timed = {by: partial(turn, job.device, *loop) for by, loop in loops.items()}
        for warm_up in timed.values():
            warm_up()
        taken = turns.alternate(timed, TURNS)
        on_gpu = job.device.type == "cuda"
        return {
            "parameters": sum(item.numel() for item in decoder(shape).parameters()),
            "chip": torch.cuda.get_device_name(job.device) if on_gpu else "CPU",
            "peak_bytes": torch.cuda.max_memory_allocated(job.device) if on_gpu else 0,
            **taken,
        }


def turn(device, step: Callable[..., Any], batches: Iterator[Any]) -> float:
    """Seconds for a turn's steps; the GPU has done them then."""
    import torch

    start = time.perf_counter()
    for codes, following in islice(batches, TURN):
        step(codes, following)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - start


def measure(shape: Shape, world: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """Cases: samples/s of both over all ranks, the ratio with its error, share of the peak."""
    for name in CASES:
        kind, *switches = name.split(", ")
        config = RuntimeConfig(strategy=kind, options=dict.fromkeys(switches, True)).encode()
        argv = ["--rank", name, *(["--tiny"] if shape is TINY else [])]
        run = partial(ranks.results, HERE, *argv, world=world, K8SJOB_CONFIG=config)
        yield name, summary(name, shape, [run()[0] for _ in range(GROUPS)], world)


def summary(name: str, shape: Shape, groups: list[dict[str, Any]], world: int) -> dict[str, Any]:
    """The row of a case."""
    ratio, error = turns.ratio([(one["hand"], one["k8sjob"]) for one in groups])
    done = TURN * shape.batch * world
    rates = {
        by: done / statistics.median(seconds for one in groups for seconds in one[by])
        for by in ("hand", "k8sjob")
    }
    chip = groups[0]["chip"]
    peak = next((both for known, both in PEAKS.items() if known in chip), None)
    reached = rates["k8sjob"] / world * shape.flops(groups[0]["parameters"]) / 1e12
    return {
        **rates,
        "ratio": ratio,
        "ratio_error": error,
        "chip": chip,
        "tflops_of_a_gpu": reached,
        "share_of_peak": reached / peak[0 if "bf16" in name else 1] if peak else None,
        "peak_bytes": max(one["peak_bytes"] for one in groups),
    }


def main() -> None:
    """The ranks, or one of them."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--tiny", action="store_true", help="a trial, which needs no GPU")
    parser.add_argument("--rank", metavar="CASE", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    shape = TINY if asked.tiny else REAL
    if asked.rank:
        print(f"RESULT {json.dumps(rank(asked.rank, shape))}")
        return
    import torch

    gpus = torch.cuda.device_count()
    if not (gpus or asked.tiny):
        raise SystemExit("no GPU here, so nothing to measure; --tiny tries the program on the CPU")
    print(f"{'samples/s':<24}{'by hand':>9}{'k8sjob':>9}{'ratio':>16}{'TFLOP/s':>10}{'of peak':>9}")
    table = {}
    for name, row in measure(shape, gpus or min(2, os.cpu_count() or 1)):
        table[name] = row
        ratio = f"{row['ratio']:.3f} ± {row['ratio_error']:.3f}"
        share = f"{row['share_of_peak']:.0%}" if row["share_of_peak"] else "-"
        print(f"{name:<24}{row['hand']:>9.1f}{row['k8sjob']:>9.1f}{ratio:>16}", end="")
        print(f"{row['tflops_of_a_gpu']:>10.3g}{share:>9}", flush=True)
    target = HERE.with_name("results-gpu.json")
    target.write_text(json.dumps(table, indent=2) + "\n")
    print(f"on {next(iter(table.values()))['chip']}; written: {target}")


if __name__ == "__main__":
    main()

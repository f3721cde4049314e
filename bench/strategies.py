"""Each strategy beside the recipe that one writes by hand for it: samples/s, memory, messages.

As a program (`python bench/strategies.py NAME`) it is one rank; as a module it starts the ranks.
Both loops run in the same processes and take turns every few seconds, so that what else the machine
does falls upon both.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ranks
import resident
import turns

from k8sjob.contract import RuntimeConfig

if TYPE_CHECKING:
    from collections.abc import Iterable

HERE = Path(__file__).resolve()
TURN, TURNS = 48, 6  # batches of a rank in one turn, so a second: reports have their own pace
GROUPS = 5  # of processes: where each has its memory makes equal loops differ by some percent
PROFILED = 8  # batches, as many as are accumulated


@dataclass(frozen=True)
class Case:
    """What is measured.

    Attributes:
        kind: the strategy.
        options: its settings.
        ranks: processes.
        recipe: its function in recipes.py, where the name differs.
        itself: whether that is measured beside itself, which tells what the ratios are worth.
    """

    kind: str
    options: dict = field(default_factory=dict)
    ranks: int = 2
    recipe: str = ""
    itself: bool = False


LAYOUT = {
    "1.weight": ["model", None],
    "1.bias": ["model"],
    "1.output": ["data", "model"],
    "2.output": ["data", "model"],
    "3.weight": [None, "model"],
}
CASES = {
    "by hand, twice": Case("ddp", recipe="ddp", itself=True),
    "ddp": Case("ddp"),
    "accumulate": Case("ddp", {"accumulate": 8}),
    "keras": Case("keras"),
    "fsdp": Case("fsdp"),
    "mesh": Case("mesh", {"model": 2, "layout": LAYOUT}),
    "pipeline": Case("pipeline", {"splits": ["3"], "micro_batches": 4}),
    "model_split": Case("model_split", {"splits": ["3"]}, ranks=1, recipe="one_process"),
    "data_parallel": Case("data_parallel", ranks=1, recipe="one_process"),
    "parameter_server": Case("parameter_server", {"servers": 1}, ranks=3),
}


def rank(name: str) -> dict[str, Any]:
    """What this rank measures, if it trains."""
    import recipes
    import torch

    from k8sjob import runtime

    build = {"keras": recipes.build_keras, "parameter_server": recipes.Bags}
    with runtime.session() as job:
        before = resident.now()
        run = job.prepare(
            build.get(name, recipes.build),
            loss=torch.nn.functional.cross_entropy,
            optimizer=(torch.optim.Adam, {"lr": 1e-4}),
        )
        held: list[int] = []
        hook = run.optimizer.register_step_pre_hook(lambda made, *_: held.append(of(made)))
        data = recipes.samples(bags=name == "parameter_server")
        fed = (run.batches(data, batch_size=recipes.BATCH) for _ in run.epochs(99))
        batches = chain.from_iterable(fed)
        turn(run.step, batches, PROFILED)
        steps, sent = run.steps, all_reduces(run.step, batches)
        hook.remove()
        found = {
            "bytes": held[-1],
            "peak_bytes": resident.peak() - before,
            "all_reduces": sent / (run.steps - steps),
        }
        recipe = getattr(recipes, CASES[name].recipe or name)
        loops = {"hand": turns.endless(*recipe()), "k8sjob": (run.step, batches)}
        if CASES[name].itself:
            loops["k8sjob"] = turns.endless(*recipe())
        for loop in loops.values():
            turn(*loop, PROFILED)
        timed = {by: partial(turn, *loop) for by, loop in loops.items()}
        return found | turns.alternate(timed, TURNS)


def turn(step, batches, count: int = TURN) -> tuple[float, float]:
    """Seconds, and seconds of CPU, for so many batches."""
    start, used = time.perf_counter(), time.process_time()
    for inputs, targets in islice(batches, count):
        step(inputs, targets)
    return time.perf_counter() - start, time.process_time() - used


def all_reduces(step, batches) -> int:
    """How many all-reduces a few batches begin on this rank."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU]) as seen:
        turn(step, batches, PROFILED)
    return sum(event.count for event in seen.key_averages() if event.key == "gloo:all_reduce")


def of(optimizer) -> int:
    """Bytes of parameters, gradients and states that this rank holds when the optimizer steps."""
    import torch
    from torch.distributed.tensor import DTensor

    parameters = [item for group in optimizer.param_groups for item in group["params"]]
    tensors = [
        *parameters,
        *(item.grad for item in parameters if item.grad is not None),
        *(value for state in optimizer.state.values() for value in state.values()),
    ]
    here = [item.to_local() if isinstance(item, DTensor) else item for item in tensors]
    return sum(item.numel() * item.element_size() for item in here if torch.is_tensor(item))


def group(name: str) -> list[dict[str, Any]]:
    """Run a group of processes; what those that train have measured, by rank."""
    case = CASES[name]
    return ranks.results(
        HERE,
        name,
        world=case.ranks,
        TP_SOCKET_IFNAME="lo",
        KERAS_BACKEND="torch",
        TORCH_CPP_LOG_LEVEL="ERROR",
        PYTHONWARNINGS="ignore",
        # Else glibc gives the memory of some temporaries back at every step, by the luck of where
        # they lie: one of two equal loops takes a tenth longer.
        MALLOC_TRIM_THRESHOLD_=str(1 << 30),
        MALLOC_MMAP_THRESHOLD_=str(1 << 30),
        K8SJOB_CONFIG=RuntimeConfig(strategy=case.kind, options=case.options).encode(),
    )


def measure(names: Iterable[str] = CASES) -> dict[str, dict[str, float]]:
    """Medians of both loops, ratios, what a rank holds and sends, of some or all of the cases.

    A ratio is what the loop by hand takes over what the runtime takes, in seconds and in those of
    the CPU: the median over neighboring turns, and the mean of that over groups of processes, with
    the error of the mean.
    """
    return {name: summary(name, [group(name) for _ in range(GROUPS)]) for name in names}


def summary(name: str, groups: list[list[dict[str, Any]]]) -> dict[str, float]:
    """The row of a strategy."""
    import recipes

    kind, first = CASES[name].kind, [found[0] for found in groups]
    samples = recipes.BATCH * TURN * (2 if kind in {"ddp", "keras", "fsdp"} else 1)
    row = {
        by: samples / statistics.median(wall for each in first for wall, _ in each[by])
        for by in ("hand", "k8sjob")
    }
    for at, called in enumerate(("ratio", "ratio_of_cpu")):
        row[called], row[f"{called}_error"] = turns.ratio(
            [
                ([took[at] for took in each["hand"]], [took[at] for took in each["k8sjob"]])
                for each in first
            ]
        )
    ranks_of_all = [each for found in groups for each in found]
    return row | {
        "bytes_of_a_rank": max(each["bytes"] for each in ranks_of_all),
        "peak_bytes_of_a_rank": max(each["peak_bytes"] for each in ranks_of_all),
        "all_reduces_of_a_step": first[0]["all_reduces"],
        "load": os.getloadavg()[0],
    }


if __name__ == "__main__":
    print(f"RESULT {json.dumps(rank(sys.argv[1]))}")

"""Checkpoints beside plain torch.save: how long training stands still, size, times, memory.

One model with Adam's state, fsdp on two ranks: each rank's part against one file of rank 0's, both
written while training goes on; "sync" is the same save, waited for at once. As a program
(`python bench/checkpoints.py plain|full|sharded FOLDER`) it is one rank; as a module it starts the
ranks, alternating which goes first, and takes medians.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

import ranks
import resident

HERE = Path(__file__).resolve()
WIDTH, LAYERS, SAVES = 1024, 8, 3
FORMS = ("plain", "full", "sharded")


def build():
    """8.4 million parameters: 34 MB of weights, and twice as much of Adam's."""
    import torch
    from torch import nn

    torch.set_num_threads(1)
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))


def size_mb(path: Path) -> float:
    """Of a file, or of all in a folder."""
    files = path.iterdir() if path.is_dir() else [path]
    return sum(file.stat().st_size for file in files) / 1e6


def plain(folder: Path) -> dict[str, float]:
    """What one writes by hand, in one process: torch.save, fsync, rename; torch.load."""
    import torch

    def made():
        model = build()
        return model, torch.optim.Adam(model.parameters(), lr=1e-4)

    model, optimizer = made()
    model(torch.rand(8, WIDTH)).square().mean().backward()
    optimizer.step()
    times, before = [], resident.forget_peak()
    for step in range(SAVES):
        began = time.perf_counter()
        draft = folder / "draft"
        with draft.open("wb") as file:
            torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
            file.flush()
            os.fsync(file.fileno())
        path = draft.replace(folder / f"{step}.pt")
        times.append(time.perf_counter() - began)
    peak = (resident.peak() - before) / 2**20
    model, optimizer = made()
    began = time.perf_counter()
    found = torch.load(path, weights_only=True)
    model.load_state_dict(found["model"])
    optimizer.load_state_dict(found["optimizer"])
    load = time.perf_counter() - began
    stall = statistics.median(times)
    return {"stall": stall, "save": stall, "load": load, "mb": size_mb(path), "peak_mb": peak}


def ours() -> dict[str, float] | None:
    """The same by the runtime, on rank 0; the second start of the group loads."""
    import torch
    from torch.nn import functional

    from k8sjob import runtime

    with runtime.session() as job:
        adam = torch.optim.Adam, {"lr": 1e-4}
        run = job.prepare(build, loss=functional.mse_loss, optimizer=adam)
        data = torch.utils.data.TensorDataset(*torch.rand(2, 8, WIDTH).unbind())
        began = time.perf_counter()
        epochs = run.epochs(99)
        next(epochs)
        if run.steps:
            return {"load": time.perf_counter() - began} if job.is_main else None
        for inputs, targets in run.batches(data, global_batch=8):
            run.step(inputs, targets)
        stalls, waits, before = [], [], resident.forget_peak()
        for _ in range(SAVES):
            run.steps += 1
            job.barrier()
            began = time.perf_counter()
            run._save()
            stalls.append(time.perf_counter() - began)
            job._context.checkpointer.settle()
            job.barrier()
            waits.append(time.perf_counter() - began)
        newest = max(job.checkpoint_dir.iterdir())
        found = {
            "stall": statistics.median(stalls),
            "save": statistics.median(waits),
            "mb": size_mb(newest),
            "peak_mb": (resident.peak() - before) / 2**20,
        }
        return found if job.is_main else None


def group(form: str, folder: Path) -> dict[str, float]:
    """Run one group of processes; what rank 0 measured."""
    config = {"strategy": "fsdp", "checkpoint_dir": str(folder), "checkpoint_format": form}
    world = 1 if form == "plain" else 2
    first, *_ = ranks.results(
        HERE, form, str(folder), world=world, K8SJOB_CONFIG=json.dumps(config)
    )
    return first


def once(form: str) -> dict[str, float]:
    """Save and load with a folder of its own."""
    with tempfile.TemporaryDirectory() as name:
        found = group(form, Path(name))
        if form != "plain":
            found |= group(form, Path(name))
        return found


def measure(rounds: int = 3) -> dict[str, dict[str, float]]:
    """Medians by form, and the stall beside that of the same save waited for."""
    seen: dict[str, list[dict[str, float]]] = {form: [] for form in FORMS}
    for number in range(rounds):
        for form in FORMS if number % 2 else reversed(FORMS):
            seen[form].append(once(form))
    table = {}
    for form, found in seen.items():
        table[form] = {key: statistics.median(one[key] for one in found) for key in found[0]}
        ratios = [one["stall"] / one["save"] for one in found]
        table[form]["async_to_sync"] = statistics.median(ratios)
    return table


if __name__ == "__main__":
    told = plain(Path(sys.argv[2])) if sys.argv[1] == "plain" else ours()
    print(f"RESULT {json.dumps(told)}")

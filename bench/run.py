"""Measurements: the table of commands beside other tools, and parts by name.

    make bench            or            python bench/run.py [submit] [growth] [training] ...

Without a name it is the table, without the growth (`make bench-growth`). Parts also write
bench/results.json.
Times on a shared machine are noisy: read the ratios. Nothing here is asserted by a test.
"""

from __future__ import annotations

import json
import os
import platform
import sys
from importlib.metadata import version
from pathlib import Path

import checkpoints
import commands
import heartbeat
import keras_mesh
import memory
import peers
import startup
import strategies
import table
import watch


def machine() -> dict[str, object]:
    """Where it was measured."""
    return {
        "cores": os.cpu_count(),
        "load": os.getloadavg(),
        "python": platform.python_version(),
        "torch": version("torch"),
        **peers.versions(),
    }


def command_lines(results: dict[str, object]) -> None:
    """Whole processes, renderings per second, and the size of the core install."""
    times = commands.measure()
    results["commands_s"] = times
    _, render = times["k8sjob render"]
    print(f"{'whole process':<70}{'seconds':>9}{'of CPU':>9}{'x render':>10}")
    for label, (seconds, processor) in times.items():
        print(f"{label:<70}{seconds:>9.3f}{processor:>9.3f}{processor / render:>10.2f}")
    results["renderings_per_s"] = commands.renderings_per_second()
    print(f"{'renderings per second':<26}{results['renderings_per_s']:>9.0f}")
    core = results["core_install"] = commands.installed()
    print(f"{'core install':<26}{core['packages']:>9} packages, {core['megabytes']:.1f} MB\n")


def training_runs(results: dict[str, object]) -> None:
    """The step under ddp beside the loop by hand, with what the ratio is worth."""
    table = results["training"] = strategies.measure(["by hand, twice", "ddp"])
    print(f"{'training, samples/s':<26}{'by hand':>9}{'k8sjob':>10}{'ratio':>16}{'of CPU':>16}")
    for label, row in table.items():
        ratios = "".join(
            f"{row[ratio]:>8.3f} ± {row[f'{ratio}_error']:.3f}"
            for ratio in ("ratio", "ratio_of_cpu")
        )
        print(f"{label:<26}{row['hand']:>9.0f}{row['k8sjob']:>10.0f}{ratios}")
    share = results["heartbeat_of_step"] = heartbeat.measure()
    print(f"{'heartbeat, of a step':<26}{share:>9.2%}\n")


def saves(results: dict[str, object]) -> None:
    """Checkpoints, beside torch.save."""
    table = results["checkpoints"] = checkpoints.measure()
    print(f"{'checkpoints':<12}{'stall ms':>9}{'/sync':>7}{'save ms':>9}{'load ms':>9}", end="")
    print(f"{'MB':>7}{'+ MB of rank 0':>16}")
    for form, row in table.items():
        stall, save, load = (row[key] * 1000 for key in ("stall", "save", "load"))
        print(
            f"{form:<12}{stall:>9.0f}{row['async_to_sync']:>7.2f}{save:>9.0f}{load:>9.0f}", end=""
        )
        print(f"{row['mb']:>7.0f}{row['peak_mb']:>16.0f}")
    print()


def strategy_costs(results: dict[str, object]) -> None:
    """Each strategy beside its recipe by hand: samples per second, memory, messages."""
    meshes = {f"keras_mesh, {shape}": row for shape, row in keras_mesh.measure().items()}
    table = results["strategies"] = strategies.measure() | meshes
    print(f"{'strategy, samples/s':<26}{'by hand':>9}{'k8sjob':>10}{'ratio':>16}{'MB':>8}")
    for label, row in table.items():
        held, error = row["bytes_of_a_rank"] / 1e6, row.get("ratio_error", float("nan"))
        ratio = f"{row['ratio']:.3f} ± {error:.3f}"
        print(f"{label:<26}{row['hand']:>9.0f}{row['k8sjob']:>10.0f}{ratio:>16}{held:>8.1f}")
    print()


def memory_at_peak(results: dict[str, object]) -> None:
    """The memory of a rank, by how many ranks divide the model."""
    table = results["memory"] = memory.measure()
    print(f"{'memory of a rank':<26}{'MB':>9}{'of ddp':>9}{'formula':>9}")
    for label, row in table.items():
        held = row["bytes"] / 1e6
        print(f"{label:<26}{held:>9.1f}{row['ratio']:>9.3f}{row['formula']:>9.3f}")
    print()


def start_up(results: dict[str, object]) -> None:
    """From the command to the first step."""
    marks = results["startup_s"] = startup.measure()
    print(f"{'k8sjob run, seconds until':<26}")
    for label, seconds in marks.items():
        print(f"  {label:<24}{seconds:>9.2f}")


def watches(results: dict[str, object]) -> None:
    """How long after the operator has written a job's end its watchers see it."""
    if not watch.available():
        print("watch: needs KUBECONFIG and K8SJOB_TEST_REGISTRY; see `make cluster`\n")
        return
    table = results["watch_s"] = watch.measure()
    print(f"{'seconds after the end':<44}{'median':>9}{'most':>9}")
    for label, row in table.items():
        print(f"{label:<44}{row['median']:>9.2f}{row['most']:>9.2f}")
    print()


PARTS = {
    "commands": command_lines,
    "training": training_runs,
    "strategies": strategy_costs,
    "memory": memory_at_peak,
    "checkpoints": saves,
    "startup": start_up,
    "watch": watches,
}


def main() -> None:
    """Run the rows and parts named on the command line, by default all rows."""
    rows = [*table.ROWS, "growth"]
    names = sys.argv[1:] or [*table.ROWS]
    if unknown := [name for name in names if name not in {*rows, *PARTS}]:
        sys.exit(f"{unknown[0]}: none of {', '.join([*rows, *PARTS])}")
    if chosen := [name for name in names if name in rows]:
        table.show(chosen)
    if parts := [name for name in names if name in PARTS]:
        results: dict[str, object] = {"machine": machine()}
        for part in parts:
            PARTS[part](results)
        target = Path(__file__).with_name("results.json")
        target.write_text(json.dumps(results, indent=2) + "\n")
        print(f"written: {target}")


if __name__ == "__main__":
    main()

"""The table of `make bench`: commands beside the tools that they replace, and how they grow."""

from __future__ import annotations

import itertools
import math
import os
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

import commands
import peers
import push
from loopback import cluster
from processes import Run, middle, ratio
from turns import alternate

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import BinaryIO

K8SJOB: Final = str(commands.BIN / "k8sjob")
STEPS: Final = """\
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
model = DistributedDataParallel(torch.nn.Linear(64, 64))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(10):
    optimizer.zero_grad()
    model(torch.rand(32, 64)).sum().backward()
    optimizer.step()
dist.destroy_process_group()
"""
JOB: Final = """\
name: {name}
namespace: blue
image: registry.example/team/bench@sha256:{digest}
run: {{command: ["true"]}}
replicas: {{workers: 1}}
policy: {{suspend: true}}
"""
WEIGHTS: Final = 256
SOURCES: Final = 128
DELAYS: Final = {"": 0.0, ", after 30 ms": 0.03}
"""The seconds that an apiserver takes for each answer, by what a row says of it."""


@dataclass(frozen=True)
class Row:
    """A command beside a tool.

    Attributes:
        name, runs: the command's, one for each turn.
        peer, peer_runs: the tool's; no runs where it is not installed.
        goal: the largest ratio; empty: none.
    """

    name: str
    runs: list[Run]
    peer: str
    peer_runs: list[Run]
    goal: str = ""

    def __str__(self) -> str:
        def times(runs: list[Run]) -> str:
            return f"{middle(runs, 'seconds'):.2f} ({middle(runs, 'cpu'):.2f})" if runs else ""

        names = ("seconds", "cpu")
        ratios = [
            f"{ratio(self.runs, self.peer_runs, name):.2f}" if self.peer_runs else "-"
            for name in names
        ]
        peer = f"{times(self.peer_runs) or 'not installed:'} {self.peer}"
        head = f"{ratios[0]:>6}{ratios[1]:>8}  {self.goal:<15}{self.name:<30}"
        return f"{head}{times(self.runs):<16}{peer}"


@dataclass(frozen=True)
class Tool:
    """A tool's command; argv is empty where it is not installed."""

    name: str
    argv: list[str]


def beside(name: str, argv: list[str], tool: Tool, goal: str = "", *, rounds: int = 5) -> Row:
    """Both commands in turns, of which the first warms the page cache."""
    ways = {"k8sjob": lambda: Run.of(argv)}
    if tool.argv:
        ways["peer"] = lambda: Run.of(tool.argv)
    runs = alternate(ways, rounds + 1)
    return Row(name, runs["k8sjob"][1:], tool.name, runs.get("peer", [])[1:], goal)


def kubectl() -> str | None:
    """The program itself: Google's dispatcher would ask for the server's version first."""
    built = sorted((Path.home() / ".cache/k8sjob-tests").glob("bin-*/kubectl"))
    program = shutil.which("kubectl") or (str(built[-1]) if built else None)
    versions = sorted(Path(program).resolve().parent.glob("kubectl.1.*")) if program else []
    return str(versions[-1]) if versions else program


def run(folder: Path) -> Iterator[Row]:
    """A script with two processes."""
    script = folder / "steps.py"
    script.write_text(STEPS)
    argv = [K8SJOB, "run", str(script), "--nproc", "2"]
    torchrun = Tool(
        "torchrun", [str(commands.BIN / "torchrun"), "--nproc-per-node", "2", str(script)]
    )
    with cluster():
        os.environ["OMP_NUM_THREADS"] = "1"  # as torchrun sets it
        yield beside("run, 2 processes, 10 steps", argv, torchrun, "0.50 of CPU", rounds=3)


def start(folder: Path) -> Iterator[Row]:
    """What reads a job.yaml, beside an empty program with the libraries that it needs."""
    ways = commands.commands(folder)
    floor = Tool("an import of 4 libraries", ways[f"python -c '{commands.FLOOR}'"])
    for name in ("--help", "render", "validate"):
        yield beside(name, ways[f"k8sjob {name}"], floor)
    torchx = ways["torchx run --dryrun"]
    installed = Path(torchx[0]).exists()
    # Relative names are of the folder, in which torchx looks for its script.
    tool = Tool("torchx run --dryrun", ["env", "-C", str(folder), *torchx] if installed else [])
    yield beside("render", ways["k8sjob render"], tool, "0.45")


def submit(folder: Path) -> Iterator[Row]:
    """One job that is not there yet."""
    client, numbers = kubectl(), iter(range(1000))

    def job() -> Path:
        file = folder / f"job-{next(numbers)}.yaml"
        file.write_text(JOB.format(name=file.stem, digest="a" * 64))
        return file

    def apply() -> Run:
        file = job()
        text = subprocess.run([K8SJOB, "render", str(file)], check=True, stdout=subprocess.PIPE)
        file.write_bytes(text.stdout)
        # Without the schema of a real apiserver, the fields are not validated by kubectl.
        argv = [str(client), "apply", "--validate=false", "-f", str(file)]
        return Run.of([*argv, "--dry-run=server"], argv)

    ways = {"k8sjob": lambda: Run.of([K8SJOB, "submit", str(job())])}
    for note, delay in DELAYS.items():
        with cluster() as server:
            server.delay = delay
            runs = alternate(ways | ({"kubectl": apply} if client else {}), 4)
        yield Row(
            f"submit{note}",
            runs["k8sjob"][1:],
            "kubectl's dry run and apply",
            runs.get("kubectl", [])[1:],
            "1.20, CPU 1.50",
        )


def jobs(_folder: Path) -> Iterator[Row]:
    """300 jobs."""
    client = kubectl()
    get = [client, "get", "pytorchjobs"] if client else []
    with cluster() as server:
        server.list_jobs(300)
        for note, server.delay in DELAYS.items():
            name = f"list, 300 jobs{note}"
            yield beside(name, [K8SJOB, "list"], Tool("kubectl get", get), "1.30")


class Weights(push.Context):
    """A folder whose edits change a large file, too."""

    def edit(self) -> None:
        """Write the file anew."""
        super().edit()
        with (self.folder / "large").open("wb") as file:
            self.write(file)

    def write(self, file: BinaryIO) -> None:
        """Random bytes, which no program compresses."""
        file.writelines(os.urandom(1 << 20) for _ in range(WEIGHTS))


class Sources(Weights):
    """The same with sources of Python, which are compressed and searched for credentials."""

    def write(self, file: BinaryIO) -> None:
        """The standard library, as often as it takes, after a line that differs."""
        file.write(b"# %d\n" % self.edits)
        files = itertools.cycle(sorted(Path(os.__file__).parent.rglob("*.py")))
        while file.tell() < SOURCES << 20:
            file.write(next(files).read_bytes())


def pushes(folder: Path) -> Iterator[Row]:
    """An edited line, nothing, and large files, on a small base that both tools have."""
    from registries import LAYERS, Address, Layout

    if not shutil.which("docker-registry"):
        print(f"{'-':>6}{'':<25}push: no docker-registry")
        return
    has_buildah = bool(shutil.which("buildah")) and os.geteuid() == 0
    note = "buildah, build and push (as root)"
    layout = Layout(folder / "layout")
    layout.index([layout.image(LAYERS)])
    with push.registry(folder / "data") as host:
        Address(host).put(layout, "bench/base:1")
        base = f"{host}/bench/base:1"

        def timed(kind: type[push.Context], rounds: int) -> dict[str, list[Run]]:
            place = folder / kind.__name__
            target = f"{host}/bench/{kind.__name__.lower()}"
            builders = {}
            if has_buildah:
                storage = place.with_suffix(".buildah")
                builders["buildah"] = push.Builder("buildah", storage, f"{target}-buildah")
            return push.timed(kind(place, 5, base, target), builders, rounds)

        runs = timed(push.Context, 5)
        edited, edited_name = runs["k8sjob"], "push, one line edited"
        yield Row(edited_name, edited, note, runs.get("buildah", []), "1.00")
        yield Row("push, nothing changed", runs["k8sjob, unchanged"], edited_name, edited, "0.30")
        for name, kind in ((f"{WEIGHTS} MiB", Weights), (f"{SOURCES} MiB of sources", Sources)):
            runs = timed(kind, 3)
            yield Row(f"push, {name}", runs["k8sjob"], note, runs.get("buildah", []))


ROWS: Final = {"run": run, "start": start, "submit": submit, "list": jobs, "push": pushes}


def grown(name: str, sizes: dict[int, Callable[[], Run]], unit: str, rounds: int = 3) -> str:
    """A line: CPU seconds at each size, and the exponent of what comes on top of the smallest.

    The start of a command is in each of its times, so it is in none of their differences.
    """
    least = [min(call().cpu for _ in range(rounds)) for call in sizes.values()]
    low, middle_size, high = sizes
    early, late = least[1] - least[0], least[2] - least[0]
    exponent = "  start"
    if early > 0.02:  # below, the clock's noise is larger
        exponent = f"{math.log(late / early) / math.log((high - low) / (middle_size - low)):7.2f}"
    rate = f"{(high - low) / late:,.0f} {unit} for a CPU second" if late > 0.02 else ""
    counts = " ".join(f"{size:>7,}" for size in sizes)
    return f"{exponent}  {name:<30}{counts}  {' '.join(f'{cpu:>7.2f}' for cpu in least)}  {rate}"


def growth(folder: Path) -> Iterator[str]:
    """How CPU seconds grow with jobs, replicas, lines and files."""
    yield f"{'exponent':>7} {'of CPU seconds':<30}{'at sizes':>23}{'CPU seconds':>24}"
    client, script = kubectl(), folder / "lines.py"
    script.write_text("import sys\nfor n in range(int(sys.argv[1])):\n    print(f'step {n} 0.5')\n")
    with cluster() as server:

        def with_jobs(count: int) -> Callable[[], Run]:
            def call() -> Run:
                server.list_jobs(count)
                return Run.of([K8SJOB, "list"])

            return call

        def with_job(argv: list[str], replicas: int, lines: int = 0) -> Callable[[], Run]:
            def call() -> Run:
                server.run_job(replicas, lines)
                return Run.of(argv)

            return call

        yield grown("list", {n: with_jobs(n) for n in (100, 1000, 10_000)}, "jobs", 2)

        def in_state(argv: list[str], replicas: int, state: str) -> Callable[[], Run]:
            def call() -> Run:
                server.hold_job(replicas, state)
                return Run.of(argv)

            return call

        replicas = (10, 100, 1000)
        for word, state in itertools.product(("status", "why"), ("pending", "failed", "crashing")):
            calls = {n: in_state([K8SJOB, word, "blue/job"], n, state) for n in replicas}
            yield grown(f"{word}, {state}", calls, "replicas", 2)
        watch = [K8SJOB, "watch", "blue/job"]
        calls = {n: with_job([*watch, "--no-logs"], n) for n in replicas}
        yield grown("watch", calls, "replicas", 2)
        lines = (1000, 10_000, 100_000)
        followed = {"watch": watch, "logs -f": [K8SJOB, "logs", "-f", "blue/job"]}
        if client:
            followed["kubectl logs -f"] = [client, "logs", "-f", "job-master-0"]
        for name, argv in followed.items():
            yield grown(f"lines: {name}", {n: with_job(argv, 1, n) for n in lines}, "lines", 2)
        ways = {n: lambda n=n: Run.of([K8SJOB, "run", str(script), "--", str(n)]) for n in lines}
        yield grown("lines: run", ways, "lines", 2)
    yield from files_pushed(folder)


def files_pushed(folder: Path) -> Iterator[str]:
    """First pushes of folders of many files."""
    from registries import LAYERS, Address, Layout

    if not shutil.which("docker-registry"):
        return
    layout = Layout(folder / "layout-of-growth")
    layout.index([layout.image(LAYERS)])
    with push.registry(folder / "data-of-growth") as host:
        Address(host).put(layout, "bench/base:1")
        contexts = {
            n: push.Context(folder / f"files-{n}", n, f"{host}/bench/base:1", f"{host}/bench/n{n}")
            for n in (10, 1000, 100_000)
        }
        calls = {
            n: lambda context=context: push.K8sjob()(context) for n, context in contexts.items()
        }
        yield grown("push, first", calls, "files", 1)
        for context in contexts.values():
            context.edit()
        yield grown("push, one line edited", calls, "files", 1)


def show(names: list[str]) -> None:
    """Print the rows of these groups, and `growth`."""
    loads = [os.getloadavg()[0]]
    try:
        peers.environment()  # installs torchx before anything is measured
    except subprocess.CalledProcessError as error:
        print(f"torchx cannot be installed: {error}")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        print(f"{'ratio':>6}{'of CPU':>8}  {'goal':<15}{'k8sjob':<30}{'s (of CPU)':<16}beside")
        for group in names:
            for line in growth(folder) if group == "growth" else ROWS[group](folder):
                print(line, flush=True)
    loads.append(os.getloadavg()[0])
    print(f"{os.cpu_count()} cores, load {loads[0]:.1f} before and {loads[1]:.1f} after")

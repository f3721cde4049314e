"""Whole processes: how long the command line takes, beside the official SDK and torchx."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

import peers
from processes import Run, middle
from turns import alternate

ROOT = Path(__file__).resolve().parent.parent
JOB = ROOT / "manifests" / "digits-ddp" / "job.yaml"
BIN = Path(sys.executable).parent
FLOOR = "import pydantic, yaml, click, jinja2; pydantic.BaseModel"
"""What render needs in any case."""


def commands(folder: Path) -> dict[str, list[str]]:
    """What is timed, by name. torchx renders the same shape of job: 4 replicas of one script."""
    peer = peers.environment()
    (folder / "main.py").write_text("print(1)\n")
    k8sjob = str(BIN / "k8sjob")
    return {
        **{
            f"python -c '{code}'": [sys.executable, "-c", code]
            for code in ("pass", "import pydantic; pydantic.BaseModel", FLOOR)
        },
        "k8sjob version": [k8sjob, "version"],
        "k8sjob --help": [k8sjob, "--help"],
        "k8sjob validate": [k8sjob, "validate", str(JOB)],
        "k8sjob render": [k8sjob, "render", str(JOB)],
        "import TrainingClient": [
            str(peer / "python"),
            "-c",
            "from kubeflow.training import TrainingClient",
        ],
        "torchx run --dryrun": [
            *(str(peer / "torchx"), "run", "--dryrun", "--workspace", ""),
            *("-s", "kubernetes", "-cfg", "queue=default,namespace=x"),
            *("dist.ddp", "--script", "main.py", "-j", "4x1", "--image", "x:1"),
        ],
    }


def measure(rounds: int = 11) -> dict[str, tuple[float, float]]:
    """Median seconds of each command by the clock, and of the processor; they take turns."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        ways = {
            label: partial(Run.of, argv, folder=folder) for label, argv in commands(folder).items()
        }
        runs = alternate(ways, rounds + 1)  # the first round warms the page cache
    return {
        label: (middle(runs[label][1:], "seconds"), middle(runs[label][1:], "cpu"))
        for label in ways
    }


def renderings_per_second(seconds: float = 2.0) -> float:
    """How many manifests one process renders in a second, spec already loaded."""
    from k8sjob import JobSpec, render

    spec = JobSpec.from_yaml(JOB.read_text())
    render(spec)
    count, start = 0, time.perf_counter()
    while (now := time.perf_counter()) - start < seconds:
        render(spec)
        count += 1
    return count / (now - start)


def installed() -> dict[str, float]:
    """The core install: number of packages, and MB on disk without compiled files."""
    with tempfile.TemporaryDirectory() as name:
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", name], check=True)
        pip = [sys.executable, "-m", "pip", "--python", f"{name}/bin/python", "install", "-q"]
        subprocess.run([*pip, "--no-compile", str(ROOT)], check=True)
        site = next(Path(name).glob("lib/python*/site-packages"))
        files = [path for path in site.rglob("*") if path.is_file() and path.suffix != ".pyc"]
        size = sum(path.stat().st_size for path in files)
        return {"packages": len(list(site.glob("*.dist-info"))), "megabytes": size / 1e6}

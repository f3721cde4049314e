"""From `k8sjob run` to the first step, split into its parts by the job's own events."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
JOB = ROOT / "manifests" / "digits-ddp" / "job.yaml"


def once() -> dict[str, float]:
    """One run of the main example: seconds from the command's start to each of its marks."""
    marks: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as state:
        argv = [str(Path(sys.executable).parent / "k8sjob"), "run", "-o", "json", str(JOB)]
        env = {**os.environ, "K8SJOB_STATE": state}
        start = time.time()
        with subprocess.Popen(argv, env=env, stdout=subprocess.PIPE, text=True) as process:
            for line in process.stdout or ():
                event = json.loads(line)
                kind, data = event["kind"], event["data"]
                now = time.time() - start
                if kind == "replica" and data.get("phase") == "Running":
                    marks.setdefault("replicas started", now)
                elif kind == "log":
                    marks.setdefault("first line of output", now)
                elif kind == "started":
                    marks.setdefault("group joined", event["time"] - start)
                    marks["of it: import torch"] = data.get("import_s", 0.0)
                    marks["of it: rendezvous"] = data.get("rendezvous_s", 0.0)
                elif kind == "progress":
                    marks.setdefault("first progress", event["time"] - start)
                elif kind == "finished":
                    marks.setdefault("training finished", event["time"] - start)
        marks["command returned"] = time.time() - start
    return marks


def measure(rounds: int = 3) -> dict[str, float]:
    """Medians over a few runs."""
    runs = [once() for _ in range(rounds)]
    return {mark: statistics.median(run[mark] for run in runs if mark in run) for mark in runs[-1]}

"""Submitting: whole processes beside `kubectl apply` of the same manifest, on a real cluster.

It needs the cluster that KUBECONFIG names (`make cluster` prints one), and leaves nothing there but
a namespace's name in its events.
"""

from __future__ import annotations

import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import uuid
from pathlib import Path

BIN = Path(sys.executable).parent
JOB = """\
name: {name}
namespace: {namespace}
image: registry.example/team/bench@sha256:{digest}
run: {{command: ["true"]}}
replicas: {{workers: 1}}
policy: {{suspend: true}}
"""


def available() -> bool:
    """Whether there is a cluster to measure on."""
    return bool(os.environ.get("KUBECONFIG")) and shutil.which("kubectl") is not None


def measure(rounds: int = 15) -> dict[str, dict[str, float]]:
    """Seconds of each way to make one job: the median and the least; the order alternates.

    The jobs are made suspended, so that no pod disturbs the measurement.
    """
    namespace = f"bench-{uuid.uuid4().hex[:8]}"
    subprocess.run(["kubectl", "create", "namespace", namespace], check=True, capture_output=True)
    times: dict[str, list[float]] = {}
    try:
        with tempfile.TemporaryDirectory() as name:
            for number in range(rounds + 1):
                ways = list(_ways(Path(name), namespace, number).items())
                for label, argv in ways if number % 2 else reversed(ways):
                    start = time.perf_counter()
                    subprocess.run(argv, check=True, capture_output=True)
                    if number:  # the first round warms the page cache
                        times.setdefault(label, []).append(time.perf_counter() - start)
            labels = [label for label, _ in ways]
    finally:
        subprocess.run(
            ["kubectl", "delete", "namespace", namespace, "--wait=false"],
            check=True,
            capture_output=True,
        )
    return {
        label: {"median": statistics.median(times[label]), "least": min(times[label])}
        for label in labels
    }


def _ways(folder: Path, namespace: str, number: int) -> dict[str, list[str]]:
    """Commands that each make a job of their own, all of the same form."""
    k8sjob = str(BIN / "k8sjob")
    files = {}
    for way in ("apply", "python", "kubectl"):
        files[way] = folder / f"{way}.yaml"
        values = {"name": f"{way}-{number}", "namespace": namespace, "digest": "a" * 64}
        files[way].write_text(JOB.format(**values))
    manifest = folder / "manifest.yaml"
    with manifest.open("w") as out:
        subprocess.run([k8sjob, "render", str(files["apply"])], check=True, stdout=out)
    return {
        "kubectl apply": ["kubectl", "apply", "-f", str(manifest)],
        "k8sjob render": [k8sjob, "render", str(files["python"])],
        "submit --client python": [k8sjob, "submit", str(files["python"])],
        "submit --client kubectl": [k8sjob, "submit", str(files["kubectl"]), "--client", "kubectl"],
    }

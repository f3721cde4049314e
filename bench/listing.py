"""`k8sjob list` of a thousand jobs of a real cluster: seconds and memory, beside kubectl's."""

from __future__ import annotations

import os
import subprocess
import sys
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

BIN = Path(sys.executable).parent
JOBS = 1000


def measure(rounds: int = 5) -> dict[str, dict[str, float]]:
    """Least seconds and largest MB of each command, over jobs that were made suspended."""
    namespace = f"bench-{uuid.uuid4().hex[:8]}"
    subprocess.run(["kubectl", "create", "namespace", namespace], check=True, capture_output=True)
    try:
        _fill(namespace)
        listing = [str(BIN / "k8sjob"), "list", "-n", namespace]
        ways = {
            "kubectl get": ["kubectl", "get", "pytorchjobs", "-n", namespace],
            "k8sjob list": listing,
            "k8sjob list -o json": [*listing, "-o", "json"],
            "k8sjob list, kubectl": [*listing, "--client", "kubectl"],
        }
        found: dict[str, dict[str, float]] = {}
        for _ in range(rounds):
            for label, argv in ways.items():
                seconds, megabytes = _run(argv)
                best = found.setdefault(label, {"seconds": seconds, "megabytes": megabytes})
                best["seconds"] = min(best["seconds"], seconds)
                best["megabytes"] = max(best["megabytes"], megabytes)
        return found
    finally:
        deletion = ["kubectl", "delete", "namespace", namespace, "--wait=false"]
        subprocess.run(deletion, check=True, capture_output=True)


def _fill(namespace: str) -> None:
    """A thousand jobs of a real size: each is some 6 kB of JSON."""
    from k8sjob.backends.cluster import connect
    from k8sjob.rendering import manifest
    from k8sjob.spec import load

    backend = connect(namespace=namespace)
    spec = load(Path(__file__).parent.parent / "manifests/digits-ddp")
    job = manifest(spec.with_(policy={"suspend": True}), f"registry.example/x@sha256:{'a' * 64}")

    def make(number: int) -> None:
        metadata = {**job.metadata, "name": f"job-{number}"}
        backend.create_manifest(replace(job, raw={**job.raw, "metadata": metadata}))

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(make, range(JOBS)))


def _run(argv: list[str]) -> tuple[float, float]:
    start = time.perf_counter()
    with subprocess.Popen(argv, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        lines = process.stdout.read().count(b"job-")
        _, status, used = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    assert process.returncode == 0
    assert lines >= JOBS
    return time.perf_counter() - start, used.ru_maxrss / 1000

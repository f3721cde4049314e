"""The end of a job: how long after the operator has written it a watcher sees it.

It needs a cluster with the operator and a registry that its nodes pull from, as `make cluster`
prints them (KUBECONFIG, K8SJOB_TEST_REGISTRY). What the operator writes is seen by a bare watch
request of this process; all watchers wait for the same job at the same time.
"""

from __future__ import annotations

import json
import os
import random
import statistics
import subprocess
import sys
import threading
import time
import uuid
from pathlib import Path

import peers

BIN = Path(sys.executable).parent
JOBS = "/apis/kubeflow.org/v1/namespaces/{}/pytorchjobs"
SDK = """
import sys, time
from kubeflow.training import TrainingClient
client = TrainingClient(namespace=sys.argv[1])
print("ready", flush=True)
client.wait_for_job_conditions(sys.argv[2], polling_interval=int(sys.argv[3]))
"""
DEADLINE = 180.0


def available() -> bool:
    """Whether there is a cluster to measure on."""
    return bool(os.environ.get("KUBECONFIG") and os.environ.get("K8SJOB_TEST_REGISTRY"))


def measure(rounds: int = 5) -> dict[str, dict[str, float]]:
    """Seconds from the operator's word to each watcher's: the median and the most."""
    from k8sjob.backends.cluster import connect

    namespace = f"bench-{uuid.uuid4().hex[:8]}"
    subprocess.run(["kubectl", "create", "namespace", namespace], check=True, capture_output=True)
    late: dict[str, list[float]] = {}
    try:
        backend = connect(namespace=namespace)
        for number in range(rounds):
            for label, seconds in _one_job(backend, f"watch-{number}").items():
                late.setdefault(label, []).append(seconds)
    finally:
        delete = ["kubectl", "delete", "namespace", namespace, "--wait=false"]
        subprocess.run(delete, check=True, capture_output=True)
    return {
        label: {"median": statistics.median(found), "most": max(found)}
        for label, found in late.items()
    }


def _one_job(backend, name: str) -> dict[str, float]:
    """How late each watcher was with one job, which ends at a random moment of their intervals."""
    ref = backend.create_manifest(_manifest(name, random.uniform(20, 35)))
    children = {label: _start(argv) for label, argv in _watchers(ref).items()}
    ends: dict[str, float] = {}
    threads = [threading.Thread(target=_written, args=(backend, ref, ends))]
    threads += [
        threading.Thread(target=_seen, args=(label, child, ends))
        for label, child in children.items()
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE)
    failed = [label for label, child in children.items() if child.poll() != 0]
    for child in children.values():
        child.kill()
        child.wait()
    backend.delete(ref)
    if failed:
        raise RuntimeError(f"{', '.join(failed)} did not see the end of {ref}")
    written = ends.pop("written")
    return {label: when - written for label, when in ends.items()}


def _watchers(ref) -> dict[str, list[str]]:
    """The processes that wait; the newer SDK, which knows no PyTorchJob, polls every 2 s."""
    k8sjob, sdk = str(BIN / "k8sjob"), [str(peers.environment() / "python"), "-c", SDK]
    return {
        "k8sjob watch": [k8sjob, "watch", str(ref), "-o", "json"],
        "k8sjob watch, kubectl": [k8sjob, "watch", str(ref), "-o", "json", "--client", "kubectl"],
        "kubeflow-training, 15 s": [*sdk, ref.namespace, ref.name, "15"],
        "the same, every 2 s": [*sdk, ref.namespace, ref.name, "2"],
    }


def _start(argv: list[str]) -> subprocess.Popen[str]:
    return subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)


def _written(backend, ref, ends: dict[str, float]) -> None:
    query = {"watch": "true", "fieldSelector": f"metadata.name={ref.name}"}
    for line in backend.transport.stream(JOBS.format(ref.namespace), query=query, idle=DEADLINE):
        status = json.loads(line)["object"].get("status") or {}
        for condition in status.get("conditions") or []:
            if condition["type"] in {"Succeeded", "Failed"} and condition["status"] == "True":
                ends["written"] = time.time()
                return


def _seen(label: str, child: subprocess.Popen[str], ends: dict[str, float]) -> None:
    """When k8sjob has printed the end, and when a process has ended."""
    for line in child.stdout or ():
        if '"kind": "job"' in line and '"Succeeded"' in line:
            ends[f"{label}: printed"] = time.time()
    child.wait()
    ends[f"{label}: process ended"] = time.time()


def _manifest(name: str, seconds: float) -> dict:
    image = f"{os.environ['K8SJOB_TEST_REGISTRY']}/k8sjob-tests:base"
    command = ["sh", "-c", f"sleep {seconds:.2f}"]
    container = {"name": "pytorch", "image": image, "command": command}
    template = {"spec": {"containers": [container]}}
    master = {"replicas": 1, "restartPolicy": "Never", "template": template}
    return {
        "apiVersion": "kubeflow.org/v1",
        "kind": "PyTorchJob",
        "metadata": {"name": name},
        # The SDK's model refuses a job without a policy.
        "spec": {
            "runPolicy": {"cleanPodPolicy": "Running"},
            "pytorchReplicaSpecs": {"Master": master},
        },
    }

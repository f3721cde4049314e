"""Thousands of nodes and pods: what list, watch and the doctor cost there.

    python bench/scale.py [--nodes 1000] [--jobs 1000] [--replicas 10] [--big 1000] [--only page]

Starts a cluster of its own (see tests/cluster/bed; root on Linux) with the real apiserver,
scheduler and training operator, and with nodes of kwok's, whose pods run without a machine. All of
the pods are made by the operator.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import threading
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from collections.abc import Callable

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests"))

from cluster.bed import Bed  # noqa: E402 - of the tests
from cluster.bed.build import go  # noqa: E402 - as the line before
from gomodules import source  # noqa: E402 - as the line before

from k8sjob.backends.cluster import connect  # noqa: E402 - as the line before

PARTS = ("etcd", "apiserver", "controller-manager", "scheduler", "operator")
FAST = ("--kube-api-qps=500", "--kube-api-burst=1000")
CONTROLLERS = "--controllers=serviceaccount-controller,namespace-controller"
POLL = 2.0
KWOK = "sigs.k8s.io/kwok@v0.7.0"
FAKE = "kwok.x-k8s.io/node"  # annotation, label and taint of a node of kwok's


def job(namespace: str, name: str, workers: int) -> dict:
    """A job whose pods go to fake nodes."""
    pod = {
        "spec": {
            "tolerations": [{"operator": "Exists"}],
            "nodeSelector": {FAKE: "fake"},
            "containers": [{"name": "pytorch", "image": "x:1", "command": ["train"]}],
        }
    }
    roles = {"Master": {"replicas": 1, "restartPolicy": "Never", "template": pod}}
    if workers:
        roles["Worker"] = {"replicas": workers, "restartPolicy": "Never", "template": pod}
    return {
        "apiVersion": "kubeflow.org/v1",
        "kind": "PyTorchJob",
        "metadata": {"name": name, "namespace": namespace},
        "spec": {"pytorchReplicaSpecs": roles},
    }


def start(**options: int) -> Bed:
    """A bed whose brakes are off: components have limits that suit small clusters."""
    bed = Bed(parts=PARTS, **options)
    make = bed._make

    def unbraked() -> None:
        make()
        bed.commands["operator"] += [*FAST, "--controller-threads=8"]
        bed.commands["scheduler"] += FAST
        bed.commands["controller-manager"] += [*FAST, CONTROLLERS]

    bed._make = unbraked
    return bed


def add_nodes(bed: Bed, count: int) -> None:
    """Add nodes of 8 GPUs without machines: kwok says that they are ready, and their pods run."""
    if not (bed.bin / "kwok").exists():
        go("kwok", ["install", "-trimpath", KWOK.replace("@", "/cmd/kwok@")], bed.bin, bed.bin)
    stages = source(KWOK) / "kustomize/stage"
    files = [
        file for part in ("node", "pod") for file in sorted(stages.glob(f"{part}/fast/*.yaml"))
    ]
    texts = [file.read_text() for file in files if file.name != "kustomization.yaml"]
    (bed.folder / "conf/stages.yaml").write_text("\n---\n".join(texts))
    bed.commands["kwok"] = [
        "/run/bin/kwok",
        "--kubeconfig=/run/bed/conf/admin.kubeconfig",
        f"--manage-nodes-with-annotation-selector={FAKE}=fake",
        "--config=/run/bed/conf/stages.yaml",
    ]
    bed.start("kwok")
    size = {"cpu": "64", "memory": "512Gi", "pods": "1000", "nvidia.com/gpu": "8"}
    for number in range(count):
        marks = {"annotations": {FAKE: "fake"}, "labels": {FAKE: "fake"}}
        node = {
            "kind": "Node",
            "metadata": {"name": f"fake-{number}", **marks},
            "spec": {"taints": [{"key": FAKE, "value": "fake", "effect": "NoSchedule"}]},
            "status": {"capacity": size, "allocatable": size},
        }
        bed.create(node)
    while sum(map(is_ready, bed.read("nodes"))) < count:
        time.sleep(POLL)


def is_ready(node: dict) -> bool:
    """Whether a node takes pods."""
    conditions = node["status"].get("conditions", ())
    return any((c["type"], c["status"]) == ("Ready", "True") for c in conditions)


class Child:
    """A command of k8sjob's whose output and memory are looked at while it runs."""

    def __init__(self, *argv: str) -> None:
        self.lines: list[tuple[float, str]] = []
        self.peak = 0
        self.samples: list[float] = []
        self.began = time.monotonic()
        self.process = subprocess.Popen(
            [sys.executable, *argv], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        for line in self.process.stdout:
            self.lines.append((time.monotonic(), line))

    def sample(self) -> float:
        """Megabytes that it has in memory now."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        kib = next(int(line.split()[1]) for line in status.splitlines() if "VmRSS" in line)
        self.samples.append(kib / 1024)
        return kib / 1024

    def end(self, *, ask: bool = False) -> tuple[float, float, float]:
        """Seconds that it ran, megabytes at its peak, seconds of CPU."""
        if ask:
            self.process.terminate()
        _, status, used = os.wait4(self.process.pid, 0)
        seconds = time.monotonic() - self.began
        self.process.returncode = os.waitstatus_to_exitcode(status)
        self._reader.join()
        self.process.stdout.close()
        return seconds, used.ru_maxrss / 1024, used.ru_utime + used.ru_stime


def until(done, what: str, deadline: float = 1800.0) -> float:
    """Waits; the seconds that it took."""
    begin = time.monotonic()
    while not done():
        if time.monotonic() - begin > deadline:
            raise SystemExit(f"waited {deadline:.0f} s in vain for {what}")
        time.sleep(POLL)
    return time.monotonic() - begin


def fill(bed: Bed, jobs: int, replicas: int) -> float:
    """Make the jobs in ten namespaces and wait until all their pods run; seconds."""
    for number in range(10):
        bed.kubectl("create", "namespace", f"team-{number}")
    time.sleep(3)  # the namespaces' service accounts
    begin = time.monotonic()
    for number in range(jobs):
        team = f"team-{number % 10}"
        path = f"/apis/kubeflow.org/v1/namespaces/{team}/pytorchjobs"
        code, note = bed.access.request("POST", path, job(team, f"job-{number}", replicas - 1))
        if code != 201:
            raise SystemExit(f"{path}: {code} {note[:200]!r}")

    def running() -> bool:
        found = connect().jobs(all_namespaces=True)
        counts = [
            role.get("active", 0)
            for snapshot in found
            for role in snapshot.job.part("status", "replicaStatuses").values()
        ]
        print(f"  {sum(counts)} of {jobs * replicas} pods run", file=sys.stderr)
        return sum(counts) == jobs * replicas

    until(running, "the pods", deadline=3600)
    return time.monotonic() - begin


def commands() -> dict[str, dict[str, float]]:
    """Whole processes, the median of five, with the memory at the peak."""
    results = {}
    for client in ("python", "kubectl"):
        for args in (("list", "-A"), ("list", "-A", "-o", "json"), ("doctor", "-n", "team-0")):
            runs = []
            for _ in range(5):
                child = Child("-m", "k8sjob", *args, "--client", client)
                runs.append(child.end())
            label = f"{' '.join(args)} ({client})"
            seconds, megabytes, cpu = (
                statistics.median(column) for column in zip(*runs, strict=True)
            )
            results[label] = {"seconds": seconds, "megabytes": megabytes, "cpu_seconds": cpu}
            print(f"{label:<32}{seconds:>8.2f} s{megabytes:>8.0f} MB{cpu:>8.2f} s CPU")
    return results


def watch_all(bed: Bed, jobs: int, seconds: float = 60.0) -> dict[str, float]:
    """Every job, while each of them changes again and again: does the memory grow?"""
    child = Child("-m", "k8sjob", "watch", "-A", "-o", "json")
    until(lambda: len(child.lines) > 0, "the first jobs")
    time.sleep(5)
    begin, changes = time.monotonic(), 0
    while time.monotonic() - begin < seconds:
        number = changes % jobs
        path = f"/apis/kubeflow.org/v1/namespaces/team-{number % 10}/pytorchjobs/job-{number}"
        change = {"metadata": {"labels": {"turn": str(changes)}}}
        _patch(bed, path, change)
        changes += 1
        if changes % 100 == 0:
            child.sample()
    third = max(len(child.samples) // 3, 1)
    first = statistics.median(child.samples[:third])
    last = statistics.median(child.samples[-third:])
    _, peak, cpu = child.end(ask=True)
    note = f"{changes} changes: {first:.0f} MB at first, {last:.0f} at last, {peak:.0f} at its peak"
    print(f"{'watch -A':<32}{note}, {cpu / seconds:.0%} of a CPU")
    return {"changes": changes, "first_mb": first, "last_mb": last, "peak_mb": peak}


def big_job(bed: Bed, workers: int) -> dict[str, float]:
    """One job of so many workers, from its making to its end: how far behind is the watch?"""
    bed.kubectl("create", "namespace", "big")
    time.sleep(3)
    jobs, pods = "/apis/kubeflow.org/v1/namespaces/big/pytorchjobs", "/api/v1/namespaces/big/pods"
    made = job("big", "big", workers)
    made["spec"]["runPolicy"] = {"suspend": True}  # until the watch looks at it
    bed.access.request("POST", jobs, made)
    with Server(pods, _running) as of_pods, Server(jobs, _succeeded) as of_jobs:
        child = Child("-m", "k8sjob", "watch", "big/big", "--no-logs", "-o", "json")
        until(lambda: len(child.lines) > 0, "the watch to begin")
        _patch(bed, f"{jobs}/big", {"spec": {"runPolicy": {"suspend": False}}})
        took = until(lambda: len(of_pods.note) == workers + 1, "its pods")
        until(lambda: len(_told(child)) == workers + 1, "the watch", 120)
        _patch(bed, f"{pods}/big-master-0/status", {"status": {"phase": "Succeeded"}})
        until(lambda: of_jobs.note, "its end")
        _, peak, cpu = child.end()
    told = _told(child)
    behind = [told[name] - at for name, at in of_pods.note.items()]
    results = {
        "workers": workers,
        "seconds_to_run": took,
        "behind_median_s": statistics.median(behind),
        "behind_most_s": max(behind),
        "end_seen_s": child.lines[-1][0] - of_jobs.note["big"],
        "peak_mb": peak,
        "cpu_s": cpu,
    }
    print(
        f"{f'watch of {workers} workers':<32}all run after {took:.0f} s; behind by"
        f" {results['behind_median_s']:.2f} s (median), {max(behind):.2f} s (most); its end seen"
        f" after {results['end_seen_s']:.2f} s; {peak:.0f} MB; {cpu:.1f} s CPU"
    )
    return results


def page(jobs: int) -> dict[str, dict[str, float]]:
    """`k8sjob ui` in Chromium: until the page has painted, and until all jobs are on it.

    The first time the server has just begun to list the jobs; then it knows them.
    """
    from selenium import webdriver

    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium")
    for argument in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage"):
        options.add_argument(argument)
    service = webdriver.ChromeService(shutil.which("chromedriver"))
    results = {}
    with webdriver.Chrome(options=options, service=service) as driver:
        driver.get("about:blank")
        child = Child("-m", "k8sjob", "ui", "-A", "--client", "python")
        until(lambda: child.lines, "the address of the page", 60)
        address = child.lines[0][1].strip()
        for turn in ("first", "second", "third"):
            driver.get("about:blank")
            driver.get(address)
            driver.set_script_timeout(120)
            seconds = driver.execute_async_script(_ALL_ROWS, jobs)
            painted = driver.execute_script(
                "return performance.getEntriesByName('first-contentful-paint')[0].startTime"
            )
            results[turn] = {"painted": painted / 1000, "all": seconds / 1000}
            note = f"painted after {painted / 1000:.2f} s, all jobs after {seconds / 1000:.2f} s"
            print(f"{f'ui, {turn} look':<32}{note}; server {child.sample():.0f} MB")
    _, peak, cpu = child.end(ask=True)
    print(f"{'ui':<32}{peak:.0f} MB at the peak, {cpu:.1f} s CPU")
    return results | {"server": {"peak_mb": peak, "cpu_s": cpu}}


_ALL_ROWS = """
    const [jobs, done] = arguments;
    const look = () => {
      if (document.querySelectorAll(".jobs tbody tr").length < jobs) return setTimeout(look, 5);
      requestAnimationFrame(() => setTimeout(() => done(performance.now()), 0));
    };
    look();
"""


def _patch(bed: Bed, path: str, change: dict) -> None:
    code, note = bed.access.request("PATCH", path, change, "application/merge-patch+json")
    if code != 200:
        raise SystemExit(f"{path}: {code} {note[:200]!r}")


class Server:
    """Notes when the apiserver first says of each thing that it is so, while a `with` lasts.

    Args:
        path: what is watched.
        name: the name to note for an object; empty for nothing.
    """

    def __init__(self, path: str, name: Callable[[dict], str]) -> None:
        self.note: dict[str, float] = {}
        self._path, self._name = path, name
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._read)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _read(self) -> None:
        query = {"watch": "1", "resourceVersion": "0"}
        for line in connect().transport.stream(self._path, query=query, stop=self._stop):
            if name := self._name(json.loads(line)["object"]):
                self.note.setdefault(name, time.monotonic())


def _running(pod: dict) -> str:
    running = (pod.get("status") or {}).get("phase") == "Running"
    return pod["metadata"]["name"].removeprefix("big-") if running else ""


def _succeeded(found: dict) -> str:
    conditions = (found.get("status") or {}).get("conditions") or ()
    ended = any(c["type"] == "Succeeded" and c["status"] == "True" for c in conditions)
    return found["metadata"]["name"] if ended else ""


def _told(child: Child) -> dict[str, float]:
    """When the watch first said of each replica that it runs."""
    told: dict[str, float] = {}
    for at, line in list(child.lines):
        event = json.loads(line)
        if event.get("kind") == "replica" and event["data"].get("phase") == "Running":
            told.setdefault(event["replica"], at)
    return told


def main() -> None:
    """Measure, print, and write bench/results-scale.json."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, default in (("nodes", 1000), ("jobs", 1000), ("replicas", 10), ("big", 1000)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--only", choices=("commands", "watch", "big", "page"))
    asked = parser.parse_args()
    results: dict[str, object] = {"load_before": os.getloadavg(), **vars(asked)}
    with start() as bed:
        os.environ.update(bed.env)
        add_nodes(bed, asked.nodes)
        results["fill_seconds"] = fill(bed, asked.jobs, asked.replicas)
        print(
            f"{asked.nodes} nodes, {asked.jobs} jobs, {asked.jobs * asked.replicas} pods:"
            f" running after {results['fill_seconds']:.0f} s"
        )
        measurements = {
            "commands": commands,
            "page": partial(page, asked.jobs),
            "watch": partial(watch_all, bed, asked.jobs),
            "big": partial(big_job, bed, asked.big),
        }
        for name, measure in measurements.items():
            if asked.only in {None, name}:
                results[name] = measure()
    results["load_after"] = os.getloadavg()
    results["cores"] = os.cpu_count()
    (ROOT / "bench/results-scale.json").write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()

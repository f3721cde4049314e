"""Faults played on a running job: what its user saw, how long it took, how many steps came again.

    python bench/faults.py [TARGET ...]

For each target it starts a cluster (see tests/cluster/bed; root on Linux), submits one job of four
replicas, which saves a checkpoint after each epoch of twenty steps, and runs a `k8sjob watch`
beside it. One fault after the other is played; a fault is over with the first step that is done
again, or when what was taken away is back. Then jobs that cannot start: how long until their cause
is told. Prints three tables. Without arguments it plays all targets, and writes the tables into
docs/reference/faults.md.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests"))

from cluster.bed import Bed  # noqa: E402 - of the tests

from k8sjob.backends.api import JobRef  # noqa: E402 - after the path
from k8sjob.backends.cluster import connect  # noqa: E402 - the same
from k8sjob.observe.diagnose import Cause, diagnose  # noqa: E402 - the same
from k8sjob.observe.status import job_status  # noqa: E402 - the same
from k8sjob.targets.api import JobState  # noqa: E402 - the same
from k8sjob.targets.jobs import job_of  # noqa: E402 - the same

PAGE = ROOT / "docs/reference/faults.md"
MARK = "<!-- measured: bench/faults.py -->\n"
LIMIT = 180.0
PAUSE = 2.0
"""Seconds between two steps that tell a pause from the pace of the training."""
PROGRAM = """
import time
import torch
from k8sjob import runtime

class Slow(torch.utils.data.TensorDataset):
    def __getitem__(self, index):
        time.sleep(0.05 / 8)
        return super().__getitem__(index)

generator = torch.Generator().manual_seed(0)
data = Slow(torch.randn(640, 16, generator=generator), torch.randn(640, 1, generator=generator))
with runtime.session(seed=1) as job:
    run = job.prepare(
        lambda: torch.nn.Linear(16, 1),
        loss=torch.nn.functional.mse_loss,
        optimizer=(torch.optim.SGD, {"lr": 0.01}),
    )
    for epoch in run.epochs(100_000):
        for inputs, targets in run.batches(data, batch_size=8):
            run.step(inputs, targets)
            if job.rank == 0:
                print(f"STEP {run.steps}", flush=True)
"""
JOB = """
name: faults
image: {{repository: {registry}/faults, base: "{base}"}}
replicas: {{workers: 3}}
resources: {{cpu: 1, memory: 2Gi, requests: {{cpu: 100m, memory: 256Mi}}}}
run: {{script: main.py, hang_timeout: 10s, env: {{OMP_NUM_THREADS: "1"}}}}
checkpoint: {{dir: /checkpoints, every: epoch, keep: 2}}
volumes: [{{name: checkpoints, mount: /checkpoints, host_path: /tmp/saves}}]
policy: {{max_restarts: 100, termination_grace: 10s}}
target: {target}
"""
CONTROLLERS = {
    "pytorchjob": "operator",
    "job": "controller-manager",
    "jobset": "jobset",
    "trainjob": "trainer",
}
"""The component of the bed that keeps jobs of a target."""
BUILT_IN = ("pytorchjob", "job")
"""Targets whose controllers every bed has."""


class Outcome(NamedTuple):
    """A fault of one target.

    Attributes:
        seen: the first lines that the watcher saw.
        cost: seconds until the next step, steps repeated and lines missing; or that it continued.
    """

    fault: str
    seen: str
    cost: str


class Told(NamedTuple):
    """A job that does not start: what is said of it, how soon, and how soon it runs after that."""

    fault: str
    finding: str
    seconds: float
    recovered: float | None


class Watcher:
    """What a user sees who watches the job: the lines of `k8sjob watch`, and when each came."""

    def __init__(self, environ: dict[str, str]) -> None:
        self.lines: list[tuple[float, str]] = []
        self.steps: list[tuple[float, int]] = []
        self.process = subprocess.Popen(
            [sys.executable, "-m", "k8sjob", "watch", "default/faults", "-o", "plain"],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=environ,
        )
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        for line in self.process.stdout:
            now, (who, _, detail) = time.monotonic(), line.rstrip().partition("| ")
            if detail.startswith("STEP "):
                self.steps.append((now, int(detail[5:])))
            elif detail and not detail.startswith("epoch "):
                self.lines.append((now, f"{who.strip()}: {detail}"))

    def said_since(self, moment: float) -> list[str]:
        """The lines after a moment, without what every start says."""
        dull = ("processes joined", "checkpoint", "resumed", "of 4, 1 process", "libuv")
        lines = (text for when, text in self.lines if when >= moment)
        return [text for text in lines if not any(word in text for word in dull)]

    def missing_since(self, moment: float) -> int:
        """Lines of steps that never came: numbers that were jumped over."""
        numbers = [step for when, step in self.steps if when >= moment - 5]
        return sum(b - a - 1 for a, b in itertools.pairwise(numbers) if b > a + 1)

    def going_on(self, moment: float) -> tuple[float, int] | None:
        """Seconds until training went on after a pause, and how many steps came again.

        None: it has not yet. A group that was asked to stop has saved the very step it was at.
        """
        before = max(step for when, step in self.steps if when < moment)
        for (then, last), (when, step) in itertools.pairwise(list(self.steps)):
            if when > moment and (step <= last or when - then > PAUSE):
                return when - moment, max(last, before) - step + 1
        return None

    def began_again(self, moment: float) -> bool:
        """Whether a step came again."""
        pairs = itertools.pairwise(step for when, step in list(self.steps) if when > moment)
        return any(step <= last for last, step in pairs)


class Stage:
    """The cluster, the job and its watcher."""

    def __init__(self, bed: Bed, target: str = "pytorchjob") -> None:
        self.bed, self.target = bed, target
        self.backend = connect(kubeconfig=bed.kubeconfig, namespace="default")
        self.environ = {**os.environ, **bed.env}
        self.rows: list[Outcome] = []

    def begin(self, home: Path) -> None:
        """Submit the job and wait until it trains."""
        self.k8sjob("submit", str(home / "job.yaml"), "-n", "default")
        self.watcher = Watcher(self.environ)
        self.await_steps(5)

    def k8sjob(self, *argv: str) -> None:
        """A command of k8sjob's, which must succeed."""
        subprocess.run([sys.executable, "-m", "k8sjob", *argv], env=self.environ, check=True)

    def await_steps(self, count: int) -> None:
        """Wait for so many more steps."""
        wanted, end = len(self.watcher.steps) + count, time.monotonic() + LIMIT
        while len(self.watcher.steps) < wanted:
            if time.monotonic() > end:
                raise TimeoutError("\n".join(text for _, text in self.watcher.lines[-30:]))
            time.sleep(0.05)

    def play(self, fault: str, action: Callable[[], object], *, pauses: bool) -> None:
        """Play one fault and wait until it is over."""
        self.await_steps(30)
        moment = time.monotonic()
        action()
        over = None
        while pauses and over is None and time.monotonic() < moment + LIMIT:
            time.sleep(0.05)
            over = self.watcher.going_on(moment)
        if over or not pauses:
            self.await_steps(10 if pauses else 100)  # what comes late is seen, too
        missing = self.watcher.missing_since(moment)
        if over:
            cost = f"{over[0]:.0f} s, {over[1]}, {missing}"
        elif pauses:
            cost = f"not within {LIMIT:.0f} s"
        else:
            cost = "began again" if self.watcher.began_again(moment) else f"continued, 0, {missing}"
        seen = "; ".join(self.watcher.said_since(moment)[:2]) or "nothing"
        self.rows.append(Outcome(fault, seen, cost))
        print(self.rows[-1], flush=True)

    def signal(self, replica: str, number: int) -> Callable[[], object]:
        """Signals the training process of a replica."""
        code = (
            "import os, pathlib\n"
            "for f in pathlib.Path('/proc').glob('[0-9]*/cmdline'):\n"
            "    pid = int(f.parent.name)\n"
            "    forks = 'fork' in f.with_name('comm').read_text()\n"
            "    if pid != os.getpid() and not forks and b'agent.rank_main' in f.read_bytes():\n"
            f"        os.kill(pid, {number})"
        )
        return lambda: self.bed.kubectl("exec", self.pod(replica), "--", "python3", "-c", code)

    def pod(self, replica: str, *, host: bool = False) -> str:
        """The name of a replica's pod, or its host name."""
        now = self.backend.snapshot(self.backend.find("faults"))
        (pod,) = [pod for pod in now.pods if now.job.replica_of(pod) == replica]
        name: str = pod["metadata"]["name"]
        return pod["spec"].get("hostname", name) if host else name

    def end(self, replica: str) -> Callable[[], object]:
        """Kills the first process of a replica's container, so that the kubelet has to start it."""

        def action() -> None:
            name = self.pod(replica, host=True)
            for process in Path("/proc").glob("[0-9]*"):
                with contextlib.suppress(OSError):
                    here = f"HOSTNAME={name}".encode()
                    if here not in (process / "environ").read_bytes().split(b"\0"):
                        continue
                    if b"k8sjob.runtime" in (process / "cmdline").read_bytes().split(b"\0"):
                        os.kill(int(process.name), signal.SIGKILL)

        return action

    def delete(self, *replicas: str) -> Callable[[], object]:
        """Deletes pods, as the drain of a node does."""

        def action() -> None:
            self.bed.kubectl("delete", "pod", *map(self.pod, replicas), "--wait=false")

        return action

    def resume(self) -> None:
        """Suspends the job, and resumes it once its pods have ended."""
        self.k8sjob("suspend", "default/faults")
        self.k8sjob("resume", "default/faults")

    def away(self, component: str, seconds: float) -> Callable[[], object]:
        """Kills a component of the cluster and starts it again."""

        def action() -> None:
            self.bed.kill(component)
            time.sleep(seconds)
            self.bed.start(component)

        return action


def faults(stage: Stage) -> Iterator[tuple[str, Callable[[], object], bool]]:
    """The faults, what each of them does, and whether the training pauses."""
    yield "a worker's process is killed", stage.signal("worker-0", 9), True
    yield "the master's process is killed", stage.signal("master-0", 9), True
    yield "a worker's process is stopped (no progress)", stage.signal("worker-1", 19), True
    yield "a worker's container is killed", stage.end("worker-2"), True
    yield "a worker's pod is deleted", stage.delete("worker-0"), True
    yield "two workers' pods are deleted", stage.delete("worker-1", "worker-2"), True
    yield "the master's pod is deleted", stage.delete("master-0"), True
    yield "the job is suspended and resumed", stage.resume, True
    controller = CONTROLLERS[stage.target]
    yield "its controller is away for 60 s", stage.away(controller, 60), False
    yield "the apiserver is away for 60 s", stage.away("apiserver", 60), False
    yield "the kubelet is away for 10 s", stage.away("kubelet", 10), False


def sick_job(name: str, image: str) -> dict[str, object]:
    """A job of one replica that pulls its image each time."""
    container = {
        "name": "pytorch",
        "image": image,
        "imagePullPolicy": "Always",
        "command": ["sleep", "600"],
    }
    pod = {"containers": [container], "terminationGracePeriodSeconds": 1}
    master = {"replicas": 1, "restartPolicy": "Never", "template": {"spec": pod}}
    return {
        "apiVersion": "kubeflow.org/v1",
        "kind": "PyTorchJob",
        "metadata": {"name": name},
        "spec": {"pytorchReplicaSpecs": {"Master": master}},
    }


def starts(bed: Bed) -> list[Told]:
    """Jobs that cannot start, and what is said of them."""
    backend = connect(kubeconfig=bed.kubeconfig, namespace="default")

    def play(
        fault: str, cause: Cause, image: str, after: Callable[[], object] | None = None
    ) -> Told:
        began = time.monotonic()
        ref = JobRef.of(backend.create_manifest(job_of(sick_job(str(cause), image))))
        found = diagnose(snapshot := backend.snapshot(ref), {})
        while not found or found[0].id != cause:
            time.sleep(0.2)
            found = diagnose(snapshot := backend.snapshot(ref), {})
        told, recovered = time.monotonic() - began, None
        if after:
            after()
            back = time.monotonic()
            while job_status(snapshot).state != JobState.RUNNING:
                time.sleep(0.2)
                snapshot = backend.snapshot(ref)
            recovered = time.monotonic() - back
        backend.delete(ref)
        backend.wait_for_pods(ref, 180.0)
        return Told(fault, found[0].message, told, recovered)

    nowhere = f"{bed.registry}/k8sjob-tests:no-such"
    rows = [play("there is no such image", Cause.IMAGE_MISSING, nowhere)]
    bed.stop("registry")
    fault = "the registry is away in a pull, and comes back then"
    rows.append(play(fault, Cause.REGISTRY, bed.base_image, lambda: bed.start("registry")))
    quota = {"apiVersion": "v1", "kind": "ResourceQuota", "metadata": {"name": "small"}}
    bed.kubectl("apply", "-f", "-", stdin=json.dumps(quota | {"spec": {"hard": {"pods": "0"}}}))
    rows.append(play("the quota is used up", Cause.QUOTA, bed.base_image))
    return rows


def markdown(head: list[str], rows: Iterable[list[str]]) -> str:
    """A table."""
    escaped = ([cell.replace("|", "\\|") for cell in row] for row in rows)
    lines = (head, ["---"] * len(head), *escaped)
    return "".join(f"| {' | '.join(row)} |\n" for row in lines)


def table_of_starts(rows: list[Told]) -> str:
    """What is said of jobs that do not start."""
    cells = []
    for row in rows:
        then = "" if row.recovered is None else f"runs {row.recovered:.1f} s after the registry"
        detail = re.sub(r"127\.0\.0\.1:\d+", "registry.example", row.finding)
        cells.append([row.fault, detail, f"{row.seconds:.1f} s", then])
    return markdown(["Fault", "What `why` shows", "After", "Then"], cells)


def tables(played: dict[str, list[Outcome]]) -> str:
    """The costs side by side, a column a target, and what the watcher saw of the first."""
    sides = zip(*played.values(), strict=False)
    costs = [[rows[0].fault, *(row.cost for row in rows)] for rows in sides]
    first, *_ = played
    seen = [[row.fault, row.seen] for row in played[first]]
    head = ["Fault", f"First lines that the watcher saw (`{first}`)"]
    return (
        markdown(["Fault", *(f"`{target}`" for target in played)], costs)
        + "\n"
        + markdown(head, seen)
    )


def play_all(target: str) -> list[Outcome]:
    """Play all faults on a job of a target, in a cluster of its own."""
    with Bed() as bed, tempfile.TemporaryDirectory() as folder:
        if target not in BUILT_IN:
            bed.add(CONTROLLERS[target])
        home = Path(folder)
        home.chmod(0o755)
        (home / "main.py").write_text(PROGRAM)
        text = JOB.format(registry=bed.registry, base=bed.base_image, target=target)
        (home / "job.yaml").write_text(text)
        saves = bed.folder / "tmp/saves"  # in the /tmp of the bed's node
        saves.mkdir()
        saves.chmod(0o777)
        stage = Stage(bed, target)
        stage.begin(home)
        try:
            for fault, action, pauses in faults(stage):
                stage.play(fault, action, pauses=pauses)
        finally:
            stage.watcher.process.terminate()
        return stage.rows


def main() -> None:
    """Play, print, and write the tables."""
    played = {}
    for target in sys.argv[1:] or CONTROLLERS:
        played[target] = play_all(target)
        print(tables(played), flush=True)
    with Bed() as bed:
        told = table_of_starts(starts(bed))
    print(told)
    if not sys.argv[1:]:
        head, mark, _ = PAGE.read_text().partition(MARK)
        PAGE.write_text(f"{head}{mark}{tables(played)}\n{told}")


if __name__ == "__main__":
    main()

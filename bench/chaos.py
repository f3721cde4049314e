"""Random faults played on jobs: whether the loss curve is that of a calm run.

    python bench/chaos.py [--cluster] [--page] [--only KIND] [FAULTS] [FIRST_SEED]

Root on Linux, with iproute2 and util-linux. Jobs run on this machine, in a network namespace whose
loopback is taken away for a while and on a file system that is full for a while; or, with
--cluster, in a real cluster made for it (see `make cluster` for what that needs), of which parts
are taken away too. Each job is one Master and two Workers that save every fifth step. One to three
faults hit it, which ones and when by its seed: before the first step, in collectives, in saves, at
the end. A job has to end, with the loss curve of a job that nobody touched, or with one clear
failure; where one does not, the exit code is 1. Prints a line for each, with the seed that plays it
again, then a table, which --page writes into docs/reference/chaos.md.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter, defaultdict
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests"))

from clocks import Clocks  # noqa: E402 - of the tests

PAGE = ROOT / "docs/reference/chaos.md"
INSIDE = "K8SJOB_CHAOS_INSIDE"
LIMIT = 600.0
"""Seconds after which a job counts as one that hangs."""
PROGRAM = """
import json, time
import torch
from k8sjob import runtime

generator = torch.Generator().manual_seed(0)
inputs = torch.randn(360, 8, generator=generator, dtype=torch.float64)
data = torch.utils.data.TensorDataset(inputs, inputs.sin().sum(dim=1, keepdim=True))
with runtime.session(seed=1) as job:
    run = job.prepare(
        lambda: torch.nn.Sequential(
            torch.nn.Linear(8, 16), torch.nn.Dropout(0.2), torch.nn.Linear(16, 1)
        ).double(),
        loss=torch.nn.functional.mse_loss,
        optimizer=(torch.optim.SGD, {"lr": 0.02, "momentum": 0.9}),
    )
    for epoch in run.epochs(4):
        losses = run.state.setdefault("losses", [])
        for x, y in run.batches(data, global_batch=12):
            time.sleep(0.02)
            run.step(x, y)
            if job.is_main:
                print(f"STEP {run.steps}", flush=True)
        losses[epoch:] = [run.loss]  # an epoch whose evaluation was cut short comes again
        run.evaluate(data, batch_size=64)
    if job.is_main:
        print(f"RESULT {json.dumps(run.state['losses'])}", flush=True)
"""
JOB = """
name: NAME
image: {repository: REPOSITORY, base: "BASE"}
replicas: {workers: 2}
resources: {cpu: 1, memory: 2Gi, requests: {cpu: 100m, memory: 256Mi}}
run:
  script: main.py
  env: {OMP_NUM_THREADS: "1", LD_PRELOAD: WALL/clock.so, TEST_CLOCKS: WALL}
  hang_timeout: 8s
  rendezvous_timeout: 25s
  collective_timeout: 40s
checkpoint: {dir: /checkpoints, every: 5}
volumes: [{name: checkpoints, mount: /checkpoints, host_path: "HOST", local: "LOCAL"}]
policy: {max_restarts: 8, termination_grace: 10s}
"""


class Played(NamedTuple):
    """A fault, and what came after it; `back` is None where no step was done any more."""

    kind: str
    back: float | None
    repeated: int


class Job:
    """One run of the job, and what it says."""

    def __init__(self, *argv: str, env: dict[str, str], owns: Callable[[Path], bool]) -> None:
        """Start it.

        Args:
            argv: of k8sjob; it follows the job to its end.
            env: more of its environment.
            owns: whether a process, as a folder of /proc, is one of the job's.
        """
        self._owns, self.began = owns, time.monotonic()
        self.lines: list[tuple[float, str]] = []
        self.process = subprocess.Popen(
            [sys.executable, "-m", "k8sjob", *argv],
            env=os.environ | env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append((time.monotonic(), line.rstrip()))

    @property
    def steps(self) -> list[tuple[float, int]]:
        """When which step was done."""
        found = ((at, re.search(r"STEP (\d+)$", line)) for at, line in list(self.lines))
        return [(at, int(step[1])) for at, step in found if step]

    @property
    def result(self) -> list[float] | None:
        """The loss of each epoch."""
        found = [line.partition("RESULT ")[2] for _, line in self.lines if "RESULT " in line]
        return json.loads(found[-1]) if found else None

    def processes(self, whom: str) -> list[int]:
        """The job's processes of one kind: "rank", "agent" or "server", which forks ranks."""
        module = "k8sjob.runtime" if whom == "agent" else "k8sjob.runtime.agent.rank_main"
        found = []
        for path in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                argv = (path / "cmdline").read_bytes().split(b"\0")
                forks = (path / "comm").read_text() == "k8sjob-fork\n"
                if module.encode() in argv and self._owns(path) and forks == (whom == "server"):
                    found.append(int(path.name))
        return sorted(found)

    def wait(self) -> int | None:
        """The exit code; None where it hangs, and is killed."""
        try:
            code = self.process.wait(max(1.0, self.began + LIMIT - time.monotonic()))
        except subprocess.TimeoutExpired:
            self.process.terminate()
            self.process.wait()
            return None
        self._reader.join(10)
        return code


def hit(job: Job, chance: random.Random, whom: str) -> str:
    """Kill or stop some of a job's processes; what was done, empty if nobody was there."""
    kinds = ["killed", "killed", "stopped for 2 s", "terminated"]
    # Nobody in a pod sees to its first process: what stands still for good there is the kubelet's.
    what = chance.choice(kinds if whom == "agent" else [*kinds, "stopped for good"])
    several = what == "killed" and chance.random() < 0.3
    ids = job.processes(whom)
    ids = chance.sample(ids, min(len(ids), 2 if several else 1))
    numbers = {"killed": signal.SIGKILL, "terminated": signal.SIGTERM}
    for pid in ids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, numbers.get(what, signal.SIGSTOP))
    if what == "stopped for 2 s":
        time.sleep(2)
        for pid in ids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
    name = "fork server" if whom == "server" else whom
    number = {0: "", 1: f"a{'n' * (whom == 'agent')} {name}", 2: f"two {name}s"}[len(ids)]
    return f"{number} {what}" if ids else ""


def write_job(folder: Path, **words: str) -> None:
    """The job's folder, with these words in place of those of JOB."""
    folder.mkdir()
    (folder / "main.py").write_text(PROGRAM)
    text = re.sub("|".join(words), lambda found: words[found[0]], JOB)
    (folder / "job.yaml").write_text(text)


class Machine:
    """Jobs on this machine."""

    mark = "<!-- measured: bench/chaos.py -->\n"

    def __init__(self, home: Path, stack: contextlib.ExitStack, only: str | None) -> None:
        self._home, self._disk, self._only = home, home / "disk", only
        stack.enter_context(small_disk(self._disk))
        self._job = home / "job"
        self._clocks = Clocks(home / "clocks", ranks=3)
        write_job(
            self._job,
            NAME="chaos",
            REPOSITORY="registry.example/chaos",
            BASE="debian",
            HOST="/checkpoints",
            LOCAL=str(self._disk),
            WALL=str(home / "clocks"),
        )

    def begin(self, name: str) -> Job:
        """Start a job."""
        for old in self._disk.iterdir():
            shutil.rmtree(old) if old.is_dir() else old.unlink()
        self._clocks.set(0)
        state = self._home / name

        def owns(process: Path) -> bool:
            return str((process / "cwd").readlink()).startswith(f"{state}/")

        argv = ("run", str(self._job), "-o", "plain")
        return Job(*argv, env={"K8SJOB_STATE": str(state)}, owns=owns)

    def strike(self, job: Job, chance: random.Random) -> str:
        """Play one fault; its name, empty where there was nobody to hit."""
        kinds = ["rank", "rank", "rank", "agent", "agent", "server", "disk", "network", "clock"]
        whom = self._only or chance.choice(kinds)
        if whom == "disk":
            return fill(self._disk)
        if whom == "clock":
            return step(self._clocks, chance)
        if whom == "network":
            return part(chance.choice([2, 12]))
        return hit(job, chance, whom)

    def end(self, _name: str) -> None:
        """After a job."""


class Cluster:
    """Jobs in a cluster of its own."""

    mark = "<!-- measured: bench/chaos.py --cluster -->\n"

    def __init__(self, home: Path, stack: contextlib.ExitStack, only: str | None) -> None:
        from cluster.bed import Bed

        self._only = only
        self._bed, self._home = stack.enter_context(Bed()), home
        home.chmod(0o755)

    def begin(self, name: str) -> Job:
        """Submit a job."""
        folder, name = self._home / name, f"chaos-{name}"
        saves = self._bed.folder / "tmp" / name  # the /tmp of its node
        saves.mkdir()
        saves.chmod(0o777)
        self._clocks = Clocks(saves / "clocks", ranks=3)
        write_job(
            folder,
            NAME=name,
            REPOSITORY=f"{self._bed.registry}/chaos",
            BASE=self._bed.base_image,
            HOST=f"/tmp/{name}",
            LOCAL="saves",
            WALL="/checkpoints/clocks",
        )

        def owns(process: Path) -> bool:
            return f"\0HOSTNAME={name}-".encode() in b"\0" + (process / "environ").read_bytes()

        argv = ("submit", str(folder / "job.yaml"), "-n", "default", "--watch")
        return Job(*argv, env=self._bed.env, owns=owns)

    def strike(self, job: Job, chance: random.Random) -> str:
        """Play one fault; its name, empty where there was nobody to hit."""
        kinds = ["rank", "rank", "rank", "agent", "pod", "pod", "network", "cluster", "clock"]
        whom = self._only or chance.choice([*kinds, "server"])
        if whom == "clock":
            return step(self._clocks, chance)
        if whom == "cluster":
            away = chance.choice(["operator", "apiserver", "kubelet", "registry"])
            self._bed.kill(away)
            time.sleep(5)
            self._bed.start(away)
            return f"the {away} is away for 5 s"
        if whom in {"rank", "agent", "server"}:
            return hit(job, chance, whom)
        several = whom == "pod" and chance.random() < 0.3
        ids = job.processes("agent")
        ids = chance.sample(ids, min(len(ids), 2 if several else 1))
        if whom == "network":
            return "".join(cut_off(pid, chance.choice([2, 12])) for pid in ids)
        names = [name for pid in ids if (name := hostname(pid))]
        if names:
            self._bed.kubectl("delete", "pod", "--wait=false", "--ignore-not-found", *names)
        return ["", "a pod is deleted", "two pods are deleted"][len(names)]

    def end(self, name: str) -> None:
        """After a job."""
        self._bed.kubectl("delete", "pytorchjob", f"chaos-{name}", "--ignore-not-found")


def hostname(pid: int) -> str:
    """The name of a process's pod; empty when it is gone."""
    with contextlib.suppress(OSError):
        found = re.search(rb"\0HOSTNAME=([^\0]+)", Path(f"/proc/{pid}/environ").read_bytes())
        return found[1].decode() if found else ""
    return ""


def cut_off(pid: int, seconds: int) -> str:
    """Nothing reaches a process's pod for a while."""
    rule = ["INPUT", "-i", "eth0", "-j", "DROP"]
    # The pod's first process may end meanwhile, and the namespace lives on.
    with contextlib.ExitStack() as stack:
        try:
            here = stack.enter_context(Path(f"/proc/{pid}/ns/net").open("rb"))
        except OSError:
            return ""
        iptables = ["nsenter", f"--net=/proc/self/fd/{here.fileno()}", "iptables", "-w"]
        subprocess.run([*iptables, "-I", *rule], check=True, pass_fds=[here.fileno()])
        time.sleep(seconds)
        subprocess.run([*iptables, "-D", *rule], check=True, pass_fds=[here.fileno()])
    return f"a pod is cut off for {seconds} s"


def step(clocks: Clocks, chance: random.Random) -> str:
    """Step the wall clock of one rank and its agent, or of all."""
    rank = chance.choice([0, 1, 2, None])
    ahead = chance.choice([-3600, 3600, 86400])
    clocks.set(ahead, rank)
    return f"{'a' if rank is not None else 'every'} clock is stepped"


def fill(disk: Path) -> str:
    """Leave no room for checkpoints for a while."""
    filler = disk / "filler"
    with contextlib.suppress(OSError), filler.open("wb", buffering=0) as file:
        while True:
            file.write(bytes(1 << 12))
    time.sleep(2)
    filler.unlink()
    return "the disk is full for 2 s"


def part(seconds: int) -> str:
    """Nothing reaches anybody for a while; 12 s are more than a rank may make no progress."""
    subprocess.run(["ip", "link", "set", "lo", "down"], check=True)
    time.sleep(seconds)
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    return f"the network is away for {seconds} s"


def own_network() -> None:
    """Go on in namespaces of network and mounts that end with this process."""
    if INSIDE not in os.environ:
        os.environ[INSIDE] = "1"
        os.execvp("unshare", ["unshare", "--net", "--mount", sys.executable, *sys.argv])
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)


@contextlib.contextmanager
def small_disk(folder: Path) -> Iterator[None]:
    """A file system of its own, of a megabyte."""
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", folder], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", folder], check=True)


def play(
    place: Machine | Cluster, seed: int, length: float
) -> tuple[Job, int | None, list[Played]]:
    """One job with its faults."""
    chance = random.Random(seed)
    job = place.begin(str(seed))
    # Half of the time is the start of its processes, and longer after each fault.
    moments = sorted(chance.uniform(0, 1.2 * length) for _ in range(chance.randint(1, 3)))
    struck = []
    for moment in moments:
        while time.monotonic() < job.began + moment and job.process.poll() is None:
            time.sleep(0.02)
        at = time.monotonic()
        if job.process.poll() is None and (kind := place.strike(job, chance)):
            struck.append((at, kind))
    code = job.wait()
    place.end(str(seed))
    ends = [at for at, _ in [*struck[1:], (float("inf"), "")]]
    played = [
        Played(kind, *_after(job.steps, at, end))
        for (at, kind), end in zip(struck, ends, strict=False)
    ]
    return job, code, played


def _after(steps: list[tuple[float, int]], at: float, end: float) -> tuple[float | None, int]:
    """Seconds to the first step after a fault, and how many were done again until the next."""
    later = [n for n, (when, _) in enumerate(steps) if at < when <= end]
    # Lines of before may still be on their way: the first step of the next start counts.
    anew = (n for n in later if n and steps[n][1] <= steps[n - 1][1])
    first = next(anew, later[0] if later else None)
    if first is None:
        return None, 0
    before = max((step for _, step in steps[:first]), default=0)
    return steps[first][0] - at, max(0, before - steps[first][1] + 1)


def told(job: Job) -> str:
    """The failure that a job's user is shown."""
    lines = [line for _, line in job.lines]
    return next((line for line in reversed(lines) if line.startswith("why: ")), lines[-1])


def judged(job: Job, code: int | None, curve: list[float] | None) -> str:
    """How a job has ended."""
    if code is None:
        return "hung"
    if code:
        return "failed"
    found, wanted = job.result or [], curve or []
    pairs = zip(found, wanted, strict=False)
    same = len(found) == len(wanted) and all(abs(one - other) < 1e-9 for one, other in pairs)
    return "the same curve" if same else "another curve"


def table(rows: dict[str, list[Played]]) -> str:
    """What each kind of fault has cost."""
    lines = ["| Fault | Times | Max. seconds to the next step | Max. steps repeated |",
             "|---|---|---|---|"]  # fmt: skip
    for kind, found in sorted(rows.items()):
        times = [one.back for one in found if one.back is not None]
        middle = f"{statistics.median(times):.1f}, {max(times):.1f}" if times else "none came"
        again = sorted(one.repeated for one in found)
        lines.append(
            f"| {kind} | {len(found)} | {middle} | {statistics.median_high(again)}, {again[-1]} |"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    """Play, judge, print."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--cluster", action="store_true")
    parser.add_argument("--page", action="store_true")
    parser.add_argument("--only", choices=["rank", "agent", "server", "clock", "network"])
    parser.add_argument("faults", type=int, nargs="?", default=200)
    parser.add_argument("seed", type=int, nargs="?", default=1)
    asked = parser.parse_args()
    if not asked.cluster:
        own_network()
    first = seed = asked.seed
    ends: Counter[str] = Counter()
    rows: defaultdict[str, list[Played]] = defaultdict(list)
    with tempfile.TemporaryDirectory(prefix="chaos-") as name, contextlib.ExitStack() as stack:
        place = (Cluster if asked.cluster else Machine)(Path(name), stack, asked.only)
        calm = place.begin("calm")
        assert calm.wait() == 0, calm.lines[-20:]
        place.end("calm")
        length, curve = time.monotonic() - calm.began, calm.result
        print(f"undisturbed: {length:.1f} s, {curve}", flush=True)
        while sum(map(len, rows.values())) < asked.faults:
            job, code, played = play(place, seed, length)
            end = judged(job, code, curve)
            ends[end] += 1
            why = "" if end == "the same curve" else f": exit code {code}, {told(job)}"
            what = "; ".join(one.kind for one in played) or "no fault hit it"
            print(f"seed {seed}: {what}: {end}{why}", flush=True)
            if end != "the same curve":
                Path(f"/tmp/chaos-{seed}.log").write_text("\n".join(line for _, line in job.lines))
            for one in played:
                rows[one.kind].append(one)
            seed += 1
    jobs = ", ".join(f"{count} {end}" for end, count in ends.most_common())
    text = f"{sum(map(len, rows.values()))} faults on {ends.total()} jobs, seeds {first} to"
    text += f" {seed - 1}: {jobs}.\n\n{table(rows)}"
    print(text)
    page = PAGE.read_text(encoding="utf-8")
    if asked.page and place.mark in page:
        head, _, rest = page.partition(place.mark)
        _, heading, others = rest.partition("\n## ")
        PAGE.write_text(f"{head}{place.mark}{text}{heading}{others}", encoding="utf-8")
    if ends["hung"] or ends["another curve"]:
        sys.exit(1)


if __name__ == "__main__":
    main()

"""From one line of code changed to a digest in the registry, beside buildah with overlay storage.

    python bench/push.py [BASE]

BASE is an image that buildah's storage of the tests has, by default the one that they build upon
(Debian with torch, 1.3 GB). Whole processes, on loopback; needs root, buildah and docker-registry.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests"))
K8SJOB = [str(Path(sys.executable).parent / "k8sjob")]
CONTEXTS = {"5 files": 5, "5,000 files": 5000}
WARM_ROUNDS = 7


@contextmanager
def registry(folder: Path):
    """A docker-registry on loopback; its host:port."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        host = f"127.0.0.1:{probe.getsockname()[1]}"
    config = folder / "registry.yml"
    content = {
        "version": 0.1,
        "log": {"level": "error", "accesslog": {"disabled": True}},
        "storage": {"filesystem": {"rootdirectory": str(folder / "registry")}},
        "http": {"addr": host},
    }
    config.write_text(json.dumps(content))
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    process = subprocess.Popen(["docker-registry", "serve", str(config)], **quiet)
    try:
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline:
            try:
                socket.create_connection(("127.0.0.1", int(host.partition(":")[2]))).close()
                break
            except OSError:
                time.sleep(0.05)
        yield host
    finally:
        process.terminate()
        process.wait()


class Context:
    """A user's folder of some files, one of which is edited again and again."""

    def __init__(self, folder: Path, files: int, base: str, target: str) -> None:
        self.folder, self.edits = folder, 0
        for number in range(files - 2):
            path = folder / f"pkg{number % 70}" / f"module{number}.py"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(f"# module {number}\n" + "def work(x):\n    return x + 1\n\n\n" * 100)
        (folder / "job.yaml").write_text(
            f"name: bench\nimage: {{repository: {target}, base: '{base}'}}\n"
            "run: {script: main.py}\n"
        )
        # No step that runs anything: as fast as a builder can be.
        copied = f'FROM {base}\nWORKDIR /app\nCOPY . /app\nCMD ["python", "main.py"]\n'
        (folder / "Dockerfile").write_text(copied)
        self.edit()

    def edit(self) -> None:
        """Change one line."""
        self.edits += 1
        (self.folder / "main.py").write_text(f"print({self.edits})\n" * 40)


def timed(*commands: list[str]) -> tuple[float, float]:
    """Seconds that commands take one after the other, and those of the processor."""
    before, start = os.times(), time.perf_counter()
    for argv in commands:
        done = subprocess.run(argv, capture_output=True, text=True, check=False)
        if done.returncode:
            sys.exit(f"{argv}\n{done.stderr[-2000:]}")
    after = os.times()
    used = after.children_user + after.children_system
    return time.perf_counter() - start, used - before.children_user - before.children_system


class Buildah:
    """buildah on overlay storage of its own."""

    def __init__(self, folder: Path, target: str) -> None:
        self.folder, self.target = folder, target
        where = ["--root", str(folder / "storage"), "--runroot", str(folder / "run")]
        self._argv = ["buildah", *where, "--storage-driver", "overlay"]

    def __call__(self, context: Context) -> tuple[float, float]:
        """Build and push, as with docker: layers are cached, TLS is not needed on loopback."""
        plain = "--tls-verify=false"
        build = ["bud", "-q", plain, "--layers", "--isolation", "chroot", "-t", "bench"]
        return timed(
            [*self._argv, *build, str(context.folder)],
            [*self._argv, "push", "-q", plain, "bench", f"docker://{self.target}:latest"],
        )

    def forget(self) -> None:
        """Remove all that it has stored."""
        subprocess.run([*self._argv, "rmi", "-a", "-f"], capture_output=True, check=False)
        shutil.rmtree(self.folder, ignore_errors=True)


def in_process(context: Context) -> float:
    """Seconds of the push itself, in a process that has loaded all there is to load."""
    from k8sjob.image.push import push
    from k8sjob.spec import load

    spec = load(context.folder / "job.yaml")
    times = []
    for _ in range(WARM_ROUNDS):
        context.edit()
        start = time.perf_counter()
        push(spec, context.folder)
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def measure(base_image: str | None = None) -> dict[str, dict[str, float]]:
    """Seconds for each way and context: medians of the warm ones, which alternate."""
    from baseimage import Buildah as Stored

    stored = Stored()
    image = base_image or stored.base_image()
    results: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as name, registry(Path(name)) as host:
        folder = Path(name)
        base = f"{host}/bench/base:1"
        stored.push(image, base)
        for label, files in CONTEXTS.items():
            target = f"{host}/bench/app-{files}"
            context = Context(folder / f"context-{files}", files, base, target)
            results[label] = one(context, Buildah(folder / f"buildah-{files}", f"{target}-buildah"))
    return results


def one(context: Context, buildah: Buildah) -> dict[str, float]:
    """All ways for one context."""
    argv = [*K8SJOB, "push", str(context.folder)]
    try:
        row = {"k8sjob first": timed(argv)[0], "buildah cold": buildah(context)[0]}
        times: dict[str, list[tuple[float, float]]] = {"k8sjob": [], "buildah warm": []}
        for number in range(WARM_ROUNDS):
            for way in sorted(times, reverse=bool(number % 2)):
                context.edit()
                times[way].append(timed(argv) if way == "k8sjob" else buildah(context))
    finally:
        buildah.forget()
    for way, pairs in times.items():
        row[way] = statistics.median(wall for wall, _ in pairs)
        row[f"{way}, processor"] = statistics.median(used for _, used in pairs)
    row["k8sjob unchanged"] = timed(argv)[0]
    row["k8sjob in process"] = in_process(context)
    row["cold / k8sjob"] = row["buildah cold"] / row["k8sjob"]
    row["warm / k8sjob"] = row["buildah warm"] / row["k8sjob"]
    return row


def main() -> None:
    """Measure and print."""
    print(f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
    results = measure(*sys.argv[1:2])
    print(f"{'seconds, whole processes':<26}" + "".join(f"{label:>14}" for label in results))
    for way in next(iter(results.values())):
        print(f"{way:<26}" + "".join(f"{row[way]:>14.3f}" for row in results.values()))


if __name__ == "__main__":
    main()

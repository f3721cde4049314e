"""From one line of code changed to a digest in the registry, beside buildah and podman.

    python bench/push.py [--rounds 7] [--size 1500]

Whole processes, on loopback, in a network of their own, whose counter says what went over it. The
base is the one that the tests build upon (Debian with torch), filled up to a size in MB as it is
compressed. Needs root, docker-registry, skopeo and buildah; podman takes part where it is there.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Final

from processes import Run, middle

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests"))
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "k8sjob-bench"
CONTEXTS: Final = {"5 files": 5, "5,000 files": 5000}
LARGE: Final = 1 << 30
SETTLED: Final = 2.1
"""Seconds after which the next push remembers a file: what is younger is packed again."""
INSIDE: Final = "K8SJOB_BENCH_INSIDE"
MODULE: Final = '''"""Module {number}."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass
class Layer{number}:
    """Settings of a layer, and what follows from them."""

    width: int = {width}
    dropout: float = 0.{number}

    def parameters(self, depth: int) -> int:
        """How many numbers are learned in a block of this width and depth."""
        if depth < 1:
            raise ValueError(f"depth {{depth}}: at least 1")
        return sum(self.width * self.width + self.width for _ in range(depth))

'''


@contextmanager
def registry(data: Path) -> Iterator[str]:
    """A docker-registry on loopback; its host:port."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        host = f"127.0.0.1:{probe.getsockname()[1]}"
    content = {
        "version": 0.1,
        "log": {"level": "error", "accesslog": {"disabled": True}},
        "storage": {"filesystem": {"rootdirectory": str(data)}},
        "http": {"addr": host},
    }
    with tempfile.NamedTemporaryFile("w", suffix=".yml") as config:
        config.write(json.dumps(content))
        config.flush()
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        process = subprocess.Popen(["docker-registry", "serve", config.name], **quiet)
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


def base_data(megabytes: int) -> Path:
    """The data of a registry that has the base as `bench/base:1`; made once (minutes)."""
    from baseimage import Buildah

    buildah, ready = Buildah(), CACHE / f"base-{megabytes}"
    if ready.exists():
        return ready
    CACHE.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=CACHE) as name:
        data, image = Path(name, "data"), buildah.base_image()
        with registry(data) as host:
            place = f"docker://{host}/bench/base:1"
            plain = ["--tls-verify=false"]
            buildah("push", "-q", *plain, image, place)
            left = megabytes * 1_000_000 - sum(file.stat().st_size for file in data.rglob("data"))
            filled = buildah("from", image)
            with Path(buildah("mount", filled), "opt/filling").open("wb") as file:
                file.writelines(os.urandom(1 << 20) for _ in range(max(0, left) >> 20))
            buildah("umount", filled)
            buildah("commit", "-q", "--rm", filled, "localhost/bench-base")
            buildah("push", "-q", *plain, "localhost/bench-base", place)
            buildah("rmi", "localhost/bench-base")
        data.rename(ready)
    return ready


class Context:
    """A user's folder of some files, one of which is edited again and again."""

    def __init__(self, folder: Path, files: int, base: str, target: str) -> None:
        self.folder, self.edits = folder, 0
        folder.mkdir()
        for number in range(files - 3):
            path = folder / f"package{number % 70}" / f"module{number}.py"
            path.parent.mkdir(exist_ok=True)
            path.write_text(MODULE.format(number=number, width=64 + number) * (1 + number % 9))
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


class K8sjob:
    """`k8sjob push`."""

    def __init__(self) -> None:
        self.argv = [str(Path(sys.executable).parent / "k8sjob"), "push"]

    def __call__(self, context: Context) -> Run:
        """Push the code."""
        return Run.of([*self.argv, str(context.folder)])


class Builder:
    """buildah or podman, on overlay storage of its own."""

    def __init__(self, program: str, folder: Path, target: str) -> None:
        self.folder, self.target = folder, target
        self._run = tempfile.TemporaryDirectory(prefix="k-")  # podman takes 50 characters at most
        where = ["--root", str(folder / "storage"), "--runroot", self._run.name]
        self._argv = [program, *where, "--storage-driver", "overlay"]
        self._verb = "bud" if program == "buildah" else "build"

    def __call__(self, context: Context) -> Run:
        """Build and push, as with docker: layers are cached, TLS is not needed on loopback."""
        plain = "--tls-verify=false"
        build = [self._verb, "-q", plain, "--layers", "--isolation", "chroot", "-t", "bench"]
        return Run.of(
            [*self._argv, *build, str(context.folder)],
            [*self._argv, "push", "-q", plain, "bench", f"docker://{self.target}:latest"],
        )

    def forget(self) -> None:
        """Remove all that it has stored."""
        subprocess.run([*self._argv, "rmi", "-a", "-f"], capture_output=True, check=False)
        subprocess.run(
            ["umount", str(self.folder / "storage/overlay")], capture_output=True, check=False
        )
        shutil.rmtree(self.folder, ignore_errors=True)
        self._run.cleanup()


Row = dict[str, float]


def summary(runs: list[Run]) -> Row:
    """Medians, and the least of the seconds."""
    names = ("seconds", "cpu", "megabytes", "network")
    medians = {name: middle(runs, name) for name in names}
    return {**medians, "least": min(run.seconds for run in runs)}


def timed(context: Context, builders: dict[str, Builder], rounds: int) -> dict[str, list[Run]]:
    """All ways for one context; the warm ones alternate."""
    ways = {"k8sjob": K8sjob(), **builders}
    runs = {}
    try:
        for name, way in ways.items():
            runs[f"{name}, first"] = [way(context)]
        for number in range(rounds):
            for name in sorted(ways, reverse=bool(number % 2)):
                context.edit()
                runs.setdefault(name, []).append(ways[name](context))
                if name == "k8sjob":
                    time.sleep(SETTLED)
                    ways[name](context)
                    runs.setdefault("k8sjob, unchanged", []).append(ways[name](context))
    finally:
        for builder in builders.values():
            builder.forget()
    return runs


def measure(rounds: int, megabytes: int) -> dict[str, object]:
    """Each way and context."""
    data = base_data(megabytes)
    programs = [name for name in ("buildah", "podman") if shutil.which(name)]
    results: dict[str, object] = {}
    with tempfile.TemporaryDirectory(dir=CACHE) as name:
        folder = Path(name)
        subprocess.run(["cp", "-al", str(data), str(folder / "data")], check=True)
        with registry(folder / "data") as host:
            base = f"{host}/bench/base:1"
            for label, files in CONTEXTS.items():
                target = f"{host}/bench/app-{files}"
                builders = {
                    program: Builder(program, folder / f"{program}-{files}", f"{target}-{program}")
                    for program in programs
                }
                context = Context(folder / f"context-{files}", files, base, target)
                runs = timed(context, builders, rounds)
                results[label] = {name: summary(found) for name, found in runs.items()}
            context = Context(folder / "large", 5, base, f"{host}/bench/large")
            with (context.folder / "weights.bin").open("wb") as file:
                for _ in range(LARGE >> 20):
                    file.write(os.urandom(1 << 20))
            results["a file of 1 GiB"] = {"k8sjob": summary([K8sjob()(context)])}
    return results


def main() -> None:
    """Measure, and print JSON."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--size", type=int, default=1500)
    asked = parser.parse_args()
    if INSIDE not in os.environ:
        up = 'ip link set lo up && exec "$@"'
        argv = ["unshare", "--net", "sh", "-c", up, "sh", sys.executable, *sys.argv]
        env = {name: value for name, value in os.environ.items() if "BYTECODE" not in name}
        os.execvpe(argv[0], argv, env | {INSIDE: "1"})
    print(json.dumps(measure(asked.rounds, asked.size), indent=1))


if __name__ == "__main__":
    main()

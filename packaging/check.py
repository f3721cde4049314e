"""A release as its users install it: python packaging/check.py FOLDER, after make release.

The wheel and the sdist of FOLDER are installed, with the core's dependencies alone, in an empty
environment of each supported Python. There they print a manifest, run a job that fails, and read
the reason from its record. The krew plugin of FOLDER/krew then calls the installed k8sjob.
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

EXAMPLE = Path(__file__).resolve().parents[1] / "manifests/digits-ddp/job.yaml"
PYTHONS = ("3.11", "3.12", "3.13")
BROKEN = """\
name: broken
image: registry.example/team/broken:1
run:
  command: [python3, -c, "import no_such_package"]
policy: {restart_policy: Never}
"""


def check(package: Path, plugin: Path, python: str, version: str) -> None:
    """Install one package and use it, without a cluster and without this user's files."""
    with tempfile.TemporaryDirectory() as folder:
        venv = Path(folder, "venv")
        k8sjob, env = f"{venv}/bin/k8sjob", {"HOME": folder, "PATH": f"{venv}/bin:/usr/bin:/bin"}

        def run(expected: str, *argv: str, code: int = 0, env: dict[str, str] | None = env) -> None:
            done = subprocess.run(
                argv,
                check=False,
                cwd=folder,
                env=env,
                text=True,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
            )
            if done.returncode != code or expected not in done.stdout:
                sys.exit(
                    f"{package.name} on Python {python}: {' '.join(argv)}: "
                    f"exit code {done.returncode}, or no {expected!r} in:\n{done.stdout}"
                )

        run("", "uv", "venv", "-q", "--python", python, str(venv), env=None)
        install = ("uv", "pip", "install", "-q", "--python", f"{venv}/bin/python")
        run("", *install, str(package.resolve()), env=None)
        run(f"k8sjob {version}\n", k8sjob, "--version")
        run("kind: PyTorchJob", k8sjob, "render", str(EXAMPLE))
        Path(folder, "job.yaml").write_text(BROKEN, encoding="utf-8")
        run("broken Failed", k8sjob, "run", "job.yaml", code=100)
        run("broken.k8sjob", k8sjob, "archive", "broken")
        run("deleted", k8sjob, "delete", "broken")
        run("no module named 'no_such_package'", k8sjob, "why", "broken.k8sjob")
        with tarfile.open(plugin) as archive:
            archive.extractall(folder, filter="data")
        run(f"k8sjob {version}\n", f"{folder}/kubectl-k8sjob", "--version")


def check_krew(folder: Path, version: str) -> None:
    """Check that the manifest of the plugin names its archive and the version of the packages."""
    digest = hashlib.sha256((folder / "kubectl-k8sjob.tar.gz").read_bytes()).hexdigest()
    manifest = (folder / "k8sjob.yaml").read_text(encoding="utf-8")
    for line in (f"version: v{version}", f"/v{version}/kubectl-k8sjob.tar.gz", f"sha256: {digest}"):
        if f"{line}\n" not in manifest:
            sys.exit(f"{folder}/k8sjob.yaml: {line!r} is missing")


def main(folder: Path) -> None:
    """Check the packages of a folder; a missing package or Python is an error."""
    packages = [*folder.glob("k8sjob-*.whl"), *folder.glob("k8sjob-*.tar.gz")]
    if len(packages) != 2:
        sys.exit(f"{folder}: needs one wheel and one sdist; make release builds them")
    version = packages[0].name.split("-")[1]
    check_krew(folder / "krew", version)
    missing = []
    for python in PYTHONS:
        find = ("uv", "python", "find", "-q", "--no-python-downloads", python)
        if subprocess.run(find, check=False, stdout=subprocess.DEVNULL).returncode:
            missing.append(python)
            continue
        for package in packages:
            check(package, folder / "krew/kubectl-k8sjob.tar.gz", python, version)
            sys.stdout.write(f"{package.name} works on Python {python}\n")
            sys.stdout.flush()
    if missing:
        versions = " ".join(missing)
        sys.exit(f"not checked: Python {versions} is not installed; uv python install {versions}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))

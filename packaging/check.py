"""A release as its users install it: python packaging/check.py FOLDER, after uv build.

The wheel and the sdist of FOLDER are installed in an empty environment of each Python that uv
finds, and print the version and a manifest.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

EXAMPLE = Path(__file__).resolve().parents[1] / "manifests/digits-ddp/job.yaml"
PYTHONS = ("3.11", "3.12", "3.13")


def check(package: Path, python: str) -> str:
    """Install one package, use it, and return the version that it prints."""
    with tempfile.TemporaryDirectory() as folder:
        _run("uv", "venv", "-q", "--python", python, f"{folder}/venv")
        _run("uv", "pip", "install", "-q", "--python", f"{folder}/venv/bin/python", str(package))
        k8sjob = f"{folder}/venv/bin/k8sjob"
        _run(k8sjob, "render", str(EXAMPLE))
        return _run(k8sjob, "--version").strip()


def _run(*argv: str) -> str:
    return subprocess.run(argv, check=True, text=True, stdout=subprocess.PIPE).stdout


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    packages = [*folder.glob("k8sjob-*.whl"), *folder.glob("k8sjob-*.tar.gz")]
    find = ("uv", "python", "find", "-q", "--no-python-downloads")
    pythons = [p for p in PYTHONS if not subprocess.call((*find, p), stdout=subprocess.DEVNULL)]
    if not packages or not pythons:
        sys.exit("no package, or no Python from 3.11 to 3.13")
    for package in packages:
        for python in pythons:
            line = f"{package.name} on Python {python}: {check(package, python)}\n"
            sys.stdout.write(line)

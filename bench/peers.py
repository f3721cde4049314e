"""The tools that one would use instead, in a virtual environment of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

PACKAGES = ("kubeflow-training", "torchx", "docker")


def environment() -> Path:
    """The `bin` folder of the peers' environment, made on first use outside the checkout."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = cache / "k8sjob-bench" / "peers"
    ready = folder / ".ready"
    if not ready.exists():
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
        pip = folder / "bin" / "pip"
        subprocess.run([str(pip), "install", "-q", *PACKAGES], check=True)
        ready.touch()
    return folder / "bin"


def versions() -> dict[str, str]:
    """The peers' versions, as installed."""
    code = (
        "import importlib.metadata as m, json, sys;"
        "print(json.dumps({p: m.version(p) for p in sys.argv[1:]}))"
    )
    import json

    done = subprocess.run(
        [str(environment() / "python"), "-c", code, *PACKAGES[:2]],
        check=True,
        capture_output=True,
        text=True,
    )
    return dict(json.loads(done.stdout))

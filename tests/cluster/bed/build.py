"""The bed's programs, built from Go modules by their names, once for each set of versions.

Kubernetes and etcd come from the module in `kubernetes/`, pinned by its go.sum; the others are
installed by name and version, which Go's checksum database verifies.
"""

import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

from baseimage import cache_home, once

MODULE = Path(__file__).resolve().parents[1] / "kubernetes"
KUBERNETES = "v1.34.4"
OPERATOR = "github.com/kubeflow/training-operator@v1.9.4"
KWOK = "sigs.k8s.io/kwok@v0.7.0"
COREDNS = "github.com/coredns/coredns@v1.15.0"
NAMES = ("kube-apiserver", "kube-controller-manager", "kube-scheduler", "kubelet", "kubectl")
INSTALLED = (
    OPERATOR.replace("@", "/cmd/training-operator.v1@"),
    KWOK.replace("@", "/cmd/kwok@"),
    COREDNS,
)
COMPONENT = "k8s.io/component-base/version"
MAJOR, MINOR = KUBERNETES.removeprefix("v").split(".")[:2]
LDFLAGS = (
    f"-s -w -X {COMPONENT}.gitVersion={KUBERNETES}"
    f" -X {COMPONENT}.gitMajor={MAJOR} -X {COMPONENT}.gitMinor={MINOR}"
)


def binaries():
    """The folder of the programs; the first time takes ten minutes on two cores."""
    sources = [*sorted(MODULE.rglob("*.go")), MODULE / "go.mod", MODULE / "go.sum"]
    digest = hashlib.sha256(repr((LDFLAGS, INSTALLED)).encode())
    for source in sources:
        digest.update(source.read_bytes())
    folder = cache_home() / f"bin-{digest.hexdigest()[:12]}"
    with once("bin"):
        if not folder.exists():
            _build(folder)
    return folder


def module_folder(module):
    """Where Go keeps the source of NAME@VERSION; it is there once the programs are built."""
    home = subprocess.run(
        ["go", "env", "GOMODCACHE"], capture_output=True, text=True, check=True
    ).stdout.strip()
    return Path(home) / module


def _build(folder):
    making = folder.with_suffix(".making")
    shutil.rmtree(making, ignore_errors=True)
    making.mkdir()
    kubernetes = ["build", "-trimpath", "-ldflags", LDFLAGS, "-o", f"{making}/"]
    steps = [
        ([*kubernetes, ".", "./etcd", "./pause"], MODULE),
        *((["install", "-trimpath", package], making) for package in INSTALLED),
    ]
    environment = os.environ | {
        "CGO_ENABLED": "0",
        "GOBIN": str(making),
        "GOFLAGS": "",
        "GOTOOLCHAIN": "auto",  # an older go fetches the one that a module asks for
    }
    for number, (step, where) in enumerate(steps, 1):
        name = "kubernetes" if where is MODULE else step[-1]
        print(f"building the test cluster, {number} of {len(steps)}: {name}", file=sys.stderr)
        subprocess.run(["go", *step], cwd=where, env=environment, check=True, timeout=3600)
    for name in NAMES:
        (making / name).symlink_to("kubernetes")
    making.rename(folder)

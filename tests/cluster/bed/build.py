"""The bed's programs, built from Go modules by their names, once for each set of versions.

Kubernetes and etcd come from the module in `kubernetes/`, pinned by its go.sum; the others are
named by their versions, which Go's checksum database verifies.
"""

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from baseimage import cache_home, once

MODULE = Path(__file__).resolve().parents[1] / "kubernetes"
KUBERNETES = "v1.34.4"
OPERATOR = "github.com/kubeflow/training-operator@v1.9.4"
COREDNS = "github.com/coredns/coredns"
# With the plugins of components.COREFILE alone: with all of them it takes twice as long to build.
DNS = {
    "go.mod": f"module dns\ngo 1.26.0\nrequire {COREDNS} v1.15.0\n",
    "main.go": f"""package main
import (
	"{COREDNS}/coremain"
	_ "{COREDNS}/plugin/bind"
	_ "{COREDNS}/plugin/errors"
	_ "{COREDNS}/plugin/kubernetes"
)
func main() {{ coremain.Run() }}
""",
}
NAMES = ("kube-apiserver", "kube-controller-manager", "kube-scheduler", "kubelet", "kubectl")
INSTALLED = OPERATOR.replace("@", "/cmd/training-operator.v1@")
COMPONENT = "k8s.io/component-base/version"
MAJOR, MINOR = KUBERNETES.removeprefix("v").split(".")[:2]
LDFLAGS = (
    f"-s -w -X {COMPONENT}.gitVersion={KUBERNETES}"
    f" -X {COMPONENT}.gitMajor={MAJOR} -X {COMPONENT}.gitMinor={MINOR}"
)


def binaries():
    """The folder of the programs; the first time takes ten minutes on two cores."""
    sources = [*sorted(MODULE.rglob("*.go")), MODULE / "go.mod", MODULE / "go.sum"]
    digest = hashlib.sha256(repr((LDFLAGS, INSTALLED, DNS)).encode())
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


def go(what, args, folder, into):
    """Run the go command in a folder; `go install` puts programs into another one."""
    environment = os.environ | {
        "CGO_ENABLED": "0",
        "GOBIN": str(into),
        "GOFLAGS": "",
        "GOTOOLCHAIN": "auto",  # an older go fetches the one that a module asks for
    }
    print(f"building {what}", file=sys.stderr)
    subprocess.run(["go", *args], cwd=folder, env=environment, check=True, timeout=3600)


def _build(folder):
    making = folder.with_suffix(".making")
    shutil.rmtree(making, ignore_errors=True)
    making.mkdir()
    kubernetes = ["build", "-trimpath", "-ldflags", LDFLAGS, "-o", f"{making}/"]
    go("the test cluster: Kubernetes", [*kubernetes, ".", "./etcd", "./pause"], MODULE, making)
    go(f"the test cluster: {OPERATOR}", ["install", "-trimpath", INSTALLED], making, making)
    with tempfile.TemporaryDirectory() as module:
        for name, text in DNS.items():
            Path(module, name).write_text(text)
        dns = ["build", "-mod=mod", "-trimpath", "-o", str(making / "coredns"), "."]
        go("the test cluster: CoreDNS", dns, module, making)
    for name in NAMES:
        (making / name).symlink_to("kubernetes")
    making.rename(folder)

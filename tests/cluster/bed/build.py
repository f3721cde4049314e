"""The bed's programs, built from Go modules by their names, once for each set of versions.

Kubernetes and etcd come from the module in `kubernetes/`, and the controllers that only some tests
need from the one in `controllers/`, pinned by their go.sum; the others are named by their versions,
which Go's checksum database verifies.
"""

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import yaml
from baseimage import cache_home, once
from gomodules import JOBSET, KUEUE, OPERATOR, TRAINER, source

MODULE = Path(__file__).resolve().parents[1] / "kubernetes"
CONTROLLERS = MODULE.with_name("controllers")
KUBERNETES = "v1.34.4"
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


# Module, its folders that kustomize renders, and the namespace where those do not name one.
MANIFESTS = {
    "jobset": (JOBSET, ["config/default"], ""),
    "trainer": (
        TRAINER,
        [f"manifests/base/{part}" for part in ("crds", "manager", "rbac", "webhook")]
        + ["manifests/overlays/manager/namespace.yaml"],
        "kubeflow-system",
    ),
    "kueue": (KUEUE, ["config/default"], ""),
}
NOT_HERE = ("Deployment", "APIService")  # an APIService without its server breaks discovery


def binaries():
    """The folder of the programs; the first time takes ten minutes on two cores."""
    return _built("bin", sorted(MODULE.rglob("*.go")), MODULE, (LDFLAGS, INSTALLED, DNS), _build)


def controllers():
    """The folder of the programs and manifests of `controllers.ALL`; see `binaries`."""
    return _built("controllers", [], CONTROLLERS, (MANIFESTS, NOT_HERE), _build_controllers)


def _built(name, sources, module, settings, build):
    """The folder of this name that was built of these sources and settings; builds it once."""
    digest = hashlib.sha256(repr(settings).encode())
    for file in (*sources, module / "go.mod", module / "go.sum"):
        digest.update(file.read_bytes())
    folder = cache_home() / f"{name}-{digest.hexdigest()[:12]}"
    if not folder.exists():  # asked without the lock: another version may be built for minutes
        with once(name):
            if not folder.exists():
                making = folder.with_suffix(".making")
                shutil.rmtree(making, ignore_errors=True)
                making.mkdir()
                build(making)
                making.rename(folder)
    return folder


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


def _build(making):
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


def _build_controllers(making):
    programs = ["build", "-trimpath", "-ldflags", "-s -w", "-o", f"{making}/", "tool"]
    go(f"the test cluster: {', '.join(MANIFESTS)}", programs, CONTROLLERS, making)
    for name, (module, parts, namespace) in MANIFESTS.items():
        home = source(module)
        with tempfile.TemporaryDirectory() as folder:  # kustomize takes no absolute paths
            resources = [os.path.relpath(home / part, os.path.realpath(folder)) for part in parts]
            rendered = {"namespace": namespace, "resources": resources}
            Path(folder, "kustomization.yaml").write_text(json.dumps(rendered))
            kustomize = [binaries() / "kubectl", "kustomize", folder]
            anywhere = "--load-restrictor=LoadRestrictionsNone"
            text = subprocess.run([*kustomize, anywhere], capture_output=True, check=True).stdout
        objects = yaml.load_all(text, getattr(yaml, "CSafeLoader", yaml.SafeLoader))
        kept = [_terse(one) for one in objects if one["kind"] not in NOT_HERE]
        (making / f"{name}.json").write_text(json.dumps(kept))


def _terse(part):
    """Without descriptions, which are most of a CRD and a third of what it costs an apiserver."""
    if isinstance(part, list):
        return [_terse(item) for item in part]
    if not isinstance(part, dict):
        return part
    texts = [key for key, value in part.items() if key == "description" and isinstance(value, str)]
    return {key: _terse(value) for key, value in part.items() if key not in texts}

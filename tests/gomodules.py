"""Go modules of the controllers: versions, sources, and the CRDs of the kinds of job."""

from __future__ import annotations

import functools
import json
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

OPERATOR = "github.com/kubeflow/training-operator@v1.9.4"
JOBSET = "sigs.k8s.io/jobset@v0.12.0"
TRAINER = "github.com/kubeflow/trainer/v2@v2.3.0"
COSCHEDULING = "sigs.k8s.io/scheduler-plugins@v0.34.7"
KUEUE = "sigs.k8s.io/kueue@v0.19.0"
CRDS = {
    "PyTorchJob": (OPERATOR, "manifests/base/crds/kubeflow.org_pytorchjobs.yaml"),
    "JobSet": (JOBSET, "config/components/crd/bases/jobset.x-k8s.io_jobsets.yaml"),
    "TrainJob": (TRAINER, "manifests/base/crds/trainer.kubeflow.org_trainjobs.yaml"),
    "TrainingRuntime": (TRAINER, "manifests/base/crds/trainer.kubeflow.org_trainingruntimes.yaml"),
}
"""Module and path of the CRD of a kind."""


@functools.cache
def source(module: str) -> Path | None:
    """The source of NAME@VERSION, downloaded where it must be; None where there is no Go for it."""
    for cache in filter(None, (os.environ.get("GOMODCACHE"), Path.home() / "go/pkg/mod")):
        if (home := Path(cache) / module).is_dir():
            return home
    if shutil.which("go") is None:
        return None
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(["go", "mod", "init", "example.org/fetch"], cwd=folder, check=True)
        fetched = subprocess.run(
            ["go", "mod", "download", "-json", module],
            cwd=folder,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
    return Path(json.loads(fetched.stdout)["Dir"]) if fetched.returncode == 0 else None

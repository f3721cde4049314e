"""k8sjob: typed PyTorch training jobs, the same job.yaml on a laptop and on Kubernetes.

Nothing is imported here before it is asked for: the runtime inside a container shares this package
with the client and must load none of the client's dependencies.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from k8sjob.contract import __version__
    from k8sjob.errors import JobFailed, K8sJobError, SpecError
    from k8sjob.proving.proof import prove
    from k8sjob.python_api import plan, run, submit
    from k8sjob.rendering.dockerfile import dockerfile
    from k8sjob.rendering.manifest import render, replica_env
    from k8sjob.spec import JobSpec
    from k8sjob.spec.load import load

_HOME = {
    "__version__": "k8sjob.contract",
    "JobFailed": "k8sjob.errors",
    "JobSpec": "k8sjob.spec",
    "K8sJobError": "k8sjob.errors",
    "SpecError": "k8sjob.errors",
    "dockerfile": "k8sjob.rendering.dockerfile",
    "load": "k8sjob.spec",
    "plan": "k8sjob.python_api",
    "prove": "k8sjob.proving.proof",
    "render": "k8sjob.rendering.manifest",
    "replica_env": "k8sjob.rendering.manifest",
    "run": "k8sjob.python_api",
    "submit": "k8sjob.python_api",
}

__all__ = [
    "JobFailed",
    "JobSpec",
    "K8sJobError",
    "SpecError",
    "__version__",
    "dockerfile",
    "load",
    "plan",
    "prove",
    "render",
    "replica_env",
    "run",
    "submit",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'k8sjob' has no attribute {name!r}")
    from importlib import import_module  # noqa: PLC0415 - lazy, see the module's docstring

    value = globals()[name] = getattr(import_module(_HOME[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted(__all__)

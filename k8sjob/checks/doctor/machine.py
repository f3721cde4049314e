"""The checks of this machine: clients for a cluster, packages and GPUs for jobs run here."""

from __future__ import annotations

import json
import os
import platform
import re
import subprocess
from dataclasses import dataclass
from importlib import metadata
from typing import TYPE_CHECKING, Final

from k8sjob.backends.local.machine import visible_gpus
from k8sjob.checks.doctor.check import fine, problem, warning
from k8sjob.contract import counted
from k8sjob.environment import variables
from k8sjob.errors import install_step

if TYPE_CHECKING:
    from collections.abc import Iterator

    from k8sjob.findings import Finding

OLDEST_TORCH: Final = (2, 6)
_SKEW: Final = 1
"""Minor releases that kubectl may be older or newer than the apiserver."""


@dataclass(frozen=True, slots=True)
class Machine:
    """The versions of installed packages; None: not installed.

    Attributes:
        kubectl: as "v1.34.4"; None also if it is of no use, or not meant.
        gpus: how many GPUs a job on this machine can use.
    """

    python: str
    torch: str | None = None
    kubectl: str | None = None
    gpus: int = 0


def look(chosen: str | None = None) -> Machine:
    """The facts about this machine, gathered without large imports.

    Args:
        chosen: the client that is meant, as for `client`; kubectl is looked at where it is used.
    """
    return Machine(
        python=platform.python_version(),
        torch=_package("torch"),
        kubectl=_kubectl() if chosen == "kubectl" else None,
        gpus=len(visible_gpus()),
    )


def client(machine: Machine, chosen: str | None, server: str = "") -> Finding:
    """Whether kubectl, if that is chosen, is installed in a version that fits the apiserver's."""
    if chosen != "kubectl":
        return fine("client", "requests are made without kubectl")
    if machine.kubectl is None:
        step = "install kubectl, or leave out --client=kubectl"
        return problem("client", "kubectl is not installed", step)
    return _kubectl_client(machine.kubectl, server)


def _kubectl_client(version: str, server: str) -> Finding:
    client = f"kubectl {version}"
    ours, theirs = _minor(version), _minor(server)
    if ours is None or theirs is None or abs(ours - theirs) <= _SKEW:
        return fine("client", client)
    return warning(
        "client",
        f"{client} is {abs(ours - theirs)} minor releases from the server's {server}",
        f"install a kubectl 1.{theirs}",
    )


def here(machine: Machine) -> Iterator[Finding]:
    """Check what jobs on this machine can use."""
    yield fine("python", f"Python {machine.python}")
    if machine.torch is None:
        step = f"for k8sjob run: {install_step('run')}"
        yield warning("torch", "torch is not installed", step)
    elif tuple(map(int, re.findall(r"\d+", machine.torch)[:2])) < OLDEST_TORCH:
        oldest = ".".join(map(str, OLDEST_TORCH))
        step = f"for k8sjob run: pip install 'torch>={oldest}'"
        yield warning("torch", f"torch {machine.torch} is older than {oldest}", step)
    else:
        yield fine("torch", f"torch {machine.torch}: k8sjob run works")
    if machine.gpus:
        yield fine("devices", f"{counted(machine.gpus, 'GPU')} on this machine")
    else:
        yield fine("devices", "no GPU on this machine: jobs run on its CPUs, with gloo")


def _package(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _kubectl() -> str | None:
    try:
        done = subprocess.run(
            ["kubectl", "version", "--client", "-o", "json"],  # noqa: S607 - the one on PATH
            env=variables() | {"KUBECONFIG": os.devnull},  # some vendors' ask the server
            capture_output=True,
            timeout=20,
            check=True,
        )
        return str(json.loads(done.stdout)["clientVersion"]["gitVersion"])
    except (OSError, subprocess.SubprocessError, ValueError, KeyError, TypeError):
        return None


def _minor(version: str) -> int | None:
    """The minor number of a version like v1.34.4; None if it has another form."""
    match = re.match(r"v?1\.(\d+)", version)
    return int(match[1]) if match else None

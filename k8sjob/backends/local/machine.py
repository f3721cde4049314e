"""The resources of this machine: GPUs, processor cores, Python packages."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from importlib import metadata, util
from itertools import takewhile
from typing import TYPE_CHECKING, Final

from k8sjob import environment
from k8sjob.contract import counted
from k8sjob.errors import BackendError
from k8sjob.requirements import required_names, requirements_text
from k8sjob.spec import Image

if TYPE_CHECKING:
    from pathlib import Path

    from k8sjob.spec import JobSpec

_PROCESSES: Final = 32
"""Processes that may run on any machine, however few its cores."""
_PROCESSES_PER_CORE: Final = 4
_GPU: Final = re.compile(r"\+?\d|GPU-|MIG-")
"""How an entry of CUDA_VISIBLE_DEVICES begins."""


def visible_gpus() -> tuple[str, ...]:
    """The GPUs that this process may use, as CUDA_VISIBLE_DEVICES names them.

    From nvidia-smi, as an import of torch takes seconds.
    """
    chosen = environment.visible_gpus()
    if chosen is not None:
        # As CUDA reads it: the first invalid entry ends the list, and a repeated one empties it.
        names = [name.strip() for name in chosen.split(",")]
        valid = tuple(takewhile(_GPU.match, names))
        return valid if len(set(valid)) == len(valid) else ()
    try:
        answer = subprocess.run(
            ["nvidia-smi", "--query-gpu=index", "--format=csv,noheader"],  # noqa: S607 - on PATH
            capture_output=True,
            text=True,
            timeout=20,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return ()
    return tuple(line.strip() for line in answer.stdout.splitlines() if line.strip().isdecimal())


def check_processes(count: int) -> None:
    """Refuse a job that would make this machine unusable.

    Raises:
        BackendError: it has far more processes than there are cores.
    """
    cores = os.cpu_count() or 1
    limit = max(_PROCESSES, _PROCESSES_PER_CORE * cores)
    if count > limit:
        raise BackendError(
            f"the job has {counted(count, 'process', 'es')} and this machine"
            f" {counted(cores, 'core')}: more than {limit} would make it unusable;"
            " lower replicas.workers, or run it anyway with `k8sjob run --oversubscribe`"
        )


def check_torch() -> None:
    """BackendError where torch is not installed here, with the command that installs it."""
    # Found and not imported: torch takes seconds.
    if util.find_spec("torch") is None:
        raise BackendError(f"torch is not installed for {sys.executable}", _pip("torch"))


def check_packages(spec: JobSpec, context: Path) -> None:
    """Refuse a job whose packages are not installed here.

    Only names are compared, not versions: a laptop's may be newer than the image's. Lines with a
    marker, an option or a URL are ignored.

    `context` is the folder with the job's code, and its requirements file.

    Raises:
        BackendError: with the command that installs them.
        ImageError: the requirements file cannot be read.
    """
    if spec.uses_agent:
        check_torch()
    if not isinstance(spec.image, Image):
        return
    missing, arguments = [], []
    if spec.image.requirements:
        file = context / spec.image.requirements
        missing = _missing(requirements_text(file))
        arguments = ["-r", str(file)] if missing else []
    for line in spec.image.pip:
        if lacking := _missing(line):
            missing += lacking
            arguments.append(line)
    if missing:
        raise BackendError(
            f"{sys.executable}, which runs the job on this machine, lacks packages of the"
            f" image's requirements: {', '.join(missing)}",
            _pip(*arguments),
        )


def _missing(requirements: str) -> list[str]:
    """The packages of some requirements that are not installed."""
    names = []
    for name in required_names(requirements):
        try:
            metadata.distribution(name)
        except metadata.PackageNotFoundError:
            names.append(name)
    return names


def _pip(*arguments: str) -> str:
    installer = [sys.executable, "-m", "pip", "install"]
    if util.find_spec("pip") is None:  # as in the environments of uv
        installer = ["uv", "pip", "install", "--python", sys.executable]
    return f"install with `{shlex.join([*installer, *arguments])}`"

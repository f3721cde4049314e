"""The GPUs of this machine, divided among the replicas of a job."""

from __future__ import annotations

import os
import subprocess
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["share", "visible_gpus"]


def visible_gpus(environ: Mapping[str, str] | None = None) -> tuple[str, ...]:
    """The GPUs that a process of this machine may use, as CUDA_VISIBLE_DEVICES names them.

    torch is not asked: to import it takes seconds. A GPU that nvidia-smi does not list is not seen.

    Args:
        environ: the environment to read; None is the process's own.
    """
    chosen = (os.environ if environ is None else environ).get("CUDA_VISIBLE_DEVICES")
    if chosen is not None:
        names = [name.strip() for name in chosen.split(",")]
        return tuple(name for name in names if name and not name.startswith("-"))
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


def share(gpus: tuple[str, ...], wanted: Mapping[str, int]) -> dict[str, str] | None:
    """CUDA_VISIBLE_DEVICES of each replica, no GPU given twice; None where they do not suffice.

    Args:
        gpus: those that are there.
        wanted: how many each replica asks for.
    """
    if sum(wanted.values()) > len(gpus):
        return None
    rest = iter(gpus)
    return {replica: ",".join(next(rest) for _ in range(n)) for replica, n in wanted.items()}

"""The checks of this machine: packages and GPUs for jobs run here."""

from __future__ import annotations

import platform
import re
from typing import TYPE_CHECKING, Final

from k8sjob.backends.local.machine import visible_gpus
from k8sjob.checks.distributions import installed_version
from k8sjob.checks.doctor.check import fine, warning
from k8sjob.contract import counted
from k8sjob.errors import install_step

if TYPE_CHECKING:
    from collections.abc import Iterator

    from k8sjob.findings import Finding

OLDEST_TORCH: Final = (2, 6)


def here() -> Iterator[Finding]:
    """Check what jobs on this machine can use."""
    yield fine("python", f"Python {platform.python_version()}")
    torch = installed_version("torch")
    if not torch:
        step = f"for k8sjob run: {install_step('run')}"
        yield warning("torch", "torch is not installed", step)
    elif tuple(map(int, re.findall(r"\d+", torch)[:2])) < OLDEST_TORCH:
        oldest = ".".join(map(str, OLDEST_TORCH))
        step = f"for k8sjob run: pip install 'torch>={oldest}'"
        yield warning("torch", f"torch {torch} is older than {oldest}", step)
    else:
        yield fine("torch", f"torch {torch}: k8sjob run works")
    if gpus := len(visible_gpus()):
        yield fine("devices", f"{counted(gpus, 'GPU')} on this machine")
    else:
        yield fine("devices", "no GPU on this machine: jobs run on its CPUs, with gloo")

"""Private copies of a job's volumes: a run of `prove` or `fit` writes in no folder of the user."""

from __future__ import annotations

import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from k8sjob.backends.local.prepare import Places
from k8sjob.backends.local.state_folder import Store
from k8sjob.errors import BackendError

if TYPE_CHECKING:
    from k8sjob.backends.api import Plan

MAX_BYTES: Final = 2 << 30
MAX_FILES: Final = 50_000


def private(plan: Plan, root: Path) -> Plan:
    """The plan with copies of its volumes in a folder.

    Raises:
        BackendError: a volume has no counterpart on this machine, or is too large to be copied.
    """
    folders = Places(plan, root, root / "checkpoints", Store()).of("master-0")
    copies: dict[Path, Path] = {}
    volumes = []
    for volume in plan.spec.volumes:
        source = Path(folders[volume.mount]).resolve()
        if not source.is_relative_to(root.resolve()):  # as an emptyDir is
            if source not in copies:
                copies[source] = root / "volumes" / volume.name / source.name
                _check(source, volume.name, free=shutil.disk_usage(root).free)
                _copy(source, copies[source])
            # What is copied is already the part at sub_path.
            update = {"local": str(copies[source]), "sub_path": None}
            volume = volume.model_copy(update=update)  # noqa: PLW2901 - the same volume
        volumes.append(volume)
    changes: dict[str, Any] = {"volumes": volumes}
    if checkpoint := plan.spec.checkpoint:  # empty, wherever the user has it
        changes["checkpoint"] = checkpoint.model_copy(update={"dir": "/k8sjob-prove"})
    return replace(plan, spec=plan.spec.model_copy(update=changes))


def _check(source: Path, volume: str, *, free: int) -> None:
    size = count = 0
    # A link that leads back gives more and more files.
    for parent, _, names in os.walk(source, followlinks=True):
        count += 1 + len(names)
        size += sum(file.stat().st_size for n in names if (file := Path(parent, n)).is_file())
        if size > min(MAX_BYTES, free) or count > MAX_FILES:
            raise BackendError(
                f"volume {volume!r}: {source} has more than {MAX_BYTES >> 30} GiB or"
                f" {MAX_FILES:,} files, and the script gets a copy of it, so that it changes"
                " nothing of yours; name a smaller folder in volumes[].local"
            )


def _copy(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True)
    if source.is_file():
        shutil.copy2(source, target)
    elif source.is_dir():  # with what links lead to: through a link it would write there
        shutil.copytree(source, target, ignore=_special)
    else:  # the claim of a job that has not run here
        target.mkdir()


def _special(folder: str, names: list[str]) -> list[str]:
    """Pipes, sockets, devices, and links that lead nowhere."""
    paths = (Path(folder, name) for name in names)
    return [path.name for path in paths if not (path.is_file() or path.is_dir())]

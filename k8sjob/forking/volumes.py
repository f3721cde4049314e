"""Private copies of a job's volumes: a run of `prove` or `fit` writes in no folder of the user."""

from __future__ import annotations

import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

from k8sjob.backends.local.prepare import Places
from k8sjob.backends.local.state_folder import Store
from k8sjob.errors import BackendError
from k8sjob.spec.replicas import Volume

if TYPE_CHECKING:
    from collections.abc import Mapping

    from k8sjob.backends.api import Plan
    from k8sjob.spec import JobSpec

MAX_BYTES: Final = 2 << 30
MAX_FILES: Final = 50_000


def private(plan: Plan, root: Path) -> Plan:
    """The plan with copies of its volumes in a folder.

    Raises:
        BackendError: a volume has no counterpart on this machine, or is too large to be copied.
    """
    spec, copies, volumes = plan.spec, dict[Path, Path](), list[Volume]()
    # Without checkpoint.dir, which hides a volume of the same path.
    bare = replace(plan, spec=spec.model_copy(update={"checkpoint": None}))
    folders = Places(bare, root, root, Store()).of("master-0")
    for volume in spec.volumes:
        source = Path(folders[volume.mount]).resolve()
        if not source.is_relative_to(root.resolve()):  # as an emptyDir is
            if source not in copies:
                copies[source] = root / "volumes" / volume.name / source.name
                _copy(source, copies[source], f"volume {volume.name!r}")
            # What is copied is already the part at sub_path.
            update = {"local": str(copies[source]), "sub_path": None}
            volume = volume.model_copy(update=update)  # noqa: PLW2901 - the same volume
        volumes.append(volume)
    if spec.checkpoint:  # empty, wherever the user has it
        (root / "checkpoints").mkdir()
        local = {"mount": spec.checkpoint.dir, "local": str(root / "checkpoints")}
        volumes.append(Volume(name="k8sjob-checkpoints", empty_dir={}, **local))
    return replace(plan, spec=spec.model_copy(update={"volumes": volumes}))


def refuse_unhidden(spec: JobSpec, mounts: Mapping[str, str]) -> None:
    """BackendError where a script that has the path of a mount would find a folder of the user."""
    for volume in spec.volumes:
        path = Path(volume.mount)
        if volume.empty_dir is None and volume.mount not in mounts and path.exists():
            raise BackendError(
                f"volume {volume.name!r}: {path} exists on this machine, where no copy can hide it"
                " from the script, which could write there; leave the volume out, with --set"
                " 'volumes=[...]'"
            )


def detach(root: Path) -> None:
    """Let links of the working folders lead to copies, too, where they lead out of the run."""
    # A list, since the loop adds files. rglob() follows no links itself.
    for link in [*(root / "replicas").rglob("*")]:
        if link.is_symlink() and not (source := link.resolve()).is_relative_to(root.resolve()):
            link.unlink()
            if source.is_file() or source.is_dir():
                _copy(source, link, f"link {link.name!r}")


def _copy(source: Path, target: Path, label: str) -> None:
    """Copy what the current user can read, with what links lead to."""
    size = count = 0
    alone = [(str(source.parent), list[str](), [source.name])]
    walk = os.walk(str(source), followlinks=True) if source.is_dir() else iter(alone)
    # Of a folder that exists already: the target's own parents may not.
    free = shutil.disk_usage(target.parents[2]).free
    # A link that leads back gives more and more files.
    for parent, _, names in walk:
        count += 1 + len(names)
        # lost+found at the root of a disk, for example, is root's alone.
        readable = {*names} - {*_unreadable(parent, names)}
        size += sum(Path(parent, name).stat().st_size for name in readable)
        if size > min(MAX_BYTES, free) or count > MAX_FILES:
            raise BackendError(
                f"{label}: {source} has more than {min(MAX_BYTES, free) >> 20:,} MiB or"
                f" {MAX_FILES:,} files, and the script gets a copy of it, so that it changes"
                " nothing of yours; use a smaller folder, for a volume in volumes[].local"
            )
    target.parent.mkdir(parents=True, exist_ok=True)
    if source.is_file():
        shutil.copy2(source, target)
    elif source.is_dir():
        # Links are followed: a link in the copy would lead back to the user's file.
        shutil.copytree(source, target, ignore=_unreadable)
    else:  # the claim of a job that has not run here
        target.mkdir()


def _unreadable(folder: str, names: list[str]) -> list[str]:
    """Pipes, sockets, devices, links that lead nowhere, and what only others can read."""
    paths = (Path(folder, name) for name in names)
    readable = (path for path in paths if os.access(path, os.R_OK))
    return [*{*names} - {path.name for path in readable if path.is_file() or path.is_dir()}]

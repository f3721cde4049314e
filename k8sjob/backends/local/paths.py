"""Paths inside the containers and the folders of this machine that stand for them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from k8sjob.contract import RUNTIME_HOME, WORKDIR
from k8sjob.errors import BackendError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from k8sjob.backends.api import Plan
    from k8sjob.backends.local.store import Store
    from k8sjob.spec import Volume

__all__ = ["Places", "mapped"]


@dataclass(frozen=True, slots=True)
class Places:
    """Where the folders of a job come from.

    Attributes:
        plan: the job, and the folder that relative paths of its spec start from.
        job: the job's folder in the state folder.
        checkpoints: the folder for checkpoint.dir, unless the user has named one.
        store: the state folder.
    """

    plan: Plan
    job: Path
    checkpoints: Path
    store: Store

    def of(self, replica: str) -> dict[str, str]:
        """Each mount path that a replica sees, with its folder here; longer paths first.

        The folders are made where they are missing.

        Raises:
            BackendError: a volume has no counterpart on this machine.
        """
        home = self.job / "replicas" / replica
        found = {WORKDIR: home / "work", RUNTIME_HOME: self.job / "runtime"}
        for index, volume in enumerate(self.plan.spec.volumes):
            found[volume.mount] = self._folder(index, volume, home)
        if self.plan.spec.checkpoint and not self.checkpoints_are_the_users:
            found[self.plan.spec.checkpoint.dir] = self.checkpoints
        return _text(dict(sorted(found.items(), key=lambda item: -len(item[0]))))

    @property
    def checkpoints_are_the_users(self) -> bool:
        """Whether checkpoint.dir lies on a volume for which the user has named a folder here."""
        if self.plan.spec.checkpoint is None:
            return False
        path = self.plan.spec.checkpoint.dir + "/"
        covering = [v for v in self.plan.spec.volumes if path.startswith(v.mount.rstrip("/") + "/")]
        nearest = max(covering, key=lambda volume: len(volume.mount), default=None)
        return nearest is not None and nearest.local is not None

    def _folder(self, index: int, volume: Volume, home: Path) -> Path:
        if volume.local is not None:
            folder = (self.plan.folder / Path(volume.local).expanduser()).absolute()
            if not folder.exists():
                raise BackendError(
                    f"volumes[{index}].local: {folder} is not there; make it, or correct the path"
                )
        elif volume.source in ("config_map", "secret"):
            raise BackendError(
                f"volumes[{index}]: the {volume.source} of {volume.name!r} is in the cluster alone;"
                f" give `local: PATH`, a folder with the same files, for runs on this machine"
            )
        elif volume.pvc is not None:
            folder = self.store.claim(volume.pvc)
        elif volume.empty_dir is not None:
            folder = home / "volumes" / volume.name
        else:
            folder = self.job / "volumes" / volume.name
        return folder / volume.sub_path if volume.sub_path else folder


def mapped(path: str, places: Mapping[str, str]) -> str | None:
    """The path on this machine of one inside the container; None where nothing is mounted there.

    Args:
        path: a path, or text with one behind its first "=", as in "--data=/data/train".
        places: mount path -> folder, longer mount paths first.
    """
    head, equals, tail = path.rpartition("=") if path.startswith("-") else ("", "", path)
    for mount, folder in places.items():
        if tail == mount or tail.startswith(mount.rstrip("/") + "/"):
            return head + equals + folder + tail[len(mount.rstrip("/")) :]
    return None


def _text(places: Mapping[str, Path]) -> dict[str, str]:
    return {mount: str(folder) for mount, folder in places.items()}

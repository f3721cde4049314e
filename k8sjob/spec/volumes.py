"""Files that are mounted into every replica."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Final, Literal

from k8sjob.spec.base import Broken, Flag, Part, doc
from k8sjob.spec.names import AbsolutePath, ObjectName, Text, VolumeName
from k8sjob.spec.quantity import Memory

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["SHM_VOLUME", "EmptyDir", "Volume"]

SHM_VOLUME: Final = "dshm"
"""Name of the volume that is mounted at /dev/shm for `resources.shm`."""
_SOURCES: Final = ("pvc", "host_path", "config_map", "secret", "empty_dir")


class EmptyDir(Part):
    """An empty folder that lives as long as its pod."""

    medium: Annotated[
        Literal["Memory"] | None, doc("Memory: a tmpfs; null: the node's disk.", "Memory")
    ] = None
    size_limit: Annotated[
        Memory | None,
        doc("Size at which the pod is evicted; null: none.", "20Gi", unit="bytes"),
    ] = None


class Volume(Part):
    """One mount with exactly one source."""

    name: Annotated[VolumeName, doc("Name of the volume, unique in the job.", "data")]
    mount: Annotated[AbsolutePath, doc("Where it appears in the container.", "/data")]
    pvc: Annotated[
        ObjectName | None,
        doc("A PersistentVolumeClaim in the job's namespace.", "datasets"),
    ] = None
    host_path: Annotated[
        AbsolutePath | None, doc("A path on the node itself.", "/mnt/datasets")
    ] = None
    config_map: Annotated[
        ObjectName | None, doc("A ConfigMap, a file for each key; read-only.", "training-settings")
    ] = None
    secret: Annotated[
        ObjectName | None, doc("A Secret, a file for each key; read-only.", "dataset-token")
    ] = None
    empty_dir: Annotated[
        EmptyDir | None,
        doc("An empty folder of the pod's own; {} for the defaults.", {"size_limit": "20Gi"}),
    ] = None
    sub_path: Annotated[
        Text | None, doc("Mount this folder inside the volume instead of its root.", "mnist")
    ] = None
    read_only: Annotated[Flag, doc("Whether the containers may only read it.", True)] = False
    local: Annotated[
        Text | None,
        doc(
            "What `k8sjob run` uses on this machine instead, relative to the job.yaml; null: a"
            " folder of the job's own.",
            "./data",
        ),
    ] = None

    @property
    def source(self) -> str:
        """The name of the one source that is given: pvc, host_path, ..."""
        return next(name for name in _SOURCES if getattr(self, name) is not None)

    def rules(self) -> Iterator[Broken]:
        """Exactly one source, a path inside the volume, no name or mount that is taken."""
        given = [name for name in _SOURCES if getattr(self, name) is not None]
        if len(given) != 1:
            seen = " and ".join(given) or "no source"
            yield Broken((), f"{seen} given; write exactly one of {', '.join(_SOURCES)}")
        if self.sub_path is not None:
            parts = self.sub_path.split("/")
            if not self.sub_path or not parts[0] or ".." in parts:
                yield Broken(
                    ("sub_path",),
                    f"{self.sub_path!r} is not a folder inside the volume; write it without a"
                    " leading '/' and without '..'",
                )
        if self.name == SHM_VOLUME:
            yield Broken(
                ("name",), f"{self.name!r} is the name of /dev/shm's volume; choose another"
            )
        if self.mount in ("/", "/dev/shm"):  # noqa: S108 - a mount point, not a temporary file
            yield Broken(
                ("mount",),
                f"{self.mount!r} cannot be mounted over; for /dev/shm set resources.shm",
            )

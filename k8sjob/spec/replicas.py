"""Replicas: how many, how they restart and end, what each asks of its node and mounts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Final, Literal

from pydantic import Discriminator, Tag

from k8sjob.findings import invalid
from k8sjob.kube.quantity import parse
from k8sjob.spec.base import FROZEN_EMPTY, Count, Flag, FrozenMap, Part, Whole, doc
from k8sjob.spec.values import (
    AbsolutePath,
    Cpu,
    Duration,
    LabelKey,
    LabelValue,
    Memory,
    ObjectName,
    Quantity,
    ResourceName,
    Text,
    VolumeName,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from k8sjob.findings import Finding


class Elastic(Part):
    """Bounds between which the number of nodes may change while the job runs."""

    min: Annotated[Count, doc("Minimum number of nodes that train.", 2, unit="nodes")]
    max: Annotated[Count, doc("Maximum number of nodes that train.", 4, unit="nodes")]

    def rules(self) -> Iterator[Finding]:
        """The bounds are in order."""
        if self.min > self.max:
            yield invalid(
                ("min",),
                f"{self.min} is more than max {self.max}",
                f"set min to at most {self.max}",
            )


class Replicas(Part):
    """The shape of the job: one Master and `workers` Workers, each one pod and one node."""

    workers: Whole = doc(
        "Workers in addition to the Master; 0: only the Master. An elastic job has no"
        " Master: its workers + 1 nodes are all Workers.",
        3,
        unit="pods",
        ge=0,
        le=9999,
        default=0,
    )
    nproc_per_node: Count | None = doc(
        "Training processes in each pod; null: one for each GPU, or one without GPUs."
        " With GPUs it must equal their number.",
        2,
        unit="processes",
        default=None,
    )
    elastic: Elastic | None = doc(
        "Let nodes join and leave within these bounds: the available nodes train, and"
        " resume from a checkpoint when their number changes; null: the number is fixed.",
        {"min": 2, "max": 4},
        default=None,
    )

    @property
    def nnodes(self) -> int:
        """Pods of the job: the Master and its Workers, or the Workers of an elastic job."""
        return self.workers + 1

    def rules(self) -> Iterator[Finding]:
        """An elastic job starts with a number of nodes between its bounds."""
        bounds = self.elastic
        if bounds and not bounds.min <= self.nnodes <= bounds.max:
            yield invalid(
                ("elastic",),
                f"workers {self.workers} + 1 = {self.nnodes} nodes are not between min {bounds.min}"
                f" and max {bounds.max}",
                f"set workers to {bounds.min - 1}..{bounds.max - 1}",
            )


class Gang(Part):
    """All pods are scheduled together or none, by a gang scheduler that the operator supports."""

    shorthand = "scheduler"

    scheduler: ObjectName | None = doc(
        "Name of the scheduler; null: the cluster's default.", "volcano", default=None
    )
    min_available: Count | None = doc(
        "Number of pods that must fit at once; null: all of them.", 4, unit="pods", default=None
    )
    queue: ObjectName | None = doc(
        "The scheduler's queue; it cannot be changed later.", "research", default=None
    )


class Topology(Part):
    """The level of Kueue's topology, a label of the nodes, at which one domain takes all pods."""

    shorthand = "preferred"

    required: LabelKey | None = doc(
        "Wait until one domain has room for all pods.",
        "cloud.provider.com/topology-rack",
        default=None,
    )
    preferred: LabelKey | None = doc(
        "If no domain has room, use a larger one, or several.",
        "cloud.provider.com/topology-rack",
        default=None,
    )

    def rules(self) -> Iterator[Finding]:
        """One of the two."""
        if (self.required is None) == (self.preferred is None):
            count = "neither is" if self.required is None else "both are"
            yield invalid((), f"{count} given", "write either required or preferred")


class Runtime(Part):
    """A runtime of Kubeflow Trainer that exists, with all that a TrainJob does not say."""

    shorthand = "name"

    name: Annotated[ObjectName, doc("Its name.", "torch-distributed")]
    kind: Literal["ClusterTrainingRuntime", "TrainingRuntime"] = doc(
        "ClusterTrainingRuntime: one for all namespaces; TrainingRuntime: one in the job's.",
        "TrainingRuntime",
        default="ClusterTrainingRuntime",
    )


def _runtime_branch(value: Any) -> str:
    return "<runtime>" if isinstance(value, dict | Runtime) else "<name>"


AnyRuntime = Annotated[
    Annotated[ObjectName, Tag("<name>")] | Annotated[Runtime, Tag("<runtime>")],
    Discriminator(_runtime_branch),
]
"""The name of a ClusterTrainingRuntime, or a Runtime."""


class Policy(Part):
    """Restarts, clean-up and deadlines."""

    restart_policy: Literal["OnFailure", "ExitCode", "Never", "Always"] | None = doc(
        "When a failed replica is restarted. ExitCode: only for codes of 128 and above;"
        " an error of the script fails the job at once. null: ExitCode for a script or"
        " module on several replicas, else OnFailure; then some targets make a new pod for each"
        " restart, so that why and logs show the failed ones.",
        "OnFailure",
        default=None,
    )
    max_restarts: Whole = doc(
        "How often the whole group may be restarted after a failure.",
        3,
        unit="restarts",
        ge=0,
        le=1000,
        default=3,
    )
    clean_pod_policy: Literal["Running", "All", "None"] = doc(
        "Which pods are deleted when the job ends. Running: those that still run, so that"
        " none keeps its GPU; None: none.",
        "Running",
        default="Running",
    )
    ttl_after_finished: Duration | None = doc(
        "Time after its end at which the job is deleted; null: never.",
        "1d",
        unit="time",
        default=None,
    )
    active_deadline: Duration | None = doc(
        "How long the job may run before it fails; null: forever.",
        "12h",
        unit="time",
        default=None,
    )
    suspend: Flag = doc("Create the job without starting it.", True, default=False)
    termination_grace: Duration = doc(
        "Time between SIGTERM and SIGKILL for the ranks to write a checkpoint.",
        "60s",
        unit="time",
        default=60,
    )

    avoid_nodes: tuple[ObjectName, ...] = doc(
        "Names of nodes that get none of the job's pods, in addition to what `affinity` says.",
        ["gpu-node-7"],
        default=(),
    )

    def rules(self) -> Iterator[Finding]:
        """Deadlines leave time."""
        if self.active_deadline == 0:
            yield invalid(
                ("active_deadline",), "0s leaves no time", "write a duration, such as 12h"
            )
        if self.termination_grace < 2:
            yield invalid(
                ("termination_grace",),
                f"{self.termination_grace}s leaves no time to stop",
                "write at least 2s",
            )


# --- resources and volumes ------------------------------------------------------------------------

_GPU_LABELS: Final = {"nvidia.com": "nvidia.com/gpu.product", "amd.com": "amd.com/gpu.product-name"}


class Requests(Part):
    """What the scheduler reserves, if less than the limits."""

    cpu: Cpu | None = doc("Reserved CPU; null: the limit.", 2, "500m", unit="cores", default=None)
    memory: Memory | None = doc(
        "Reserved memory; null: the limit.", "8Gi", unit="bytes", default=None
    )


class MasterResources(Part):
    """What differs for the Master; null: as for the Workers."""

    gpus: Whole | None = doc("GPUs of the Master.", 1, unit="GPUs", ge=0, default=None)
    cpu: Cpu | None = doc("CPU of the Master.", 8, unit="cores", default=None)
    memory: Memory | None = doc("Memory of the Master.", "64Gi", unit="bytes", default=None)
    shm: Memory | None = doc("The Master's /dev/shm.", "16Gi", unit="bytes", default=None)
    extended: FrozenMap[ResourceName, Quantity] | None = doc(
        "Extended resources of the Master, instead of the Workers'.", {"rdma/hca": 1}, default=None
    )
    requests: Requests | None = doc(
        "What the scheduler reserves for the Master.", {"cpu": 4}, default=None
    )


class Resources(Part):
    """Limits of each replica; by default the requests are equal to them."""

    gpus: Whole = doc("GPUs of each replica.", 1, unit="GPUs", ge=0, le=1024, default=0)
    gpu_type: LabelValue | None = doc(
        "Model of the GPU, as the node's label names it (nvidia.com/gpu.product or"
        " amd.com/gpu.product-name); null: any.",
        "NVIDIA-A100-SXM4-80GB",
        default=None,
    )
    gpu_resource: ResourceName = doc(
        "The resource that counts GPUs on the nodes.",
        "nvidia.com/gpu",
        "amd.com/gpu",
        default="nvidia.com/gpu",
    )
    cpu: Cpu | None = doc("CPU; null: no limit.", 4, "500m", unit="cores", default=None)
    memory: Memory | None = doc("Memory; null: no limit.", "32Gi", unit="bytes", default=None)
    shm: Memory | None = doc(
        "Size of /dev/shm, through which data loaders pass batches; it counts as memory."
        " null: up to the memory limit; 0: the container runtime's 64Mi.",
        "8Gi",
        unit="bytes",
        default=None,
    )
    extended: FrozenMap[ResourceName, Quantity] = doc(
        "Other resources by name, in whole numbers.", {"rdma/hca": 1}, default=FROZEN_EMPTY
    )
    requests: Requests | None = doc(
        "What the scheduler reserves, if less than the limits.", {"cpu": 2}, default=None
    )
    master: MasterResources | None = doc(
        "What differs for the Master; null: nothing.", {"memory": "64Gi"}, default=None
    )

    @property
    def of_master(self) -> Resources:
        """The Master's resources: `master` merged into the Workers'."""
        if self.master is None:
            return self
        update = {name: value for name, value in self.master if value is not None}
        return self.model_copy(update={**update, "master": None})

    @property
    def gpu_label(self) -> str | None:
        """The node label that gpu_type is compared with, or None if none is known."""
        return _GPU_LABELS.get(self.gpu_resource.partition("/")[0])

    @property
    def provable(self) -> dict[str, int]:
        """What a preflight can look for on a node: GPUs of torch, bytes of memory and /dev/shm."""
        counted = self.gpu_resource.startswith(tuple(_GPU_LABELS))
        sizes = {"memory": self.memory, "shm": self.shm}
        return {
            "gpus": self.gpus if counted else 0,
            **{name: int(parse(size)) if size else 0 for name, size in sizes.items()},
        }

    def rules(self) -> Iterator[Finding]:
        """Requests and /dev/shm fit the limits, a GPU type has GPUs and a known label."""
        yield from self._fit((), self)
        if self.master is not None:
            yield from self._fit(("master",), self.of_master)
        if self.gpu_type is not None and not self.gpus:
            yield invalid(
                ("gpu_type",),
                f"{self.gpu_type!r} is requested, but gpus is 0",
                "set gpus, or remove gpu_type",
            )
        if self.gpu_type is not None and self.gpu_label is None:
            yield invalid(
                ("gpu_type",),
                f"{self.gpu_type!r}: no node label is known for {self.gpu_resource}",
                "name it in node_selector instead",
            )

    def _fit(self, at: tuple[str, ...], limits: Resources) -> Iterator[Finding]:
        if limits.shm and limits.memory and parse(limits.shm) > parse(limits.memory):
            yield invalid(
                (*at, "shm"),
                f"{limits.shm} is more than memory {limits.memory}, which includes it",
                f"set it to at most {limits.memory}",
            )
        for name in ("cpu", "memory"):
            asked = getattr(limits.requests, name, None)
            limit = getattr(limits, name)
            if asked and limit and parse(asked) > parse(limit):
                yield invalid(
                    (*at, "requests", name),
                    f"{asked} is more than the limit {limit}",
                    f"set it to at most {limit}",
                )
        for name, amount in limits.extended.items():
            if parse(amount) % 1:
                yield invalid(
                    (*at, "extended", name),
                    f"{amount} is not a whole number",
                    "Kubernetes counts extended resources in whole units",
                )
            if name == limits.gpu_resource:
                yield invalid(
                    (*at, "extended", name), f"{name} is counted by gpus", "set that instead"
                )


SHM_VOLUME: Final = "dshm"
"""Name of the volume that is mounted at /dev/shm for `resources.shm`."""
_SOURCES: Final = ("pvc", "host_path", "config_map", "secret", "empty_dir")


class EmptyDir(Part):
    """An empty folder that lives as long as its pod."""

    medium: Literal["Memory"] | None = doc(
        "Memory: a tmpfs; null: the node's disk.", "Memory", default=None
    )
    size_limit: Memory | None = doc(
        "Size at which the pod is evicted; null: none.", "20Gi", unit="bytes", default=None
    )


class Volume(Part):
    """One mount with exactly one source."""

    name: Annotated[VolumeName, doc("Name of the volume, unique in the job.", "data")]
    mount: Annotated[AbsolutePath, doc("Mount path in the container.", "/data")]
    pvc: ObjectName | None = doc(
        "A PersistentVolumeClaim in the job's namespace.", "datasets", default=None
    )
    host_path: AbsolutePath | None = doc(
        "A path on the node itself.", "/mnt/datasets", default=None
    )
    config_map: ObjectName | None = doc(
        "A ConfigMap, with a file for each key; read-only.", "training-settings", default=None
    )
    secret: ObjectName | None = doc(
        "A Secret, with a file for each key; read-only.", "dataset-token", default=None
    )
    empty_dir: EmptyDir | None = doc(
        "An empty folder for each pod; {} for the defaults.",
        {"size_limit": "20Gi"},
        default=None,
    )
    sub_path: Text | None = doc(
        "Mount this folder inside the volume instead of its root.", "mnist", default=None
    )
    read_only: Flag = doc("Whether the mount is read-only.", True, default=False)
    local: Text | None = doc(
        "The folder that `k8sjob run` uses instead, relative to the job.yaml; required"
        " for config_map and secret. null: a folder for the claim, shared by jobs, or for the job.",
        "./data",
        default=None,
    )

    @property
    def source(self) -> str:
        """The name of the one source that is given: pvc, host_path, ..."""
        return next(name for name in _SOURCES if getattr(self, name) is not None)

    def rules(self) -> Iterator[Finding]:
        """Exactly one source, a path inside the volume, no name or mount that is taken."""
        sources = [name for name in _SOURCES if getattr(self, name) is not None]
        if len(sources) != 1:
            names = " and ".join(sources) or "no source"
            yield invalid((), f"{names} given", f"write exactly one of {', '.join(_SOURCES)}")
        if self.sub_path is not None:
            parts = self.sub_path.split("/")
            if not self.sub_path or not parts[0] or ".." in parts:
                yield invalid(
                    ("sub_path",),
                    f"{self.sub_path!r} is not a folder inside the volume",
                    "write it without a leading '/' and without '..'",
                )
        if self.name == SHM_VOLUME:
            yield invalid(
                ("name",), f"{self.name!r} is the name of /dev/shm's volume", "choose another"
            )
        if self.mount in ("/", "/dev/shm"):  # noqa: S108 - a mount point, not a temporary file
            yield invalid(
                ("mount",),
                f"{self.mount!r} cannot be mounted over",
                "for /dev/shm set resources.shm",
            )

"""What each replica asks of its node."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Final

from k8sjob.spec.base import FROZEN_EMPTY, Broken, FrozenMap, Part, Whole, doc
from k8sjob.spec.names import LabelValue, ResourceName
from k8sjob.spec.quantity import Cpu, Memory, Quantity, parse

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["MasterResources", "Requests", "Resources"]

_GPU_LABELS: Final = {"nvidia.com": "nvidia.com/gpu.product", "amd.com": "amd.com/gpu.product-name"}


class Requests(Part):
    """What the scheduler sets aside, where that is less than the limits."""

    cpu: Annotated[
        Cpu | None, doc("CPU set aside; null: as the limit.", 2, "500m", unit="cores")
    ] = None
    memory: Annotated[
        Memory | None, doc("Memory set aside; null: as the limit.", "8Gi", unit="bytes")
    ] = None


class MasterResources(Part):
    """What is different for the Master; null: as for the Workers."""

    gpus: Annotated[Whole | None, doc("GPUs of the Master.", 1, unit="GPUs", ge=0)] = None
    cpu: Annotated[Cpu | None, doc("CPU of the Master.", 8, unit="cores")] = None
    memory: Annotated[Memory | None, doc("Memory of the Master.", "64Gi", unit="bytes")] = None
    shm: Annotated[Memory | None, doc("The Master's /dev/shm.", "16Gi", unit="bytes")] = None
    extended: Annotated[
        FrozenMap[ResourceName, Quantity] | None,
        doc("Extended resources of the Master, instead of the Workers'.", {"rdma/hca": 1}),
    ] = None
    requests: Annotated[
        Requests | None, doc("What the scheduler sets aside for the Master.", {"cpu": 4})
    ] = None


class Resources(Part):
    """Limits of each replica; the requests are equal to them unless `requests` says otherwise."""

    gpus: Annotated[Whole, doc("GPUs of each replica.", 1, unit="GPUs", ge=0, le=1024)] = 0
    gpu_type: Annotated[
        LabelValue | None,
        doc(
            "Model of the GPU, as the node's label names it (nvidia.com/gpu.product or"
            " amd.com/gpu.product-name); null: any.",
            "NVIDIA-A100-SXM4-80GB",
        ),
    ] = None
    gpu_resource: Annotated[
        ResourceName,
        doc("The resource that counts GPUs on the nodes.", "nvidia.com/gpu", "amd.com/gpu"),
    ] = "nvidia.com/gpu"
    cpu: Annotated[Cpu | None, doc("CPU; null: no limit.", 4, "500m", unit="cores")] = None
    memory: Annotated[Memory | None, doc("Memory; null: no limit.", "32Gi", unit="bytes")] = None
    shm: Annotated[
        Memory | None,
        doc(
            "Size of /dev/shm, through which data loaders hand batches over; it counts as memory."
            " null: as much as the memory limit allows; 0: what the container runtime gives, 64Mi.",
            "8Gi",
            unit="bytes",
        ),
    ] = None
    extended: Annotated[
        FrozenMap[ResourceName, Quantity],
        doc("Further resources by name, in whole numbers.", {"rdma/hca": 1}),
    ] = FROZEN_EMPTY
    requests: Annotated[
        Requests | None,
        doc("What the scheduler sets aside, where less than the limits.", {"cpu": 2}),
    ] = None
    master: Annotated[
        MasterResources | None,
        doc("What is different for the Master; null: nothing.", {"memory": "64Gi"}),
    ] = None

    @property
    def of_master(self) -> Resources:
        """What the Master gets: `master` laid over the Workers' resources."""
        if self.master is None:
            return self
        own = {k: getattr(self.master, k) for k in type(self.master).model_fields}
        update = {key: value for key, value in own.items() if value is not None}
        return self.model_copy(update={**update, "master": None})

    @property
    def gpu_label(self) -> str | None:
        """The node label that gpu_type is compared with, or None where none is known."""
        return _GPU_LABELS.get(self.gpu_resource.partition("/")[0])

    def rules(self) -> Iterator[Broken]:
        """Requests and /dev/shm fit the limits, a GPU type has GPUs and a known label."""
        yield from self._fit((), self)
        if self.master is not None:
            yield from self._fit(("master",), self.of_master)
        if self.gpu_type is not None and not self.gpus:
            yield Broken(
                ("gpu_type",),
                f"{self.gpu_type!r} is asked for, but gpus is 0; set gpus, or leave gpu_type out",
            )
        if self.gpu_type is not None and self.gpu_label is None:
            yield Broken(
                ("gpu_type",),
                f"{self.gpu_type!r}: no node label is known for {self.gpu_resource}; name it in"
                " node_selector instead",
            )

    def _fit(self, at: tuple[str, ...], limits: Resources) -> Iterator[Broken]:
        if limits.shm and limits.memory and parse(limits.shm) > parse(limits.memory):
            yield Broken(
                (*at, "shm"),
                f"{limits.shm} is more than memory {limits.memory}, of which it is a part; set it"
                f" to at most {limits.memory}",
            )
        for name in ("cpu", "memory"):
            asked = getattr(limits.requests, name, None)
            limit = getattr(limits, name)
            if asked and limit and parse(asked) > parse(limit):
                yield Broken(
                    (*at, "requests", name),
                    f"{asked} is more than the limit {limit}; set it to at most {limit}",
                )
        for name, amount in limits.extended.items():
            if parse(amount) % 1:
                yield Broken(
                    (*at, "extended", name),
                    f"{amount} is not a whole number; Kubernetes counts extended resources in"
                    " pieces",
                )
            if name == limits.gpu_resource:
                yield Broken(
                    (*at, "extended", name), f"{name} is counted by gpus; set that instead"
                )

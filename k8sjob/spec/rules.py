"""Rules over several parts of a job: what they must hold together, and what is valid but unwise."""

from __future__ import annotations

from typing import TYPE_CHECKING

from k8sjob import strategies
from k8sjob.contract import TRACKER_PACKAGES, WORKDIR
from k8sjob.kube.objects import PRIORITY, QUEUE, RESERVED
from k8sjob.spec.base import Broken
from k8sjob.spec.values import MAX_NAME

if TYPE_CHECKING:
    from collections.abc import Iterator

    from k8sjob.spec.job import JobSpec


def job_rules(spec: JobSpec) -> Iterator[Broken]:
    """Every rule over several parts that the spec breaks."""
    limit = longest_name(spec)
    if len(spec.name) > limit:
        yield Broken(
            ("name",),
            f"{spec.name!r} has {len(spec.name)} characters; with {_longest_suffix(spec)!r} behind"
            f" it a pod's name has more than {MAX_NAME}, so shorten it to at most {limit}",
        )
    yield from _labels(spec)
    for field in ("kueue_priority_class", "kueue_topology"):
        if getattr(spec, field) is not None and spec.kueue_queue is None:
            yield Broken((field,), "only Kueue reads it; set kueue_queue, or take it out")
    yield from _fitting(spec)
    yield from _volumes(spec)
    yield from _restricted(spec)
    script = spec.run.script or ""
    if spec.builds_image and script.startswith("/") and not script.startswith(f"{WORKDIR}/"):
        yield Broken(
            ("run", "script"),
            f"{script!r} is not in image.context, which the image has at {WORKDIR}; write a path"
            " inside it, as main.py, or start what the base has with run.command",
        )
    checkpoint = spec.checkpoint
    whole = strategies.STRATEGIES[spec.strategy.kind].saved_whole
    if checkpoint and checkpoint.format == "sharded" and whole:
        yield Broken(
            ("checkpoint", "format"), f"{whole}; set it to auto, under which rank 0 writes one file"
        )
    gang = spec.gang
    if gang and gang.min_available and gang.min_available > spec.nnodes:
        yield Broken(
            ("gang", "min_available"),
            f"{gang.min_available} pods cannot be available, since workers"
            f" {spec.replicas.workers} + 1 = {spec.nnodes} pods; set it to at most {spec.nnodes}",
        )
    if spec.replicas.elastic and spec.resources.master:
        yield Broken(("resources", "master"), "an elastic job has Workers only; leave master out")


def longest_name(spec: JobSpec) -> int:
    """How many characters the name of a job with these replicas may have."""
    return MAX_NAME - len(_longest_suffix(spec))


def _longest_suffix(spec: JobSpec) -> str:
    """The end of the longest of the pods' names, behind the job's name."""
    elastic = spec.replicas.elastic
    most = elastic.max if elastic else spec.replicas.workers
    suffix = f"-worker-{most - 1}" if most else "-master-0"
    return max(suffix, "" if elastic else "-master-0", key=len)


def _labels(spec: JobSpec) -> Iterator[Broken]:
    for key in spec.labels:
        if prefix := next((one for one in RESERVED if key.startswith(one)), None):
            message = f"would be overridden: the cluster's controllers set labels under {prefix}"
            yield Broken(("labels", key), f"{message}; choose another key")
        field = {QUEUE: "kueue_queue", PRIORITY: "kueue_priority_class"}.get(key, "")
        if (value := getattr(spec, field, None)) is not None:
            message = f"{field} {value!r} sets this label; take one of them out"
            yield Broken(("labels", key), message)


def _fitting(spec: JobSpec) -> Iterator[Broken]:
    """Strategy, processes, GPUs and backend go together: see strategies.py."""
    master = spec.resources.master
    shape = strategies.Shape(
        nnodes=spec.nnodes,
        nproc_per_node=spec.nproc_per_node,
        gpus=spec.resources.gpus,
        master_gpus=master.gpus if master else None,
    )
    one = spec.strategy
    for found in strategies.conflicts(one.kind, one.settings, shape, backend=one.backend):
        yield Broken(tuple(found.field.split(".")), found.message)
    if spec.replicas.elastic and spec.uses_agent and not strategies.STRATEGIES[one.kind].resizes:
        able = ", ".join(name for name, row in strategies.STRATEGIES.items() if row.resizes)
        yield Broken(
            ("replicas", "elastic"),
            f"{one.kind} divides the model over a number of ranks that must not change; leave"
            f" elastic out, or use one of {able}",
        )


def _volumes(spec: JobSpec) -> Iterator[Broken]:
    """Names and mounts are each used once, and no mount hides k8sjob's own folders."""
    first: dict[tuple[str, str], int] = {}
    for index, volume in enumerate(spec.volumes):
        for field in ("name", "mount"):
            value = getattr(volume, field)
            other = first.setdefault((field, value), index)
            if other != index:
                yield Broken(
                    ("volumes", index, field),
                    f"{value!r} is taken by volumes[{other}]; choose another",
                )


def _restricted(spec: JobSpec) -> Iterator[Broken]:
    """What Kubernetes' Pod Security Standard "restricted" forbids by itself."""
    if spec.security != "restricted":
        return
    advice = "which security: restricted forbids; drop it, or set security: default"
    if spec.host_network:
        yield Broken(("host_network",), f"true is the node's own network, {advice}")
    for index, volume in enumerate(spec.volumes):
        if volume.host_path is not None:
            yield Broken(
                ("volumes", index, "host_path"),
                f"{volume.host_path!r} is a path of the node, {advice}",
            )


def job_remarks(spec: JobSpec) -> Iterator[Broken]:
    """Every remark on a job: the field, and what to do about it."""
    if spec.replicas.elastic and spec.uses_agent and not spec.checkpoint:
        yield Broken(
            ("replicas", "elastic"),
            "without checkpoint the training starts from scratch whenever a node joins or leaves;"
            " set checkpoint.dir, on a volume that all nodes share",
        )
    for name in spec.tracking.settings:
        package = TRACKER_PACKAGES.get(name)
        if package and spec.builds_image and not _installs(spec, name):
            yield Broken(
                ("tracking", name),
                f"needs the package {package} in the image; add it to image.pip, or training"
                " continues without it",
            )
    if not spec.uses_agent:
        for name in ("rendezvous_timeout", "collective_timeout", "hang_timeout"):
            if name in spec.run.model_fields_set:
                yield Broken(
                    ("run", name),
                    "no agent starts a command, so only scripts that call session() use it; set"
                    " the timeouts of the launcher and of init_process_group instead",
                )
    if warning := strategies.STRATEGIES[spec.strategy.kind].warning:
        yield Broken(("strategy", "kind"), f"{spec.strategy.kind}: {warning}")
    checkpoint, volume = spec.checkpoint, spec.checkpoint_volume
    if checkpoint and (volume is None or volume.empty_dir is not None):
        where = "no volume" if volume is None else f"{volume.name!r}, an empty_dir"
        yield Broken(
            ("checkpoint", "dir"),
            f"{checkpoint.dir} lies on {where}: on a cluster its checkpoints outlive a restart in"
            " the pod, not the pod; mount a pvc there",
        )


def _installs(spec: JobSpec, package: str) -> bool:
    """Whether an image that is built may have a package, by whichever of its distributions."""
    image = spec.image
    if isinstance(image, str) or image.requirements:
        return True
    return any(one.startswith(package) for one in image.pip)

"""Checks of a PyTorchJob's pods: what their containers start, ask for and are told."""

from __future__ import annotations

import re
from decimal import Decimal
from typing import TYPE_CHECKING, Any, Final

from k8sjob.contract import Role
from k8sjob.lint.finding import Hit, Rule, Severity, rule
from k8sjob.lint.manifest_facts import Container, Job, Path, Replica, get
from k8sjob.rendering.env import operator_env
from k8sjob.spec.quantity import parse

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["RULES"]

_ISTIO: Final = "sidecar.istio.io/inject"
_UNEXPANDED: Final = re.compile(r"(?<!\$)\$(?:\{[A-Za-z_]\w*\}|[A-Za-z_]\w*)")
_SERVERS: Final = re.compile(
    r"tensorboard|jupyter|fluent-?bit|fluentd|filebeat|vector\b|promtail|dcgm-exporter|node_exporter"
    r"|http\.server|nginx|sleep inf|tail -f"
)


@rule(
    "env-overridden",
    Severity.WARNING,
    "manifest",
    "The operator appends its variables to the container's own, and of two with one name the last "
    "one wins.",
)
def _env_overridden(job: Job) -> Iterator[Hit]:
    if job.refusals:
        return
    for replica in job.replicas:
        wins = [_injected(job, replica, index) for index in {0, replica.count - 1}]
        for container in replica.containers():
            variables = container.data.get("env")
            for index, variable in enumerate(variables if isinstance(variables, list) else ()):
                name, value = get(variable, "name"), get(variable, "value")
                if name in wins[0] and any(env[name] != value for env in wins):
                    seen = f"{name}={value}" if value is not None else f"{name} (valueFrom)"
                    yield job.at(
                        (*container.path, "env", index, "name"),
                        f"{seen} never reaches the {replica.role}: the operator sets it to "
                        f"{wins[0][name]!r} and wins; take it out, or use a name of your own",
                    )


def _injected(job: Job, replica: Replica, index: int) -> dict[str, str]:
    try:
        return operator_env(job.data, replica.role, index)
    except (AttributeError, KeyError, TypeError, ValueError):
        return {}  # a shape that the CRD refuses, which another check says


@rule(
    "resources-rejected",
    Severity.ERROR,
    "manifest",
    "The CRD takes any amounts; the apiserver checks them when the operator creates the pods.",
)
def _resources_rejected(job: Job) -> Iterator[Hit]:
    for replica in job.replicas:
        for container in (*replica.containers(), *replica.containers("initContainers")):
            for path, why in _wrong_amounts(container):
                yield job.at(
                    path, f"{why}: every pod is refused and the job stays Created; correct it"
                )


def _wrong_amounts(container: Container) -> Iterator[tuple[Path, str]]:
    resources = container.data.get("resources")
    limits, requests = get(resources, "limits") or {}, get(resources, "requests") or {}
    at: Path = (*container.path, "resources")
    for name in dict.fromkeys([*limits, *requests]):
        limit, asked = _amount(limits.get(name)), _amount(requests.get(name))
        seen = f"{name}: limit {limits.get(name)}, request {requests.get(name)}"
        where: Path = (*at, "requests" if name in requests else "limits", name)
        if any(amount is not None and not isinstance(amount, Decimal) for amount in (limit, asked)):
            yield where, f"{seen}, and one of them is no quantity"
        elif isinstance(limit, Decimal) and isinstance(asked, Decimal) and asked > limit:
            yield where, f"{seen}, and a request above its limit is not allowed"
        elif "/" in name and isinstance(asked, Decimal) and asked != limit:
            yield where, f"{seen}, and for a device both must be given and equal"
        elif "/" in name and isinstance(limit, Decimal) and limit % 1:
            yield where, f"{seen}, and devices are counted in whole numbers"


def _amount(value: Any) -> Any:
    if value is None:
        return None
    try:
        return parse(str(getattr(value, "text", value)))
    except ValueError:
        return value


@rule(
    "no-shared-memory",
    Severity.WARNING,
    "manifest",
    "A container gets 64Mi of /dev/shm, through which DataLoader workers hand their batches over.",
)
def _no_shared_memory(job: Job) -> Iterator[Hit]:
    for replica, container in job.trainers():
        mounts = container.data.get("volumeMounts")
        paths = [get(mount, "mountPath") for mount in (mounts if isinstance(mounts, list) else ())]
        has = any(str(path).rstrip("/") in ("/dev/shm", "/dev") for path in paths)  # noqa: S108 - a mount point
        if container.gpus and not has and replica.pod.get("hostIPC") is not True:
            yield job.at(
                (*container.path, "volumeMounts"),
                f"the {replica.role} has a GPU and 64Mi of /dev/shm: DataLoader(num_workers > 0) "
                "ends in a bus error as soon as batches outgrow it; "
                + job.step(
                    "mount an emptyDir with medium Memory at /dev/shm",
                    "set resources.shm, as 8Gi",
                ),
            )


@rule(
    "readiness-probe-on-master",
    Severity.WARNING,
    "manifest",
    "The Master's name resolves only once its pod is Ready, and Workers wait for the name before "
    "they start.",
)
def _readiness_probe_on_master(job: Job) -> Iterator[Hit]:
    master = job.replica(Role.MASTER)
    if master is None or master.trainer is None or job.replica(Role.WORKER) is None:
        return
    for kind in ("readinessProbe", "startupProbe"):
        if kind in master.trainer.data:
            yield job.at(
                (*master.trainer.path, kind),
                f"{kind} on the Master: until it passes the Workers cannot find the Master, so one "
                "that waits for the training waits for ever; take it out",
            )


@rule(
    "istio-annotation-misplaced",
    Severity.WARNING,
    "manifest",
    "The operator copies nothing from the job's metadata to the pods', and injection looks at the "
    "pods.",
)
def _istio_annotation_misplaced(job: Job) -> Iterator[Hit]:
    for group in ("annotations", "labels"):
        if _ISTIO not in (job.get("metadata", group) or {}):
            continue
        metadata = [get(replica.data, "template", "metadata") for replica in job.replicas]
        told = [get(m, "annotations", _ISTIO) or get(m, "labels", _ISTIO) for m in metadata]
        if not all(told):
            yield job.at(
                ("metadata", group, _ISTIO),
                f"{_ISTIO} on the job has no effect on its pods: where injection is on, a sidecar "
                "runs on after the training and the job never ends; move it to template.metadata "
                "of each replica",
            )


@rule(
    "variable-not-expanded",
    Severity.WARNING,
    "manifest",
    "Without a shell nobody expands $NAME; Kubernetes itself expands $(NAME).",
)
def _variable_not_expanded(job: Job) -> Iterator[Hit]:
    for _, container in job.trainers():
        if not container.command or container.is_shell:
            continue
        for kind in ("command", "args"):
            words = container.data.get(kind)
            for index, word in enumerate(words if isinstance(words, list) else ()):
                if found := _UNEXPANDED.search(str(word)):
                    name = found[0].strip("${}")
                    yield job.at(
                        (*container.path, kind, index),
                        f"{word!r} reaches the program as it is, the {found[0]} included, since no "
                        f"shell reads it; write $({name})",
                    )


@rule(
    "sidecar-holds-the-job",
    Severity.WARNING,
    "manifest",
    "A pod has succeeded when all its containers have ended, and the job with it.",
)
def _sidecar_holds_the_job(job: Job) -> Iterator[Hit]:
    deciding: list[Replica] = [r for r in job.replicas if r.role == Role.MASTER]
    for replica in deciding or job.replicas:
        for container in replica.containers():
            if container is replica.trainer or container.data == get(replica.trainer, "data"):
                continue
            words = " ".join([*container.argv, str(container.data.get("image"))])
            if container.name != "pytorch" and _SERVERS.search(words):
                yield job.at(
                    container.path,
                    f"container {container.name!r} never ends by itself, so the {replica.role} "
                    "never succeeds and the job runs for ever; make it an init container with "
                    "restartPolicy: Always (a native sidecar)",
                )


RULES: Final[tuple[Rule[Job], ...]] = (
    _env_overridden,
    _resources_rejected,
    _no_shared_memory,
    _readiness_probe_on_master,
    _istio_annotation_misplaced,
    _variable_not_expanded,
    _sidecar_holds_the_job,
)

"""Checks of a PyTorchJob as a whole: its shape, its names, how it restarts and how it ends."""

from __future__ import annotations

import difflib
import json
import re
from typing import TYPE_CHECKING, Any, Final

from k8sjob.contract import Role
from k8sjob.errors import field_path
from k8sjob.lint.finding import Hit, Rule, Severity, rule
from k8sjob.lint.manifest_facts import Job, Path, Replica, get

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["RULES"]

_STEP: Final = re.compile(r"\.?([\w-]+)|\[(\d+)\]|\[([^\]]+)\]")
_RESTARTS: Final = ("OnFailure", "Never", "ExitCode", "Always")
_CLEANS: Final = ("Running", "All", "None")
_MAX_NAME: Final = 63
_KNOWN: Final[dict[str, tuple[str, ...]]] = {
    "": ("apiVersion", "kind", "metadata", "spec", "status"),
    "spec": ("elasticPolicy", "nprocPerNode", "pytorchReplicaSpecs", "runPolicy"),
    "spec.runPolicy": (
        "activeDeadlineSeconds",
        "backoffLimit",
        "cleanPodPolicy",
        "managedBy",
        "schedulingPolicy",
        "suspend",
        "ttlSecondsAfterFinished",
    ),
    "spec.runPolicy.schedulingPolicy": (
        "minAvailable",
        "minResources",
        "priorityClass",
        "queue",
        "scheduleTimeoutSeconds",
    ),
    "spec.elasticPolicy": (
        "maxReplicas",
        "maxRestarts",
        "metrics",
        "minReplicas",
        "nProcPerNode",
        "rdzvBackend",
        "rdzvConf",
        "rdzvHost",
        "rdzvId",
        "rdzvPort",
        "standalone",
    ),
    "spec.pytorchReplicaSpecs.*": ("replicas", "restartPolicy", "template"),
    "spec.pytorchReplicaSpecs.*.template": ("metadata", "spec"),
}
"""The fields of the CRD of training-operator v1.9.4, down to the pods."""


@rule(
    "wrong-type",
    Severity.ERROR,
    "manifest",
    "The CRD says which fields are text, numbers, lists or mappings; the apiserver refuses others.",
)
def _wrong_type(job: Job) -> Iterator[Hit]:
    for path, seen, expected in job.wrong:
        shown = json.dumps(seen, default=str)
        step = f"write '{shown}'" if expected == "text" and isinstance(seen, int) else "correct it"
        name = field_path(path[-2:] if isinstance(path[-1], int) else path[-1:])
        yield job.at(path, f"{name} is {shown[:60]}, which is not {expected}: refused; {step}")


@rule(
    "rejected-by-webhook",
    Severity.ERROR,
    "manifest",
    "The training operator's admission webhook refuses the object, so nothing is created.",
)
def _rejected_by_webhook(job: Job) -> Iterator[Hit]:
    for problem in job.refusals:
        path: Path = tuple(
            int(index) if index else name or key
            for name, index, key in _STEP.findall(problem.field)
        )
        yield job.at(path, f"{problem.field}: {problem.message}")


@rule(
    "unknown-field",
    Severity.ERROR,
    "manifest",
    "The apiserver drops fields that the CRD does not know (kubectl refuses them first), so what "
    "they ask for does not happen.",
)
def _unknown_field(job: Job) -> Iterator[Hit]:
    for where, known in _KNOWN.items():
        for path in _matching(job, where.split(".") if where else []):
            given = job.get(*path)
            for key in given if isinstance(given, dict) else ():
                if key not in known:
                    step = _where_to(str(key), known)
                    yield job.at((*path, key), f"{key!r} is no field of a PyTorchJob here; {step}")


def _matching(job: Job, steps: list[str]) -> Iterator[Path]:
    """The paths that a pattern stands for: * is each role."""
    if "*" not in steps:
        yield tuple(steps)
        return
    for replica in job.replicas:
        yield tuple(replica.role if step == "*" else step for step in steps)


def _where_to(key: str, known: tuple[str, ...]) -> str:
    places = [where for where, fields in _KNOWN.items() if key in fields and where]
    if places:
        return f"it belongs to {places[0].replace('*', 'Master')}, and is ignored here; move it"
    close = difflib.get_close_matches(key, known, n=1)
    return f"did you mean {close[0]!r}?" if close else f"there is {', '.join(known)}"


@rule(
    "worker-name-too-long",
    Severity.ERROR,
    "manifest",
    "Pods and services are called <job>-worker-<n>, and a service's name has at most 63 "
    "characters; nobody checks that before the service is created.",
)
def _worker_name_too_long(job: Job) -> Iterator[Hit]:
    for replica in job.replicas:
        most = max(replica.count, get(job.elastic, "maxReplicas") or 0)
        name = f"{job.name}-{replica.role.lower()}-{most - 1}"
        if len(name) > _MAX_NAME >= len(job.name):
            yield job.at(
                ("metadata", "name"),
                f"{name!r} has {len(name)} characters: its service is refused and the job waits "
                f"for ever; shorten the name by {len(name) - _MAX_NAME}",
            )
            return


@rule(
    "restart-policy-typo",
    Severity.ERROR,
    "manifest",
    "The CRD takes any text; the pods are then refused one by one.",
)
def _restart_policy_typo(job: Job) -> Iterator[Hit]:
    for replica in job.replicas:
        value = replica.restart_policy
        if value not in _RESTARTS:
            yield job.at(
                (*replica.path, "restartPolicy"),
                f"restartPolicy {value!r} passes the CRD, and then no pod can be created: the job "
                f"stays Created for ever; {_choose(value, _RESTARTS)}",
            )


@rule(
    "clean-pod-policy-typo",
    Severity.ERROR,
    "manifest",
    "The CRD takes any text, and the operator treats one that it does not know as All.",
)
def _clean_pod_policy_typo(job: Job) -> Iterator[Hit]:
    path = ("spec", "runPolicy", "cleanPodPolicy")
    value = job.get(*path)
    if value is not None and value not in _CLEANS:
        yield job.at(
            path,
            f"cleanPodPolicy {value!r} passes the CRD and acts as 'All': every pod, its logs "
            f"included, is deleted when the job ends; {_choose(value, _CLEANS)}",
        )


def _choose(value: Any, known: tuple[str, ...]) -> str:
    by_lower = {name.lower(): name for name in known}
    close = difflib.get_close_matches(str(value).lower(), by_lower, n=1, cutoff=0.5)
    return f"did you mean {by_lower[close[0]]!r}?" if close else f"use one of {', '.join(known)}"


@rule(
    "restart-policy-in-template",
    Severity.WARNING,
    "manifest",
    "The operator overwrites the pod template's restartPolicy with the replica's, OnFailure where "
    "there is none.",
)
def _restart_policy_in_template(job: Job) -> Iterator[Hit]:
    for replica in job.replicas:
        value = replica.pod.get("restartPolicy")
        acts = "Never" if replica.restart_policy == "ExitCode" else replica.restart_policy
        if value is not None and value != acts:
            yield job.at(
                (*replica.pod_path, "restartPolicy"),
                f"restartPolicy {value!r} in the pod template is overwritten by {acts!r}; set it "
                f"beside `replicas` of the {replica.role}",
            )


def _retried(job: Job, *policies: str) -> list[Replica]:
    return [replica for replica in job.replicas if replica.restart_policy in policies]


@rule(
    "restarts-for-ever",
    Severity.WARNING,
    "manifest",
    "With OnFailure or Always a container that crashes is started again without end, and the job "
    "stays Running, unless a backoffLimit counts.",
)
def _restarts_for_ever(job: Job) -> Iterator[Hit]:
    policy = job.get("spec", "runPolicy")
    retried = _retried(job, "OnFailure", "Always")
    limited = get(policy, "backoffLimit") is not None
    if retried and not limited and get(policy, "activeDeadlineSeconds") is None:
        yield job.at(
            ("spec", "runPolicy") if policy else ("spec",),
            f"restartPolicy {retried[0].restart_policy} and no runPolicy.backoffLimit: a script "
            "that fails at once is restarted for ever, the job stays Running and keeps its GPUs; "
            + job.step(
                f"set spec.runPolicy.backoffLimit, {3 * job.nodes + 1} for 3 restarts of all pods",
                "set policy.max_restarts, and no backoffLimit in the overlay",
            ),
        )


@rule(
    "backoff-limit-too-small",
    Severity.WARNING,
    "manifest",
    "backoffLimit is compared with the restarts of all pods added up, and when one replica is lost "
    "its peers restart too.",
)
def _backoff_limit_too_small(job: Job) -> Iterator[Hit]:
    path = ("spec", "runPolicy", "backoffLimit")
    limit = job.get(*path)
    if not isinstance(limit, int) or not _retried(job, "OnFailure", "Always"):
        return
    if 0 < limit < job.nodes:
        yield job.at(
            path,
            f"backoffLimit {limit} with {job.nodes} pods: one lost pod makes its "
            f"{job.nodes - 1} peers restart, which alone reaches the limit, and the job fails; set "
            f"restarts x {job.nodes} + 1 ({3 * job.nodes + 1} for 3), or 0 for none",
        )


@rule(
    "gpus-kept-after-success",
    Severity.WARNING,
    "manifest",
    "The job has succeeded as soon as the Master has; under cleanPodPolicy None (the default) "
    "Workers that still run go on.",
)
def _gpus_kept_after_success(job: Job) -> Iterator[Hit]:
    policy = job.get("spec", "runPolicy")
    value = get(policy, "cleanPodPolicy")
    worker = job.replica(Role.WORKER)
    ends_early = job.replica(Role.MASTER) is not None or job.elastic is not None
    kept = value in (None, "None") and get(policy, "ttlSecondsAfterFinished") is None
    gpus = worker.trainer.gpus if worker and worker.trainer else []
    if kept and ends_early and gpus:
        said = "is None" if value else "is not set, which means None"
        yield job.at(
            ("spec", "runPolicy", "cleanPodPolicy"),
            f"cleanPodPolicy {said}: a Worker that hangs or is slow keeps its {gpus[0]} after the "
            "job has ended; "
            + job.step("set it to Running", "set policy.clean_pod_policy: Running"),
        )


@rule(
    "elastic-bounds",
    Severity.ERROR,
    "manifest",
    "The rendezvous begins when minReplicas nodes have come; the operator takes one bound alone "
    "for both.",
)
def _elastic_bounds(job: Job) -> Iterator[Hit]:
    policy = job.elastic
    if policy is None or job.replica(Role.WORKER) is None:
        return
    given = {key: policy.get(key) for key in ("minReplicas", "maxReplicas")}
    least, most = given["minReplicas"], given["maxReplicas"]
    low, high = least or most, most or least
    path: Path = ("spec", "elasticPolicy")
    if not isinstance(low, int) or not isinstance(high, int):
        return
    if low > high:
        yield job.at(
            (*path, "minReplicas"),
            f"minReplicas {low} is more than maxReplicas {high}: every launcher refuses that at "
            "its start; exchange them",
        )
    elif low > job.nodes and not policy.get("metrics"):
        alone = "" if least else " (maxReplicas alone sets both bounds)"
        yield job.at(
            (*path, "minReplicas" if least else "maxReplicas"),
            f"the rendezvous waits for {low} nodes{alone}, and there are {job.nodes}: it never "
            f"begins; set minReplicas to at most {job.nodes}",
        )


RULES: Final[tuple[Rule[Job], ...]] = (
    _wrong_type,
    _rejected_by_webhook,
    _unknown_field,
    _worker_name_too_long,
    _restart_policy_typo,
    _clean_pod_policy_typo,
    _restart_policy_in_template,
    _restarts_for_ever,
    _backoff_limit_too_small,
    _gpus_kept_after_success,
    _elastic_bounds,
)

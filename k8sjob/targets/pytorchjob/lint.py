"""Checks of a PyTorchJob: what the training operator makes of its fields."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Final

from k8sjob.contract import Role, counted, did_you_mean
from k8sjob.kube.objects import Object, at_path
from k8sjob.rules import Rules
from k8sjob.targets.manifest_facts import ManifestJob, ManifestReplica, launcher_flags, launcher_of
from k8sjob.targets.pytorchjob.operator import CLOSED_PATHS, known_fields

if TYPE_CHECKING:
    from collections.abc import Iterator

    from k8sjob.findings import FieldPath, Finding

RULES: Final = Rules["ManifestJob"]("manifest")

_RESTARTS: Final = ("OnFailure", "Never", "ExitCode", "Always")
_CLEANS: Final = ("Running", "All", "None")
_MAX_NAME: Final = 63


@RULES.error
def _rejected_by_webhook(job: ManifestJob) -> Iterator[Finding]:
    """The training operator's admission webhook refuses the object, so nothing is created."""
    for problem in job.refusals:
        yield job.at(problem.path, f"{problem.field}: {problem.message}", problem.next_step)


@RULES.error
def _unknown_field(job: ManifestJob) -> Iterator[Finding]:
    """The apiserver drops fields that the CRD does not know; kubectl refuses them earlier."""
    for pattern in CLOSED_PATHS:
        fields = known_fields(*pattern)
        roles = [replica.role for replica in job.replicas] if "*" in pattern else [""]
        for role in roles:
            path = tuple(role if step == "*" else step for step in pattern)
            mapping = job.get(*path)
            for key in mapping if isinstance(mapping, dict) else ():
                if key not in fields:
                    step = _where_to(str(key), fields)
                    message = f"{key!r} is not a field of a PyTorchJob here; {step}"
                    yield job.at((*path, key), message)


def _where_to(key: str, fields: tuple[str, ...]) -> str:
    places = [path for path in CLOSED_PATHS[1:] if key in known_fields(*path)]
    if places:
        where = ".".join(places[0]).replace("*", "Master")
        return f"it belongs to {where}, and is ignored here; move it"
    return did_you_mean(key, fields, f"valid fields: {', '.join(fields)}")


@RULES.error
def _worker_name_too_long(job: ManifestJob) -> Iterator[Finding]:
    """A service is called <job>-worker-<n>, of at most 63 characters; nothing checks it earlier."""
    job_name = Object(job.data).name
    for replica in job.replicas:
        most = max(replica.count, at_path(job.elastic, "maxReplicas") or 0)
        name = f"{job_name}-{replica.role.lower()}-{most - 1}"
        if len(name) > _MAX_NAME >= len(job_name):
            yield job.at(
                ("metadata", "name"),
                f"{name!r} has {len(name)} characters: its service is refused and the job waits "
                f"forever; shorten the name by {len(name) - _MAX_NAME}",
            )
            return


@RULES.error
def _restart_policy_typo(job: ManifestJob) -> Iterator[Finding]:
    """The CRD takes any text; the pods are then refused one by one."""
    for replica in job.replicas:
        value = replica.restart_policy
        if value not in _RESTARTS:
            yield job.at(
                (*replica.path[:-1], "restartPolicy"),
                f"restartPolicy {value!r} passes the CRD, and then no pod can be created: the job "
                f"stays Created forever; {_choose(value, _RESTARTS)}",
            )


@RULES.error
def _clean_pod_policy_typo(job: ManifestJob) -> Iterator[Finding]:
    """The CRD takes any text, and the operator treats one that it does not know as All."""
    path = ("spec", "runPolicy", "cleanPodPolicy")
    value = job.get(*path)
    if value is not None and value not in _CLEANS:
        yield job.at(
            path,
            f"cleanPodPolicy {value!r} passes the CRD and acts as 'All': every pod, its logs "
            f"included, is deleted when the job ends; {_choose(value, _CLEANS)}",
        )


def _choose(value: Any, choices: tuple[str, ...]) -> str:
    return did_you_mean(str(value), choices, f"use one of {', '.join(choices)}")


@RULES.warning
def _restart_policy_in_template(job: ManifestJob) -> Iterator[Finding]:
    """The operator overwrites the pod template's restartPolicy with the replica's."""
    for replica in job.replicas:
        value = replica.pod.get("restartPolicy")
        acts = "Never" if replica.restart_policy == "ExitCode" else replica.restart_policy
        if value is not None and value != acts:
            yield job.at(
                (*replica.path, "spec", "restartPolicy"),
                f"restartPolicy {value!r} in the pod template is overwritten by {acts!r}; "
                + job.step(
                    f"set it beside `replicas` of the {replica.role}",
                    "remove it, and set policy.restart_policy",
                ),
            )


def _retried(job: ManifestJob, *policies: str) -> list[ManifestReplica]:
    return [replica for replica in job.replicas if replica.restart_policy in policies]


@RULES.warning
def _restarts_for_ever(job: ManifestJob) -> Iterator[Finding]:
    """Under OnFailure or Always a crash is restarted without end, unless a backoffLimit counts."""
    policy = job.get("spec", "runPolicy")
    retried = _retried(job, "OnFailure", "Always")
    limited = at_path(policy, "backoffLimit") is not None
    if retried and not limited and at_path(policy, "activeDeadlineSeconds") is None:
        yield job.at(
            ("spec", "runPolicy") if policy else ("spec",),
            f"restartPolicy {retried[0].restart_policy} and no runPolicy.backoffLimit: a script "
            "that fails at once is restarted forever, the job stays Running and keeps its GPUs; "
            + job.step(
                f"set spec.runPolicy.backoffLimit, {3 * job.nodes + 1} for 3 restarts of all pods",
                "set policy.max_restarts, and no backoffLimit in the overlay",
            ),
        )


@RULES.warning
def _deadline_not_noticed(job: ManifestJob) -> Iterator[Finding]:
    """The operator looks at activeDeadlineSeconds only when something changes in the job."""
    # Its timer goes to a queue that nobody reads (training-operator 1.9.4, AddAfter in
    # pytorchjob_controller.go). A Pod that its kubelet ends at the same time is such a change.
    path = ("spec", "runPolicy", "activeDeadlineSeconds")
    limit = job.get(*path)
    if limit and not any(replica.pod.get("activeDeadlineSeconds") for replica in job.replicas):
        yield job.at(
            path,
            f"activeDeadlineSeconds {limit} has no effect while all Pods run: the operator looks"
            " at it only when something changes; "
            + job.step(
                f"set activeDeadlineSeconds: {limit} also in the Pod templates",
                "leave activeDeadlineSeconds to policy.active_deadline, which also sets the Pods'",
            ),
        )


@RULES.warning
def _backoff_limit_too_small(job: ManifestJob) -> Iterator[Finding]:
    """The backoffLimit counts restarts of all pods; the peers of a lost replica restart, too."""
    path = ("spec", "runPolicy", "backoffLimit")
    limit = job.get(*path)
    if not isinstance(limit, int) or not _retried(job, "OnFailure", "Always"):
        return
    if 0 < limit < job.nodes:
        yield job.at(
            path,
            f"backoffLimit {limit} with {job.nodes} pods: one lost pod makes its "
            f"{job.nodes - 1} peers restart, which is enough to reach the limit, and the job fails;"
            f" set restarts x {job.nodes} + 1 ({3 * job.nodes + 1} for 3), or 0 for none",
        )


@RULES.warning
def _gpus_kept_after_success(job: ManifestJob) -> Iterator[Finding]:
    """A job has succeeded when its Master has; under cleanPodPolicy None Workers keep running."""
    policy = job.get("spec", "runPolicy")
    value = at_path(policy, "cleanPodPolicy")
    worker = job.replica(Role.WORKER)
    ends_early = job.replica(Role.MASTER) is not None or job.elastic is not None
    pods_stay = value in (None, "None") and at_path(policy, "ttlSecondsAfterFinished") is None
    gpus = worker.trainer.gpus if worker and worker.trainer else []
    if pods_stay and ends_early and gpus:
        setting = "is None" if value else "is not set, which means None"
        yield job.at(
            ("spec", "runPolicy", "cleanPodPolicy"),
            f"cleanPodPolicy {setting}: a Worker that hangs or is slow keeps its {gpus[0]} after "
            "the job has ended; "
            + job.step("set it to Running", "set policy.clean_pod_policy: Running"),
        )


@RULES.error
def _elastic_bounds(job: ManifestJob) -> Iterator[Finding]:
    """The rendezvous waits for minReplicas nodes; a single bound sets both."""
    policy = job.elastic
    if policy is None or job.replica(Role.WORKER) is None:
        return
    least, most = policy.get("minReplicas"), policy.get("maxReplicas")
    low, high = least or most, most or least
    path: FieldPath = ("spec", "elasticPolicy")
    if not isinstance(low, int) or not isinstance(high, int):
        return
    if low > high:
        yield job.at(
            (*path, "minReplicas"),
            f"minReplicas {low} is more than maxReplicas {high}: every launcher refuses that at "
            "its start; swap them",
        )
    elif low > job.nodes and not policy.get("metrics"):
        alone = "" if least else " (maxReplicas alone sets both bounds)"
        yield job.at(
            (*path, "minReplicas" if least else "maxReplicas"),
            f"the rendezvous waits for {low} nodes{alone}, and there are {job.nodes}: it never "
            f"begins; set minReplicas to at most {job.nodes}",
        )


_WORDS: Final = ("auto", "gpu", "cpu", "xpu")
_LOOPBACK: Final = re.compile(r"(localhost|127\.\d+\.\d+\.\d+|\[?::1\]?)(:\d+)?")


@RULES.error
def _nproc_value(job: ManifestJob) -> Iterator[Finding]:
    """The CRD takes any text for nprocPerNode; torchrun knows numbers, auto, gpu and cpu."""
    path = ("spec", "nprocPerNode")
    value = job.get(*path)
    if value is None:
        return
    if not isinstance(value, str):
        yield job.at(
            path, f'nprocPerNode {value} is not a string, and the CRD refuses it; write "{value}"'
        )
    elif value not in _WORDS and not (value.isascii() and value.isdigit() and int(value)):
        yield job.at(
            path,
            f"nprocPerNode {value!r} passes the CRD, and every launcher ends at its start; use a "
            f"number, or one of {', '.join(_WORDS[:3])}",
        )


@RULES.error
def _nproc_without_launcher(job: ManifestJob) -> Iterator[Finding]:
    """The operator multiplies WORLD_SIZE by nprocPerNode; only a launcher starts the processes."""
    nproc = job.get("spec", "nprocPerNode") or at_path(job.elastic, "nProcPerNode")
    if not str(nproc).isdecimal() or int(str(nproc)) <= 1:
        return
    for replica, container in job.trainers():
        if launcher_of(container) == "none":
            processes = int(str(nproc)) * job.nodes
            yield job.at(
                (*container.path, "command"),
                f"nprocPerNode {nproc} makes WORLD_SIZE {processes}, but the {replica.role} starts "
                f"one process, {' '.join(container.argv)[:60]!r}: of {processes} ranks only "
                f"{job.nodes} can join, and they wait for the rest; start it with torchrun, or "
                f"remove {job.step('nprocPerNode', 'replicas.nproc_per_node')}",
            )


@RULES.error
def _launcher_hard_coded(job: ManifestJob) -> Iterator[Finding]:
    """Arguments of torchrun win over the operator's PET_* variables, in all pods of a role."""
    for replica, container in job.trainers():
        flags = launcher_flags(container)
        for name, value in flags.items():
            why = _contradiction(job, replica, name, value) if "$" not in value else ""
            if why:
                where = "command" if container.command else "args"
                shown = f"--{name}={value}" if value else f"--{name}"
                yield job.at(
                    (*container.path, where),
                    f"{shown} in the {replica.role}: {why}; remove it, the operator's PET_*"
                    " variables set it",
                )


def _contradiction(job: ManifestJob, replica: ManifestReplica, name: str, value: str) -> str:
    """Why a flag of torchrun cannot be right in this job, or nothing."""
    nodes, why = job.nodes, ""
    if nodes == 1 or job.elastic is not None:
        return why
    match name:
        case "nnodes" if value.isdecimal() and int(value) > nodes:
            why = f"the job has {nodes} pods, so the rendezvous waits forever"
        case "nnodes" if value.isdecimal() and int(value) < nodes:
            why = f"the job has {nodes} pods, so they do not form one group"
        case "node_rank" if value.isdecimal() and replica.count > 1:
            why = f"all {replica.count} pods get this rank and the rendezvous never completes"
        case "node_rank" if value.isdecimal() and value != _node_rank(job, replica):
            why = f"the operator gives this pod rank {_node_rank(job, replica)}"
        case "master_addr" | "rdzv_endpoint" if _LOOPBACK.fullmatch(value):
            why = f"each of the {nodes} pods waits for the others inside itself"
        case "standalone":
            why = f"each of the {nodes} pods trains the whole model by itself"
        case _:
            pass
    return why


def _node_rank(job: ManifestJob, replica: ManifestReplica) -> str:
    return "1" if replica.role == Role.WORKER and job.replica(Role.MASTER) else "0"


@RULES.error
def _no_master(job: ManifestJob) -> Iterator[Finding]:
    """Without a Master or an elasticPolicy the operator sets no rendezvous address."""
    worker = job.replica(Role.WORKER)
    if worker is None or worker.trainer is None or job.replica(Role.MASTER) is not None:
        return
    container = worker.trainer
    names = {at_path(variable, "name") for variable in container.items("env")}
    addresses = names & {"MASTER_ADDR", "PET_RDZV_ENDPOINT", "PET_MASTER_ADDR"}
    addresses |= launcher_flags(container).keys() & {"master_addr", "rdzv_endpoint"}
    text = " ".join(container.argv)
    speaks_torch = launcher_of(container) == "none" or re.search(r"torchrun|torch\.dist", text)
    if worker.count > 1 and job.elastic is None and not addresses and speaks_torch:
        yield job.at(
            worker.path[:-1],
            f"{counted(worker.count, 'Worker')} and no Master: nothing gives them a rendezvous"
            " address, so each waits or fails; add a Master (replicas: 1) or an elasticPolicy",
        )


@RULES.warning
def _env_overridden(job: ManifestJob) -> Iterator[Finding]:
    """The operator appends its variables to the container's, and the last one of a name wins."""
    if job.refusals:
        return
    for replica in job.replicas:
        wins = [_injected(job, replica, index) for index in {0, replica.count - 1}]
        for container in replica.containers():
            for index, variable in enumerate(container.items("env")):
                name, value = at_path(variable, "name"), at_path(variable, "value")
                if name in wins[0] and any(env[name] != value for env in wins):
                    setting = f"{name}={value}" if value is not None else f"{name} (valueFrom)"
                    yield job.at(
                        (*container.path, "env", index, "name"),
                        f"{setting} never reaches the {replica.role}: the operator sets it to "
                        f"{wins[0][name]!r}, which takes precedence; remove it, or use another"
                        " name",
                    )


def _injected(job: ManifestJob, replica: ManifestReplica, index: int) -> dict[str, str]:
    try:
        return job.as_job.injected_env(replica.role, index)
    except (AttributeError, KeyError, TypeError, ValueError):
        return {}  # a shape that the CRD refuses, which another check says


@RULES.warning
def _readiness_probe_on_master(job: ManifestJob) -> Iterator[Finding]:
    """The Master's name resolves once its pod is Ready, and Workers wait for that name."""
    master = job.replica(Role.MASTER)
    if master is None or master.trainer is None or job.replica(Role.WORKER) is None:
        return
    for kind in ("readinessProbe", "startupProbe"):
        if kind in master.trainer.data:
            yield job.at(
                (*master.trainer.path, kind),
                f"{kind} on the Master: until it passes, Workers cannot find the Master, so a probe"
                " that waits for the training never succeeds; remove it",
            )

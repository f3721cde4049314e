"""Checks of what is there for jobs: the namespace with its limits, storage, nodes, free GPUs."""

from __future__ import annotations

from decimal import Decimal
from typing import TYPE_CHECKING, Final

from k8sjob.checks.doctor.check import fine, problem, unknown, warning
from k8sjob.checks.doctor.controller import flag, init_containers
from k8sjob.contract import Role, counted
from k8sjob.kube.capacity import add, amounts, as_text, asked_by, devices, nodes_of, pod_requests
from k8sjob.kube.objects import Object, at_path, containers
from k8sjob.targets.jobs import pod_specs

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from k8sjob.checks.doctor.check import ClusterFacts
    from k8sjob.findings import Finding
    from k8sjob.kube.capacity import Amounts, Node
    from k8sjob.kube.objects import Json
    from k8sjob.targets.api import Job

_ENFORCE: Final = "pod-security.kubernetes.io/enforce"
_VIEWER: Final = "ask for manifests/rbac/viewer.yaml"
_DEFAULT_CLASS: Final = ("metadata", "annotations", "storageclass.kubernetes.io/is-default-class")


def namespace(facts: ClusterFacts) -> Iterator[Finding]:
    """Whether the namespace exists."""
    refused = facts.error("dry run")
    unheard = refused is not None and f'namespaces "{facts.namespace}" not found' in refused.detail
    if facts.missing("namespace") or unheard:
        yield problem(
            "namespace",
            f"there is no namespace {facts.namespace}",
            "specify another one with -n, or have it created",
        )


def pod_security(facts: ClusterFacts) -> Iterator[Finding]:
    """Check that the namespace's pod security level admits the job's and the operator's Pods."""
    found = facts.one("namespace")
    if found is None:
        if not facts.missing("namespace"):
            seen = f"unknown: you cannot read the labels of {facts.namespace}"
            yield unknown("pod-security", seen, _VIEWER)
        return
    level = Object(found).labels.get(_ENFORCE, "")
    if level != "restricted":
        seen = f"{facts.namespace} enforces {level or 'nothing'}"
        yield fine("pod-security", seen)
        return
    seen = f"{facts.namespace} enforces restricted"
    pods = pod_specs(facts.job) if facts.job else ()
    if not all(
        _forbids_escalation(container) for _, _, pod in pods for container in containers(pod)
    ):
        step = "set security: restricted in the job.yaml"
        yield problem("pod-security", f"{seen}, and the job's pods do not comply", step)
    yield _init_container(facts, seen)


def _forbids_escalation(container: Json) -> bool:
    """Whether it gives up what nothing gives up by default, and restricted wants given up."""
    return at_path(container, "securityContext", "allowPrivilegeEscalation") is False


def _init_container(facts: ClusterFacts, seen: str) -> Finding:
    """Whether the operator's init container is admitted: its default has no securityContext.

    It is put in front of the Workers only of jobs with a Master.
    """
    topic = "pod-security"
    of_both = facts.job is None or {role for role, _, _ in pod_specs(facts.job)} == set(Role)
    if not (facts.target.init_container and of_both):
        return fine(topic, f"{seen}; this job gets no init container from the operator")
    if any(_forbids_escalation(container) for _, container in init_containers(facts)):
        return fine(topic, f"{seen}; the operator's init container complies, as pods here show")
    template_flag = facts.target.controller.template_flag
    if template := flag(facts, template_flag):
        return fine(topic, f"{seen}; the operator has an init container template, {template}")
    return warning(
        topic,
        f"{seen}: Workers are refused unless the operator's init container drops its privileges",
        f"have an init container template set for the operator ({template_flag}, or the file that"
        " it looks for), or run only Workers (replicas.elastic)",
    )


def storage(facts: ClusterFacts) -> Iterator[Finding]:
    """Check for a default StorageClass, for claims that name none."""
    classes = facts.items("storage classes")
    if classes is None:
        step = "ask for manifests/rbac/cluster-viewer.yaml"
        yield unknown("storage", "you cannot read the storage classes", step)
        return
    default = [one for one in classes if at_path(one, *_DEFAULT_CLASS) == "true"]
    names = ", ".join(Object(one).name for one in classes) or "none"
    if default:
        seen = f"claims get the StorageClass {Object(default[0]).name} (available: {names})"
        yield fine("storage", seen)
    else:
        yield warning(
            "storage",
            f"no StorageClass is the default (available: {names})",
            "set storageClassName in each PersistentVolumeClaim, or checkpoints get no volume",
        )


def pull_secrets(facts: ClusterFacts) -> Iterator[Finding]:
    """The pull secrets that Pods of the default service account get."""
    account = facts.one("service account")
    if account is None:
        return
    names = [secret.get("name", "") for secret in account.get("imagePullSecrets") or ()]
    seen = f"the service account default has {', '.join(names) or 'no pull secret'}"
    step = "" if names else "for a private registry, set image.pull_secrets"
    yield fine("pull-secrets", seen, step)


_NEARLY: Final = Decimal("0.9")
_COUNTED: Final = ("cpu", "memory")
"""The amounts that a quota requires every container to state."""
_PODS: Final = ("pods", "count/pods")
_SERVICES: Final = ("services", "count/services")


def quotas(facts: ClusterFacts) -> Iterator[Finding]:
    """Check whether the job fits in what ResourceQuotas leave."""
    found = facts.items("quotas")
    if found is None:
        yield unknown("quota", f"you cannot read the quotas of {facts.namespace}", _VIEWER)
        return
    if not found:
        yield fine("quota", f"{facts.namespace} has no ResourceQuota")
    need = quota_need(facts.job) if facts.job else {}
    for quota in found:
        name, spec, status = Object(quota).name, Object(quota).spec, Object(quota).status
        scoped = bool(spec.get("scopes") or spec.get("scopeSelector"))
        yield _check_quota(name, status, {} if scoped else need)
        hard = status.get("hard") or ()
        if facts.job and not scoped and (lacking := _unspecified(facts.job, hard, _filled(facts))):
            yield problem(
                "quota",
                f"{name} requires every container to set {', '.join(lacking)}; the job's do not",
                "set resources.cpu and resources.memory in the job.yaml",
            )


def quota_need(job: Job) -> Amounts:
    """The amounts that a job adds to a ResourceQuota, under the names that quotas use."""
    target, one = job.target, Decimal(1)
    made = [(target.resource, target.api_version)]
    made += [(below.resource, below.api_version) for below in target.made]
    need: Amounts = {f"count/{what}.{version.partition('/')[0]}": one for what, version in made}
    replicas = Decimal(sum(count for _, count, _ in pod_specs(job)))
    need |= dict.fromkeys(_PODS, replicas)
    need |= dict.fromkeys(_SERVICES, replicas if target.service_each else one)
    for _, count, pod in pod_specs(job):
        for group in ("requests", "limits"):
            for what, amount in pod_requests(pod, group).items():
                if what != "pods":
                    add(need, {f"{group}.{what}": amount * count})
    aliases = {what: need[f"requests.{what}"] for what in _COUNTED if f"requests.{what}" in need}
    return need | aliases


def _unspecified(job: Job, counted: Iterable[str], filled: Iterable[str]) -> list[str]:
    """The amounts in a quota that some container neither states nor gets from a LimitRange."""
    lacking = []
    for what in counted:
        group, _, resource = what.rpartition(".")
        group = group or "requests"
        if group not in {"requests", "limits"} or resource not in _COUNTED:
            continue
        if f"{group}.{resource}" not in filled and not _all_state(job, group, resource):
            lacking.append(f"{group}.{resource}")
    return lacking


def _all_state(job: Job, group: str, resource: str) -> bool:
    groups = {group, "limits"}  # a limit is taken for a request that is not there
    return all(
        any(resource in Object(container).part("resources", one) for one in groups)
        for _, _, pod in pod_specs(job)
        for container in containers(pod)
    )


def _check_quota(name: str, status: Json, need: Amounts) -> Finding:
    hard, used = amounts(status.get("hard")), amounts(status.get("used"))
    lines = tuple(
        f"{what}: {as_text(what, used.get(what, Decimal()))} of {as_text(what, limit)} used"
        + (f", the job adds {as_text(what, need[what])}" if need.get(what) else "")
        for what, limit in hard.items()
    )
    over = [what for what, limit in hard.items() if used.get(what, 0) + need.get(what, 0) > limit]
    near = [what for what, limit in hard.items() if used.get(what, Decimal()) >= limit * _NEARLY]
    if over and need:
        step = "make the job smaller, delete other jobs, or ask for a larger quota"
        return problem("quota", f"{name} has too little {', '.join(over)}", step, details=lines)
    if near:
        step = "delete finished jobs, or ask for a larger quota"
        return warning("quota", f"{name} is nearly used up: {', '.join(near)}", step, details=lines)
    return fine("quota", f"{name} has room", details=lines)


def _filled(facts: ClusterFacts) -> set[str]:
    """The amounts that LimitRanges set where a container states none, as "limits.memory"."""
    filled = {
        f"{group}.{resource}"
        for limit_range in facts.items("limit ranges") or ()
        for item in Object(limit_range).spec.get("limits") or ()
        for group, key in (("limits", "default"), ("requests", "defaultRequest"))
        for resource in item.get(key) or ()
    }
    return filled | {what.replace("limits.", "requests.") for what in filled}


def limits(facts: ClusterFacts) -> Iterator[Finding]:
    """Check whether the job requests more than LimitRanges allow one container or Pod."""
    for limit_range in facts.items("limit ranges") or ():
        for item in Object(limit_range).spec.get("limits") or ():
            most = amounts(item.get("max"))
            if most and item.get("type") in {"Container", "Pod"}:
                yield _limit(Object(limit_range).name, item["type"], most, facts.job)


def _limit(name: str, kind: str, most: Amounts, job: Job | None) -> Finding:
    over = tuple(
        f"{role}: {what} {as_text(what, asked[what])}"
        for role, _, pod in (pod_specs(job) if job else ())
        for asked in _limits_of(pod, kind)
        for what in most
        if asked.get(what, 0) > most[what]
    )
    allowed = ", ".join(f"{what} {as_text(what, limit)}" for what, limit in most.items())
    seen = f"{name} allows a {kind.lower()} at most {allowed}"
    if not over:
        return fine("limits", seen)
    step = "request less in resources, or have the LimitRange raised"
    return problem("limits", f"{seen}; the job requests more", step, details=over)


def _limits_of(pod: Json, kind: str) -> list[Amounts]:
    each = [asked_by(one, "limits") for one in pod.get("containers") or ()]
    if kind == "Container":
        return each
    whole: Amounts = {}
    for one in each:
        add(whole, one)
    return [whole]


# --- nodes ----------------------------------------------------------------------------------------

_SHOWN: Final = 8
"""Nodes that are named one by one."""


def nodes(facts: ClusterFacts) -> Iterator[Finding]:
    """How many nodes there are, and how many take Pods."""
    found = facts.items("nodes")
    if found is None:
        yield unknown(
            "nodes",
            "you cannot read the nodes, so free capacity is unknown",
            "ask for manifests/rbac/cluster-viewer.yaml, or the cluster's administrator",
        )
        return
    all_nodes = nodes_of(found, {})
    trouble = tuple(f"{node.name}: {node.trouble}" for node in all_nodes if node.trouble)
    seen = f"{len(all_nodes) - len(trouble)} of {len(all_nodes)} nodes accept pods"
    if len(trouble) == len(all_nodes):
        step = "no pod can be scheduled; ask the cluster's administrator"
        yield problem("nodes", seen, step, details=_some(trouble))
    else:
        yield fine("nodes", seen, details=_some(trouble))


def free_devices(facts: ClusterFacts) -> Iterator[Finding]:
    """Report the free GPUs and other devices, in all and on each node."""
    found = facts.items("nodes")
    if found is None:
        return
    all_nodes = nodes_of(found, facts.usage or {})
    kinds = devices(all_nodes)
    for (resource, model), those in kinds.items():
        yield _kind(facts, resource, model, those)
    bare = [node.name for node in all_nodes if node.lacks_plugin]
    if bare:
        yield warning(
            "devices",
            f"no nvidia.com/gpu on {counted(len(bare), 'node')} with an NVIDIA card, such as"
            f" {bare[0]}",
            "have NVIDIA's device plugin (or its GPU operator) installed, and check its pods",
        )
    elif not kinds:
        yield fine("devices", "no node offers GPUs or other devices: jobs run on CPUs only")


def _kind(facts: ClusterFacts, resource: str, model: str, those: Sequence[Node]) -> Finding:
    name = f"{resource} ({model})" if model else resource
    whole = sum((node.offers[resource] for node in those), Decimal())
    if facts.usage is None:
        return unknown(
            "devices",
            f"{name}: {whole} on {counted(len(those), 'node')}; how many are free is unknown, since"
            " you cannot read the pods of all namespaces",
            "ask for manifests/rbac/capacity.yaml",
        )
    free = sum((node.free(resource) for node in those), Decimal())
    order = sorted(those, key=lambda node: (-node.free(resource), node.name))
    details = _some(tuple(_line(node, resource) for node in order))
    seen = f"{name}: {free} of {whole} free"
    if free:
        return fine("devices", seen, details=details)
    return warning("devices", seen, "a job that requests them has to wait", details=details)


def _line(node: Node, resource: str) -> str:
    taints = ", ".join(
        f"{taint.get('key')}={taint.get('value', '')}:{taint.get('effect')}"
        for taint in node.taints
        if taint.get("effect") in {"NoSchedule", "NoExecute"}
    )
    line = f"{node.name}: {node.free(resource)} of {node.offers[resource]} free"
    line += f", {node.trouble}" if node.trouble else ""
    return line + (f"; only for jobs that tolerate {taints}" if taints else "")


def _some(lines: tuple[str, ...]) -> tuple[str, ...]:
    if len(lines) <= _SHOWN + 1:
        return lines
    return (*lines[:_SHOWN], f"... and {len(lines) - _SHOWN} more nodes")

"""Checks of what is there for jobs: the namespace with its limits, storage, nodes, free GPUs."""

from __future__ import annotations

from decimal import Decimal
from typing import TYPE_CHECKING, Final

from k8sjob.checks.doctor.check import fine, problem, unknown, warning
from k8sjob.checks.doctor.controller import flag, init_containers
from k8sjob.contract import Role, counted
from k8sjob.kube.capacity import add, amounts, as_text, asked_by, devices, nodes_of, pod_requests
from k8sjob.kube.objects import Object, Pod, at_path, containers
from k8sjob.kube.openshift import AllowedIds
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
    error = facts.error("dry run")
    refused = error is not None and f'namespaces "{facts.namespace}" not found' in error.detail
    if facts.missing("namespace") or refused:
        yield problem(
            "namespace",
            f"there is no namespace {facts.namespace}",
            "specify another one with -n, or have it created",
        )


def pod_security(facts: ClusterFacts) -> Iterator[Finding]:
    """Check that the namespace's pod security level admits the job's and the operator's Pods."""
    namespace = facts.object("namespace")
    if namespace is None:
        if not facts.missing("namespace"):
            message = f"unknown: you cannot read the labels of {facts.namespace}"
            yield unknown("pod-security", message, _VIEWER)
        return
    level = Object(namespace).labels.get(_ENFORCE, "")
    if level != "restricted":
        yield fine("pod-security", f"{facts.namespace} enforces {level or 'nothing'}")
        return
    policy = f"{facts.namespace} enforces restricted"
    pods = pod_specs(facts.job) if facts.job else ()
    # The level is enforced for Pods alone, so a dry run of the job does not show that.
    if not all(
        _forbids_escalation(container) for _, _, pod in pods for container in containers(pod)
    ):
        # Where the cluster chooses the ids, too, that one complies with both.
        security = "openshift" if AllowedIds.of(namespace) else "restricted"
        step = f"set security: {security} in the job.yaml"
        yield problem("pod-security", f"{policy}, and the job's pods do not comply", step)
    yield _init_container(facts, policy)


def user_ids(facts: ClusterFacts) -> Iterator[Finding]:
    """Check that the job's Pods name no user and group that OpenShift's restricted-v2 refuses."""
    ids = AllowedIds.of(facts.object("namespace") or {})
    if ids is None or facts.job is None:
        return
    policy = f"{facts.namespace} chooses the ids of its pods: {ids}"
    refused = dict.fromkeys(name for _, _, pod in pod_specs(facts.job) for name in ids.refused(pod))
    if refused:
        yield warning(
            "pod-security",
            f"{policy}; the job asks for {', '.join(refused)}",
            "set security: openshift in the job.yaml, which names no ids; or name a service_account"
            " that may use another security context constraint than restricted-v2",
        )
    else:
        yield fine("pod-security", f"{policy}; the job fits")


def _forbids_escalation(container: Json) -> bool:
    """Whether it gives up what nothing gives up by default, and restricted wants given up."""
    return at_path(container, "securityContext", "allowPrivilegeEscalation") is False


def _init_container(facts: ClusterFacts, policy: str) -> Finding:
    """Whether the operator's init container is admitted: its default has no securityContext.

    It is put in front of the Workers only of jobs with a Master.
    """
    topic = "pod-security"
    of_both = facts.job is None or {role for role, _, _ in pod_specs(facts.job)} == set(Role)
    if not (facts.target.pods.init_container and of_both):
        return fine(topic, f"{policy}; this job gets no init container from the operator")
    if any(_forbids_escalation(container) for _, container in init_containers(facts)):
        return fine(topic, f"{policy}; the operator's init container complies, as pods here show")
    template_flag = facts.target.controller.template_flag
    if template := flag(facts, template_flag):
        return fine(topic, f"{policy}; the operator has an init container template, {template}")
    return warning(
        topic,
        f"{policy}: Workers are refused unless the operator's init container drops its privileges",
        f"have an init container template set for the operator ({template_flag}, or the file that"
        " it looks for), or run only Workers (replicas.elastic)",
    )


def preflights(facts: ClusterFacts) -> Iterator[Finding]:
    """The nodes that a preflight of a job in this namespace has refused, by the Pods still here."""
    refused = {
        node: f"{pod.name}: {why}"
        for pod in map(Pod, facts.items("pods") or ())
        for node, why in pod.preflight_refusals.items()
    }
    for node, why in refused.items():
        yield warning(
            "preflight",
            f"a preflight refused node {node} in {why}",
            f"have it checked, or write policy.avoid_nodes: [{node}] in the job.yaml",
        )


def storage(facts: ClusterFacts) -> Iterator[Finding]:
    """Check for a default StorageClass, for claims that name none."""
    classes = facts.items("storage classes")
    if classes is None:
        step = "ask for manifests/rbac/cluster-viewer.yaml"
        yield unknown("storage", "you cannot read the storage classes", step)
        return
    default = [manifest for manifest in classes if at_path(manifest, *_DEFAULT_CLASS) == "true"]
    names = ", ".join(Object(manifest).name for manifest in classes) or "none"
    if default:
        message = f"claims get the StorageClass {Object(default[0]).name} (available: {names})"
        yield fine("storage", message)
    else:
        yield warning(
            "storage",
            f"no StorageClass is the default (available: {names})",
            "set storageClassName in each PersistentVolumeClaim, or checkpoints get no volume",
        )


_NEARLY: Final = Decimal("0.9")
_COUNTED: Final = ("cpu", "memory")
"""The amounts that a quota requires every container to state."""
_PODS: Final = ("pods", "count/pods")
_SERVICES: Final = ("services", "count/services")


def quotas(facts: ClusterFacts) -> Iterator[Finding]:
    """Check whether the job fits in what ResourceQuotas leave."""
    resource_quotas = facts.items("quotas")
    if resource_quotas is None:
        yield unknown("quota", f"you cannot read the quotas of {facts.namespace}", _VIEWER)
        return
    if not resource_quotas:
        yield fine("quota", f"{facts.namespace} has no ResourceQuota")
    need = quota_need(facts.job) if facts.job else {}
    for quota in resource_quotas:
        name, spec, status = Object(quota).name, Object(quota).spec, Object(quota).status
        # With scopes it counts only some Pods, and which those are is not worked out.
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
    target = job.target
    kinds = [f"{target.resource}.{target.api_version}"]
    kinds += [f"{below.resource}.{below.api_version}" for below in target.levels]
    need: Amounts = {f"count/{kind.partition('/')[0]}": Decimal(1) for kind in kinds}
    replicas = Decimal(sum(count for _, count, _ in pod_specs(job)))
    need |= dict.fromkeys(_PODS, replicas)
    need |= dict.fromkeys(_SERVICES, replicas if target.pods.service_each else Decimal(1))
    for _, count, pod in pod_specs(job):
        for group in ("requests", "limits"):
            for resource, amount in pod_requests(pod, group).items():
                if resource != "pods":
                    add(need, {f"{group}.{resource}": amount * count})
    # A quota's `cpu` is another name of `requests.cpu`.
    aliases = {name: need[f"requests.{name}"] for name in _COUNTED if f"requests.{name}" in need}
    return need | aliases


def _unspecified(job: Job, counted: Iterable[str], filled: Iterable[str]) -> list[str]:
    """The amounts in a quota that some container neither states nor gets from a LimitRange."""
    lacking = []
    for name in counted:
        group, _, resource = name.rpartition(".")
        group = group or "requests"
        if group not in {"requests", "limits"} or resource not in _COUNTED:
            continue
        if f"{group}.{resource}" not in filled and not _all_state(job, group, resource):
            lacking.append(f"{group}.{resource}")
    return lacking


def _all_state(job: Job, group: str, resource: str) -> bool:
    fields = {group, "limits"}  # a limit is taken for a request that is not there
    return all(
        any(resource in Object(container).part("resources", field) for field in fields)
        for _, _, pod in pod_specs(job)
        for container in containers(pod)
    )


def _check_quota(name: str, status: Json, need: Amounts) -> Finding:
    hard, used = amounts(status.get("hard")), amounts(status.get("used"))
    lines = tuple(
        f"{key}: {as_text(key, used.get(key, Decimal()))} of {as_text(key, limit)} used"
        + (f", the job adds {as_text(key, need[key])}" if need.get(key) else "")
        for key, limit in hard.items()
    )
    over = [key for key, limit in hard.items() if used.get(key, 0) + need.get(key, 0) > limit]
    near = [key for key, limit in hard.items() if used.get(key, Decimal()) >= limit * _NEARLY]
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
        for limit in Object(limit_range).spec.get("limits") or ()
        for group, key in (("limits", "default"), ("requests", "defaultRequest"))
        for resource in limit.get(key) or ()
    }
    return filled | {name.replace("limits.", "requests.") for name in filled}


def limits(facts: ClusterFacts) -> Iterator[Finding]:
    """Check whether the job requests more than LimitRanges allow one container or Pod."""
    for limit_range in facts.items("limit ranges") or ():
        for limit in Object(limit_range).spec.get("limits") or ():
            most = amounts(limit.get("max"))
            if most and limit.get("type") in {"Container", "Pod"}:
                yield _limit(Object(limit_range).name, limit["type"], most, facts.job)


def _limit(name: str, kind: str, most: Amounts, job: Job | None) -> Finding:
    over = tuple(
        f"{role}: {resource} {as_text(resource, asked[resource])}"
        for role, _, pod in (pod_specs(job) if job else ())
        for asked in _limits_of(pod, kind)
        for resource in most
        if asked.get(resource, 0) > most[resource]
    )
    allowed = ", ".join(f"{name} {as_text(name, limit)}" for name, limit in most.items())
    rule = f"{name} allows a {kind.lower()} at most {allowed}"
    if not over:
        return fine("limits", rule)
    step = "request less in resources, or have the LimitRange raised"
    return problem("limits", f"{rule}; the job requests more", step, details=over)


def _limits_of(pod: Json, kind: str) -> list[Amounts]:
    by_container = [asked_by(container, "limits") for container in pod.get("containers") or ()]
    if kind == "Container":
        return by_container
    whole: Amounts = {}
    for asked in by_container:
        add(whole, asked)
    return [whole]


# --- nodes ----------------------------------------------------------------------------------------

_SHOWN: Final = 8
"""Nodes that are named one by one."""


def nodes(facts: ClusterFacts) -> Iterator[Finding]:
    """How many nodes there are, and how many take Pods."""
    objects = facts.items("nodes")
    if objects is None:
        yield unknown(
            "nodes",
            "you cannot read the nodes, so free capacity is unknown",
            "ask for manifests/rbac/cluster-viewer.yaml, or the cluster's administrator",
        )
        return
    all_nodes = nodes_of(objects, {})
    trouble = tuple(f"{node.name}: {node.trouble}" for node in all_nodes if node.trouble)
    message = f"{len(all_nodes) - len(trouble)} of {len(all_nodes)} nodes accept pods"
    if len(trouble) == len(all_nodes):
        step = "no pod can be scheduled; ask the cluster's administrator"
        yield problem("nodes", message, step, details=_some(trouble))
    else:
        yield fine("nodes", message, details=_some(trouble))


def free_devices(facts: ClusterFacts) -> Iterator[Finding]:
    """Report the free GPUs and other devices, in all and on each node."""
    objects = facts.items("nodes")
    if objects is None:
        return
    all_nodes = nodes_of(objects, facts.usage or {})
    kinds = devices(all_nodes)
    for (resource, model), hosts in kinds.items():
        yield _kind(facts, resource, model, hosts)
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


def _kind(facts: ClusterFacts, resource: str, model: str, hosts: Sequence[Node]) -> Finding:
    name = f"{resource} ({model})" if model else resource
    whole = sum((host.offers[resource] for host in hosts), Decimal())
    if facts.usage is None:
        return unknown(
            "devices",
            f"{name}: {whole} on {counted(len(hosts), 'node')}; how many are free is unknown, since"
            " you cannot read the pods of all namespaces",
            "ask for manifests/rbac/capacity.yaml",
        )
    free = sum((host.free(resource) for host in hosts), Decimal())
    order = sorted(hosts, key=lambda host: (-host.free(resource), host.name))
    details = _some(tuple(_line(node, resource) for node in order))
    message = f"{name}: {free} of {whole} free"
    if free:
        return fine("devices", message, details=details)
    return warning("devices", message, "a job that requests them has to wait", details=details)


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

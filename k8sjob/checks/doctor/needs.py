"""The checks of a job's needs: objects that it names, its queue, gang scheduler, free nodes.

The scheduler knows more (spreading, other Pods' affinities, volumes that live in one zone): what is
found here about room is what it would find at best.
"""

from __future__ import annotations

import shlex
from collections import Counter
from typing import TYPE_CHECKING, Any, Final

from k8sjob.checks.doctor.check import fine, problem, unknown, warning
from k8sjob.checks.doctor.controller import flag
from k8sjob.contract import counted
from k8sjob.kube import gangs
from k8sjob.kube.api_resources import OF_THE_CLUSTER
from k8sjob.kube.capacity import add, as_text, nodes_of, pod_requests, refusal
from k8sjob.kube.kueue import MIN_PARALLELISM, closed, cluster_queue, excess, selects
from k8sjob.kube.objects import QUEUE, Object, at_path
from k8sjob.targets.jobs import pod_specs, references

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from k8sjob.checks.doctor.check import ClusterFacts
    from k8sjob.findings import Finding
    from k8sjob.kube.api_resources import ObjectReference
    from k8sjob.kube.capacity import Amounts, Node
    from k8sjob.kube.objects import Json
    from k8sjob.targets.api import Job

_KUEUE: Final = "kueue.x-k8s.io"
_KUEUE_KINDS: Final = frozenset({"queue", "workload priority class"})
_STEPS: Final = {
    "claim": "write a PersistentVolumeClaim of that name and create it: kubectl create"
    " -n {namespace} -f FILE; or name an existing one: kubectl get pvc -n {namespace}",
    "secret": "create it: kubectl create secret generic {name} -n {namespace}"
    " --from-literal=KEY=VALUE",
    "config map": "create it: kubectl create configmap {name} -n {namespace} --from-file=FILE",
    "pull secret": "create it from your login: kubectl create secret docker-registry {name}"
    " -n {namespace} --from-file=.dockerconfigjson=$HOME/.docker/config.json",
    "service account": "create it: kubectl create serviceaccount {name} -n {namespace}",
    "queue": "have the LocalQueue created, or correct kueue_queue",
    "workload priority class": "have the WorkloadPriorityClass created, or correct"
    " kueue_priority_class: Kueue refuses a job whose class does not exist",
}


def named_objects(facts: ClusterFacts) -> Iterator[Finding]:
    """Whether all objects that the job's Pods name exist."""
    if facts.job is None:
        return
    named = references(facts.job)
    present = [reference for reference in named if facts.object(str(reference)) is not None]
    absent = [reference for reference in named if facts.missing(str(reference))]
    groups = _groups(facts)
    kueue = groups is None or _KUEUE in groups
    for reference in absent:
        # Without Kueue none of its objects exist, and the queue check reports that.
        if kueue or reference.kind not in _KUEUE_KINDS:
            yield _missing(reference, facts.namespace)
    for reference in present:
        if reference.kind == "claim":
            yield from _claim(reference, facts)
    if present:
        yield fine("objects", "found: " + ", ".join(map(str, present)))
    if hidden := [reference for reference in named if reference not in [*present, *absent]]:
        names = ", ".join(map(str, hidden))
        yield unknown(
            "objects",
            f"you cannot read these, so it is unknown whether they exist: {names}",
            "ask someone who can read them: a job waits for the objects that it refers to",
        )


def queue(facts: ClusterFacts) -> Iterator[Finding]:
    """Whether Kueue manages the job, and whether its queue can ever admit it."""
    if facts.job is None or not (name := facts.job.labels.get(QUEUE)):
        return
    groups, managed = _groups(facts), facts.kueue_manages
    without = "or remove kueue_queue from the job.yaml; otherwise the job never starts"
    if groups is not None and _KUEUE not in groups:
        yield problem("queue", "Kueue is not installed in this cluster", f"install it, {without}")
        return
    local, cluster = facts.object(f"queue {name}"), facts.object("cluster queue")
    findings: list[Finding] = []
    if managed is False:
        text = f"Kueue does not manage {facts.target.kind}s in namespace {facts.namespace}"
        step = (
            f"have {facts.target.kueue_framework} added to integrations.frameworks in Kueue's"
            f" settings, and the namespace in managedJobsNamespaceSelector, {without}"
        )
        findings.append(problem("queue", text, step))
    if local is not None:
        findings += _in_queue(facts, local, {} if facts.missing("cluster queue") else cluster)
    yield from findings
    if findings or facts.missing(f"queue {name}"):  # the check of named objects says that
        return
    if groups and managed and local and cluster:
        text = f"Kueue manages {facts.target.kind}s, and ClusterQueue {Object(cluster).name} admits"
        yield fine("queue", f"{text} those from LocalQueue {name}")
        return
    of = cluster_queue(local) if local else "of the queue"
    text = f"it is unknown whether Kueue will start the job from LocalQueue {name}: you cannot read"
    step = "ask for manifests/rbac/cluster-viewer.yaml; k8sjob why shows more once it is submitted"
    text += f" ClusterQueue {of}, or no dry run reached Kueue's webhook"
    yield unknown("queue", text, step)


def _in_queue(facts: ClusterFacts, local: Json, cluster: Json | None) -> Iterator[Finding]:
    """Check for causes that keep this job in a queue forever."""
    if reason := closed(local, cluster):
        step = "ask Kueue's administrator to correct it; until then the job does not start"
        yield problem("queue", reason, step)
    if not cluster:
        return
    namespace = facts.object("namespace")
    if namespace and not selects(cluster, Object(namespace).labels):
        yield problem(
            "queue",
            f"ClusterQueue {Object(cluster).name} accepts no jobs from namespace {facts.namespace}"
            " (spec.namespaceSelector)",
            "have the namespace selected there, or use another queue; otherwise the job never"
            " starts",
        )
    if facts.job is None:
        return
    fewest = facts.job.annotations.get(MIN_PARALLELISM)
    roles = facts.job.replicas
    sets = {role.path: (0, pod_requests(role.pod)) for role in roles}
    for role in roles:  # those of one template get one flavor
        count, each = sets[role.path]
        sets[role.path] = count + role.count, each
    pods = list(sets.values())
    for reason, declared in excess(cluster, [(int(fewest), pods[0][1])] if fewest else pods):
        if declared:
            step = "request less, or use another queue; otherwise the job never starts"
            yield problem("queue", reason, step)
        else:
            step = "Kueue admits no such job, unless it is configured with IgnoreUndeclared"
            yield warning("queue", reason, f"{step}; have quota for it added")


def gang(facts: ClusterFacts) -> Iterator[Finding]:
    """Whether a gang scheduler will place the job, and whether its queue can ever admit it."""
    groups, job = _groups(facts), facts.job
    if groups is None or job is None or job.gang is None:
        return
    step = "or remove the gang and its scheduler from the job.yaml; otherwise the job never starts"
    operator, volcano = job.target.controller, gangs.VOLCANO.partition("/")[0] in groups
    coscheduling = gangs.COSCHEDULING.partition("/")[0] in groups
    schedulers = {pod.get("schedulerName") for _, _, pod in pod_specs(job)}
    if not (volcano or (coscheduling and schedulers != {gangs.VOLCANO_SCHEDULER})):
        text = "its gang scheduler is not installed in this cluster, which does not serve PodGroups"
        start = f" and start the operator with {operator.gang_flag}" if operator.gang_flag else ""
        yield problem("gang", text, f"install Volcano or the coscheduling plugin{start}, {step}")
    elif operator.gang_flag and flag(facts, operator.gang_flag) == "":
        text = f"{operator.name} runs without {operator.gang_flag}, and makes no PodGroup"
        yield problem("gang", text, f"have it started with it, {step}")
    if not volcano or schedulers - {gangs.VOLCANO_SCHEDULER, None}:
        return
    ready = [Object(d).status.get("readyReplicas") for d in facts.items("volcano") or ()]
    if ready and not any(ready):
        text = "Volcano's scheduler does not run: no pod of its Deployment is ready"
        yield problem("gang", text, f"have it started, {step}")
    name, needs = gangs.queue_name(job.gang), _gang_needs(job)
    queue = {} if facts.missing("gang queue") else facts.object("gang queue")
    if never := gangs.obstacle(name, queue, needs):
        step = "request less, or use another queue; otherwise the job never starts"
        yield problem("gang", never, step)
    elif queue is None:
        text = f"it is unknown whether Volcano's queue {name!r} admits the job: you cannot read it"
        yield unknown("gang", text, "ask for manifests/rbac/cluster-viewer.yaml")
    else:
        use = gangs.use_of(queue, needs)
        yield fine("gang", f"Volcano's queue {name!r} is Open" + (use and f": {use}"))


def _groups(facts: ClusterFacts) -> set[str] | None:
    """The API groups that the cluster serves; None if that is not known."""
    apis = facts.object("apis") or {}
    if apis.get("kind") != "APIGroupList":
        return None
    return {group.get("name", "") for group in apis.get("groups") or ()}


def _missing(reference: ObjectReference, namespace: str) -> Finding:
    step = _STEPS.get(reference.kind, "correct its name in the job.yaml, or have it created")
    step = step.format(name=shlex.quote(reference.name), namespace=shlex.quote(namespace))
    if reference.kind == "pull secret":  # the kubelet continues without it
        return warning("objects", f"there is no {reference} in {namespace}", step)
    where = "" if reference.kind in OF_THE_CLUSTER else f" in {namespace}"
    return problem("objects", f"there is no {reference}{where}", step)


def _claim(pvc: ObjectReference, facts: ClusterFacts) -> Iterator[Finding]:
    claim = facts.object(str(pvc)) or {}
    if at_path(claim, "status", "phase") == "Lost":
        yield problem("objects", f"{pvc} has lost its volume", "have the volume restored")
    modes = set(at_path(claim, "spec", "accessModes") or ())
    replicas = sum(count for _, count, _ in pod_specs(facts.job)) if facts.job else 0
    if replicas > 1 and modes == {"ReadWriteOncePod"}:
        step = "use a claim that is ReadWriteMany"
        yield problem("objects", f"{pvc} is for only one pod, and the job has {replicas}", step)
    elif replicas > 1 and modes == {"ReadWriteOnce"}:
        yield warning(
            "objects",
            f"{pvc} is ReadWriteOnce: replicas on another node than the first cannot mount it",
            "use a claim that is ReadWriteMany, or keep the job on one node",
        )


# --- room on nodes --------------------------------------------------------------------------------


def fit(facts: ClusterFacts) -> Iterator[Finding]:
    """Whether each replica fits on a node at all, and how many of them fit now."""
    if facts.job is None:
        return
    objects = facts.items("nodes")
    if objects is None:
        message = "it is unknown whether the job fits: you cannot read the nodes"
        yield unknown("fit", message, "ask for manifests/rbac/cluster-viewer.yaml")
        return
    nodes = nodes_of(objects, facts.usage or {})
    never = [check for role, _, pod in pod_specs(facts.job) if (check := _never(role, pod, nodes))]
    yield from never
    if not never and facts.usage is None:
        message = "each replica fits on an empty node; what is free now is unknown"
        yield unknown("fit", message, "ask for manifests/rbac/capacity.yaml")
    elif not never:
        yield _check_free_room(facts.job, nodes)


def _never(role: str, pod: Json, nodes: Sequence[Node]) -> Finding | None:
    """Why no replica of the role can run, however long it waits; None if one can."""
    reasons = Counter(why for node in nodes if (why := refusal(node, pod)))
    possible = [node for node in nodes if not refusal(node, pod)]
    if not possible:
        details = tuple(f"{counted(count, 'node')}: {why}" for why, count in reasons.most_common())
        step = "correct node_selector, tolerations, affinity or gpu_type in the job.yaml"
        return problem("fit", f"no node accepts a {role}", step, details=details)
    need = pod_requests(pod)
    if any(_has_room(node.offers, need) for node in possible):
        return None
    short = {
        name: best
        for name, amount in need.items()
        if (best := max(node.offers.get(name, amount * 0) for node in possible)) < amount
    }
    asked = {name: f"{name} {as_text(name, amount)}" for name, amount in need.items()}
    reason = ", ".join(
        f"{asked[name]} (the largest has {as_text(name, best)})" for name, best in short.items()
    ) or "all of " + ", ".join(asked.values())
    return problem(
        "fit",
        f"a {role} is too large for every node, even an empty one: it requests {reason}",
        "request less in resources, or use more replicas that are smaller",
    )


def _check_free_room(job: Job, nodes: Sequence[Node]) -> Finding:
    """How many replicas find room now, each put on the fullest node that has it."""
    room: dict[str, Amounts] = {
        node.name: {resource: node.free(resource) for resource in node.offers} for node in nodes
    }
    placed = replicas = 0
    for _, count, pod in pod_specs(job):
        need = pod_requests(pod)
        possible = [node.name for node in nodes if not refusal(node, pod)]
        rare = max(need, key=lambda name: ("/" in name, name))  # a device, where one is asked for
        replicas += count
        for _ in range(count):
            fitting = [host for host in possible if _has_room(room[host], need)]
            if not fitting:
                continue
            fullest = min(fitting, key=lambda host: room[host].get(rare, 0))
            add(room[fullest], {resource: -amount for resource, amount in need.items()})
            placed += 1
    if placed == replicas:
        return fine(
            "fit", "the replica fits now" if replicas == 1 else f"all {replicas} replicas fit now"
        )
    return warning(
        "fit",
        f"{placed} of {replicas} replicas fit now; they hold their resources while the others wait",
        "wait for other jobs to end, make the job smaller, or use gang scheduling (gang)",
    )


def _has_room(room: Mapping[str, Any], need: Amounts) -> bool:
    return all(room.get(resource, 0) >= amount for resource, amount in need.items() if amount)


def _gang_needs(job: Job) -> Amounts:
    """What the Pods request in all that must start together: by default all of them."""
    needs: Amounts = {}
    fewest = (job.gang or {}).get("minAvailable")
    remaining = fewest if isinstance(fewest, int) else sum(r.count for r in job.replicas)
    for _, count, pod in pod_specs(job):
        together = min(count, remaining)
        remaining -= together
        add(needs, {name: amount * together for name, amount in pod_requests(pod).items()})
    return needs

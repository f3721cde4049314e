"""Objects beside a job that may be why it does not run, looked up all at once for `why`.

Of secrets and config maps only the existence is asked for. What the user may not read, or what
cannot be read now, is left out.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Final

from k8sjob.backends.api import OUTPUT
from k8sjob.kube.api_resources import ResourcePath, path
from k8sjob.kube.client.errors import is_absent
from k8sjob.kube.client.listwatch import list_all, pages
from k8sjob.kube.client.transport import ApiError
from k8sjob.kube.gangs import POD_GROUP, is_queued, queue_name, queue_of
from k8sjob.kube.kueue import cluster_queue
from k8sjob.kube.objects import (
    PRIORITY,
    QUEUE,
    Object,
    Pod,
    containers,
    is_ours,
    without_managed_fields,
)
from k8sjob.targets.jobs import references
from k8sjob.threads import run_parallel

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from k8sjob.backends.api import Snapshot
    from k8sjob.kube.client.transport import Transport
    from k8sjob.kube.objects import Json

MAX_NODES: Final = 16
"""How many nodes are looked up by name: of larger jobs the first ones."""
_MAX_INITS: Final = 3
"""How many init containers' output is read; they fail one after the other."""
_DIAGNOSED: Final = frozenset({"claim", "secret", "pull secret", "config map"})
"""The references of a job that its diagnosis needs."""
_NO_NAMES: Final = frozenset({"", ".", ".."})
_ADMITTED: Final = "status.admission.clusterQueue"
_VISIBILITY: Final = "visibility.kueue.x-k8s.io/v1beta2"
_SECONDS: Final = 10.0
_AT_ONCE: Final = 8
_METADATA_ONLY: Final = {"secrets": "Secret", "configmaps": "ConfigMap"}
"""Resources of which the contents stay with the server."""


@dataclass(frozen=True, slots=True)
class _Lookup:
    """One request: for a collection where `name` is empty, else for one object."""

    resource: str
    namespace: str = ""
    name: str = ""
    query: Mapping[str, str] = field(default_factory=dict)
    needed: bool = False
    """Whether its absence is reported: of an object, of its kind, or of all of a kind."""
    api_version: str = ""

    def read(self, transport: Transport) -> list[Json]:
        """The objects; empty if they may not be read, or are missing and not needed."""
        where = path(self.resource, self.namespace, self.name, api_version=self.api_version)
        try:
            if not self.name:
                items = list_all(transport, where, self.query).items
                return items or ([_missing(where)] if self.needed else [])
            kind = _METADATA_ONLY.get(self.resource)
            # The contents of a Secret need not leave the server, and no record may have them.
            raw = transport.request("GET", where, metadata_only=bool(kind), timeout=_SECONDS)
        except ApiError as error:
            if not self.needed or error.code != 404:
                return []
            # If the cluster does not know the kind, no object is named.
            return [_missing(where if is_absent(error) else path(self.resource, self.namespace))]
        return [without_managed_fields({**raw, "kind": kind} if kind else raw)]


def related(transport: Transport, snapshot: Snapshot) -> tuple[Json, ...]:
    """The existing ones of these objects, each with its kind; see Backend.related."""
    # All at once; the first ones are several requests each, which depend on each other.
    readers = (_pods_with_devices, _queue, _gang, _init_outputs)
    chains = [partial(read, transport, snapshot) for read in readers]
    lookups = [partial(lookup.read, transport) for lookup in _lookups(snapshot)]
    answers = run_parallel([*chains, *lookups], _AT_ONCE)
    ordered = (*answers[len(chains) :], *answers[: len(chains)])
    return tuple(raw for answer in ordered for raw in answer)


def _lookups(snapshot: Snapshot) -> Iterator[_Lookup]:
    namespace, job = snapshot.job.namespace, snapshot.job
    nodes = list(dict.fromkeys(Pod(pod).node for pod in snapshot.pods))
    if "" in nodes:  # a pod waits for any
        yield _Lookup("nodes")
    else:
        yield from (_Lookup("nodes", name=node, needed=True) for node in nodes[:MAX_NODES])
    diagnosed = ((r.resource, r.name) for r in references(job) if r.kind in _DIAGNOSED)
    for resource, name in dict.fromkeys(diagnosed):
        yield _Lookup(resource, namespace, name, needed=True)
        if resource == "persistentvolumeclaims":
            about = f"involvedObject.kind=PersistentVolumeClaim,involvedObject.name={name}"
            yield _Lookup("events", namespace, query={"fieldSelector": about})
    yield _Lookup("resourcequotas", namespace)
    # Its labels decide about Pod Security and about the queues of Kueue.
    yield _Lookup("namespaces", name=namespace)
    # Others' Jobs need no Service of their name, but each TrainJob needs the runtime that it names.
    beside = job.companion_path(namespace)
    if beside and (is_ours(job.raw) or job.shares_companion):
        at = ResourcePath.of(beside)
        version = f"{at.group}/{at.version}" if at.group else ""
        yield _Lookup(at.resource, at.namespace, at.name, needed=True, api_version=version)
    controller = job.target.controller
    if controller.deployment:
        by_label = {"labelSelector": controller.deployment}
        yield _Lookup("deployments", query=by_label)
        # For a user who may not read those of all namespaces.
        yield _Lookup("deployments", controller.namespace, query=by_label)
        yield _Lookup("pods", controller.namespace, query=by_label)


def _queue(transport: Transport, snapshot: Snapshot) -> list[Json]:
    """Its Workload in Kueue; of a suspended job also the queue, and who has the queue's quota."""
    job = snapshot.job
    queue, namespace = job.labels.get(QUEUE), job.namespace
    if not queue:
        return []
    of_job = {"labelSelector": f"kueue.x-k8s.io/job-uid={job.uid}"}
    workloads = _Lookup("workloads", namespace, query=of_job, needed=True).read(transport)
    # Kueue suspends the job until it is admitted; afterwards the queue is of no interest.
    if not job.suspended:
        return workloads
    local = _Lookup("localqueues", namespace, queue, needed=True).read(transport)
    if (name := job.labels.get(PRIORITY)) and workloads and workloads[0]["kind"] == "Status":
        # Kueue makes no Workload of a job whose class does not exist.
        local += _Lookup("workloadpriorityclasses", name=name, needed=True).read(transport)
    cluster = next((name for raw in local if (name := cluster_queue(raw))), "")
    if not cluster or not any(raw["kind"] == "Workload" for raw in workloads):
        return workloads + local
    clusters = _Lookup("clusterqueues", name=cluster, needed=True).read(transport)
    selector = f"{_ADMITTED}={cluster}"
    # ClusterQueues of one cohort borrow from each other, so that jobs of another queue may have the
    # quota. A field selector knows no "one of", so all admitted Workloads come.
    if cohort := next((c for raw in clusters if (c := Object(raw).spec.get("cohortName"))), ""):
        everywhere = _Lookup("clusterqueues").read(transport)
        clusters = [raw for raw in everywhere if Object(raw).spec.get("cohortName") == cohort]
        selector = f"{_ADMITTED}!="
    holders = _page(transport, ("", namespace), selector)
    # The visibility API has the order of the queue; it is optional in Kueue, and then the Workloads
    # that are not admitted stand for it.
    where = path("localqueues", namespace, queue, "pendingworkloads", api_version=_VISIBILITY)
    try:
        summary = transport.request("GET", where, timeout=_SECONDS)
        pending = [{**summary, "kind": "PendingWorkloadsSummary"}]
    except ApiError:
        pending = _page(transport, (namespace,), f"{_ADMITTED}=")
    unique = {Object(raw).uid: raw for raw in (*holders, *pending, *workloads)}
    return [*local, *clusters, *unique.values()]


def _gang(transport: Transport, snapshot: Snapshot) -> list[Json]:
    """Its PodGroups with their Events, Volcano's Queue of each, and the nodes without Pods."""
    job, groups, queues = snapshot.job, snapshot.groups, set(map(queue_of, snapshot.groups))
    abouts = (
        f"involvedObject.kind={POD_GROUP},involvedObject.name={g.name}" for g in map(Object, groups)
    )
    lookups = [_Lookup("events", job.namespace, query={"fieldSelector": about}) for about in abouts]
    if job.gang is not None and not (groups or snapshot.pods):
        # Volcano's webhook refuses the PodGroup where the Queue is closed: the operator's log alone
        # has that.
        queues.add(queue_name(job.gang))
    lookups += [_Lookup("queues", name=queue, needed=True) for queue in sorted(queues - _NO_NAMES)]
    if any(map(is_queued, groups)) and not snapshot.pods:
        lookups.append(_Lookup("nodes"))
    return [*groups, *(raw for lookup in lookups for raw in lookup.read(transport))]


def _init_outputs(transport: Transport, snapshot: Snapshot) -> list[Json]:
    """The last lines of init containers that fail, of each the first Pod's."""
    outputs: dict[str, Json] = {}
    namespace = snapshot.job.namespace
    for pod in map(Pod, snapshot.pods):
        for status, _ in pod.failed_inits:
            name = str(status.raw.get("name"))
            if name in outputs or len(outputs) == _MAX_INITS:
                continue
            query = {"container": name, "tailLines": "10", "limitBytes": "65536"}
            # While it runs again its log is a new one.
            query |= {"previous": "true"} if "running" in status.part("state") else {}
            where = path("pods", namespace, pod.name, "log")
            with suppress(ApiError):
                lines = [*islice(transport.stream(where, query=query, idle=_SECONDS), 10)]
                meta = {"name": pod.name, "namespace": namespace}
                text = [line.decode(errors="replace").rstrip() for line in lines]
                outputs[name] = {"kind": OUTPUT, "metadata": meta, "container": name, "lines": text}
    return [*outputs.values()]


def _page(transport: Transport, namespaces: Iterable[str], selector: str) -> list[Json]:
    """The first Workloads in the first of some namespaces whose Workloads may be read."""
    for namespace in namespaces:
        with suppress(ApiError):
            where = path("workloads", namespace)
            return next(pages(transport, where, {"fieldSelector": selector})).items
    return []


def _limits(container: Json) -> Json:
    return Object(container).part("resources", "limits")


def _devices(pod: Pod) -> set[str]:
    """The devices that a pod asks for: nvidia.com/gpu and its like."""
    resources = {name for container in containers(pod.spec) for name in _limits(container)}
    return {name for name in resources if "/" in name}


def _pods_with_devices(transport: Transport, snapshot: Snapshot) -> list[Json]:
    """The pods of all namespaces with a device that pods without a node ask for.

    Of each pod only its node and limits.
    """
    waiting = (pod for pod in map(Pod, snapshot.pods) if not pod.node)
    devices = {name for pod in waiting for name in _devices(pod)}
    if not devices:
        return []
    # Pods that have ended use no devices.
    running = {"fieldSelector": "status.phase!=Succeeded,status.phase!=Failed"}
    try:
        return [
            _node_and_limits(pod)
            # Page by page, and of each Pod two fields: a cluster may have a hundred thousand Pods.
            for page in pages(transport, path("pods"), running)
            for pod in map(Pod, page.items)
            if pod.node and _devices(pod) & devices
        ]
    except ApiError:  # most users may not read other namespaces
        return []


def _node_and_limits(pod: Pod) -> Json:
    own_containers = pod.spec.get("containers") or []
    limits = [{"resources": {"limits": _limits(container)}} for container in own_containers]
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": pod.name, "namespace": pod.namespace},
        "spec": {"nodeName": pod.node, "containers": limits},
        "status": {"phase": pod.phase},
    }


def _missing(where: str) -> Json:
    """The server's answer for a missing object; without a name, for a whole kind."""
    target = ResourcePath.of(where)
    return {
        "apiVersion": "v1",
        "kind": "Status",
        "status": "Failure",
        "reason": "NotFound",
        "code": 404,
        "details": {"kind": target.resource, "name": target.name},
    }

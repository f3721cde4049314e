"""Objects beside a job that may be why it does not run, looked up all at once for `why`.

Of secrets and config maps only the existence is asked for. What the user may not read, or what
cannot be read now, is left out.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from k8sjob.kube.client.errors import is_absent
from k8sjob.kube.client.listwatch import list_all, pages, slim
from k8sjob.kube.client.transport import ApiError
from k8sjob.kube.labels import QUEUE
from k8sjob.kube.objects import Object, Pod, containers
from k8sjob.kube.resources import ResourcePath, path
from k8sjob.targets.jobs import references, target_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from k8sjob.backends.api import Json, Snapshot
    from k8sjob.kube.client.transport import Transport

__all__ = ["related"]

MAX_NODES: Final = 16
"""How many nodes are looked up by name: of larger jobs the first ones."""
_DIAGNOSED: Final = frozenset({"claim", "secret", "pull secret", "config map"})
"""The references of a job that its diagnosis needs."""
_SECONDS: Final = 10.0
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


def related(transport: Transport, snapshot: Snapshot) -> tuple[Json, ...]:
    """The objects that are there, each with its kind; see Backend.related.

    Args:
        transport: carries the requests.
        snapshot: the job and its pods.
    """
    lookups = list(_lookups(snapshot))
    with ThreadPoolExecutor(8) as pool:
        users = pool.submit(_users, transport, _scarce(snapshot))
        found = pool.map(lambda one: _look(transport, one), lookups)
        return (*(item for items in found for item in items), *users.result())


def _lookups(snapshot: Snapshot) -> Iterator[_Lookup]:
    namespace, job = snapshot.job["metadata"]["namespace"], snapshot.job
    yield from _nodes(snapshot.pods)
    for one in dict.fromkeys((r.resource, r.name) for r in references(job) if r.kind in _DIAGNOSED):
        yield _Lookup(one[0], namespace, one[1], needed=True)
        if one[0] == "persistentvolumeclaims":
            about = f"involvedObject.kind=PersistentVolumeClaim,involvedObject.name={one[1]}"
            yield _Lookup("events", namespace, query={"fieldSelector": about})
    yield _Lookup("resourcequotas", namespace)
    yield _Lookup("namespaces", name=namespace)
    controller = target_of(job).controller
    if controller.deployment:
        its_own = {"labelSelector": controller.deployment}
        yield _Lookup("deployments", query=its_own)
        yield _Lookup("deployments", controller.namespace, query=its_own)  # where all are forbidden
        yield _Lookup("pods", controller.namespace, query=its_own)
    if QUEUE in (job["metadata"].get("labels") or {}):
        queue = job["metadata"]["labels"][QUEUE]
        of_job = {"labelSelector": f"kueue.x-k8s.io/job-uid={job['metadata']['uid']}"}
        yield _Lookup("localqueues", namespace, queue, needed=True)
        yield _Lookup("workloads", namespace, query=of_job, needed=True)


def _nodes(pods: Iterable[Json]) -> Iterator[_Lookup]:
    """All nodes where a pod waits for one; else those that the pods run on."""
    names = [Pod(pod).node for pod in pods]
    if "" in names:
        yield _Lookup("nodes")
        return
    for name in list(dict.fromkeys(names))[:MAX_NODES]:
        yield _Lookup("nodes", name=name, needed=True)


def _look(transport: Transport, one: _Lookup) -> list[Json]:
    where = path(one.resource, one.namespace, one.name)
    try:
        if not one.name:
            items = list_all(transport, where, one.query).items
            return items or ([_missing(where)] if one.needed else [])
        kind = _METADATA_ONLY.get(one.resource)
        found = transport.request("GET", where, metadata_only=bool(kind), timeout=_SECONDS)
    except ApiError as error:
        if not one.needed or error.code != 404:
            return []
        # Where the cluster knows no such kind, no object is named.
        return [_missing(where if is_absent(error) else path(one.resource, one.namespace))]
    return [slim({**found, "kind": kind} if kind else found)]


def _scarce(snapshot: Snapshot) -> set[str]:
    """The devices that pods without a node ask for: nvidia.com/gpu and its like."""
    waiting = (pod for pod in map(Pod, snapshot.pods) if not pod.node)
    return {name for pod in waiting for name in _devices(pod)}


def _limits(container: Json) -> Json:
    return Object(container).part("resources", "limits")


def _devices(pod: Pod) -> set[str]:
    found = {name for container in containers(pod.spec) for name in _limits(container)}
    return {name for name in found if "/" in name}


def _users(transport: Transport, devices: set[str]) -> list[Json]:
    """The pods of all namespaces that have such devices: only their nodes and limits."""
    if not devices:
        return []
    running = {"fieldSelector": "status.phase!=Succeeded,status.phase!=Failed"}
    try:
        return [
            _without_rest(pod)
            for page in pages(transport, path("pods"), running)
            for pod in map(Pod, page.items)
            if pod.node and _devices(pod) & devices
        ]
    except ApiError:  # most users may not read other namespaces
        return []


def _without_rest(pod: Pod) -> Json:
    limits = [{"resources": {"limits": _limits(one)}} for one in pod.spec.get("containers") or []]
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": pod.name, "namespace": pod.namespace},
        "spec": {"nodeName": pod.node, "containers": limits},
        "status": {"phase": pod.phase},
    }


def _missing(where: str) -> Json:
    """What the server answers for an object that is not there; without a name for a whole kind."""
    target = ResourcePath.of(where)
    return {
        "apiVersion": "v1",
        "kind": "Status",
        "status": "Failure",
        "reason": "NotFound",
        "code": 404,
        "details": {"kind": target.resource, "name": target.name},
    }

"""What lies beside a job and may be why it does not run: looked up all at once, for `why` alone.

Of secrets and config maps no more is asked than whether they are there. What the user may not read,
or what cannot be read now, is left out.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from k8sjob.backends.cluster.listing import listing, pages, slim
from k8sjob.backends.cluster.words import is_absent
from k8sjob.backends.paths import Target, path
from k8sjob.backends.references import containers, references
from k8sjob.backends.transport import ApiError
from k8sjob.labels import QUEUE

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from k8sjob.backends.api import Json, Snapshot
    from k8sjob.backends.transport import Transport

__all__ = ["related"]

MOST_NODES: Final = 16
"""So many nodes are looked at by name; of larger jobs the first ones."""
_OPERATOR: Final = {"labelSelector": "control-plane=kubeflow-training-operator"}
_TOLD: Final = frozenset({"claim", "secret", "pull secret", "config map"})
"""What a job names and its diagnosis asks after."""
_SECONDS: Final = 10.0
_UNREAD: Final = {"secrets": "Secret", "configmaps": "ConfigMap"}
"""Resources of which the contents stay with the server."""


@dataclass(frozen=True, slots=True)
class _Lookup:
    """One question: a collection where `name` is empty, else one object."""

    resource: str
    namespace: str = ""
    name: str = ""
    query: Mapping[str, str] = field(default_factory=dict)
    needed: bool = False
    """Whether its absence is worth telling: of an object, of its kind, or of all of a kind."""


def related(transport: Transport, snapshot: Snapshot) -> tuple[Json, ...]:
    """The objects that are there, each with its kind; see Backend.related.

    Args:
        transport: carries the requests.
        snapshot: the job and its pods.
    """
    lookups = list(_lookups(snapshot))
    with ThreadPoolExecutor(8) as pool:
        takers = pool.submit(_takers, transport, _scarce(snapshot))
        found = pool.map(lambda one: _look(transport, one), lookups)
        return (*(item for items in found for item in items), *takers.result())


def _lookups(snapshot: Snapshot) -> Iterator[_Lookup]:
    namespace, job = snapshot.job["metadata"]["namespace"], snapshot.job
    yield from _nodes(snapshot.pods)
    for one in dict.fromkeys((r.resource, r.name) for r in references(job) if r.kind in _TOLD):
        yield _Lookup(one[0], namespace, one[1], needed=True)
        if one[0] == "persistentvolumeclaims":
            about = f"involvedObject.kind=PersistentVolumeClaim,involvedObject.name={one[1]}"
            yield _Lookup("events", namespace, query={"fieldSelector": about})
    yield _Lookup("resourcequotas", namespace)
    yield _Lookup("namespaces", name=namespace)
    yield _Lookup("deployments", query=_OPERATOR)
    yield _Lookup("deployments", "kubeflow", query=_OPERATOR)  # where all of them are forbidden
    yield _Lookup("pods", "kubeflow", query=_OPERATOR)
    if QUEUE in (job["metadata"].get("labels") or {}):
        queue = job["metadata"]["labels"][QUEUE]
        of_job = {"labelSelector": f"kueue.x-k8s.io/job-uid={job['metadata']['uid']}"}
        yield _Lookup("localqueues", namespace, queue, needed=True)
        yield _Lookup("workloads", namespace, query=of_job, needed=True)


def _nodes(pods: Iterable[Json]) -> Iterator[_Lookup]:
    """All nodes where a pod waits for one; else those that the pods run on."""
    names = [pod.get("spec", {}).get("nodeName", "") for pod in pods]
    if "" in names:
        yield _Lookup("nodes")
        return
    for name in list(dict.fromkeys(names))[:MOST_NODES]:
        yield _Lookup("nodes", name=name, needed=True)


def _look(transport: Transport, one: _Lookup) -> list[Json]:
    where = path(one.resource, one.namespace, one.name)
    try:
        if not one.name:
            items = listing(transport, where, one.query).items
            return items or ([_missing(where)] if one.needed else [])
        kind = _UNREAD.get(one.resource)
        found = transport.request("GET", where, metadata_only=bool(kind), timeout=_SECONDS)
    except ApiError as error:
        if not one.needed or error.code != 404:
            return []
        # Where the cluster knows no such kind, no object is named.
        return [_missing(where if is_absent(error) else path(one.resource, one.namespace))]
    return [slim({**found, "kind": kind} if kind else found)]


def _scarce(snapshot: Snapshot) -> set[str]:
    """The devices that pods without a node ask for: nvidia.com/gpu and its like."""
    waiting = (pod for pod in snapshot.pods if not pod.get("spec", {}).get("nodeName"))
    return {name for pod in waiting for name in _devices(pod)}


def _devices(pod: Json) -> set[str]:
    return {
        name
        for container in containers(pod.get("spec") or {})
        for name in (container.get("resources") or {}).get("limits") or {}
        if "/" in name
    }


def _takers(transport: Transport, devices: set[str]) -> list[Json]:
    """The pods of all namespaces that have such devices: their nodes and limits, no more."""
    if not devices:
        return []
    running = {"fieldSelector": "status.phase!=Succeeded,status.phase!=Failed"}
    try:
        found = [
            _taker(pod)
            for page in pages(transport, path("pods"), running)
            for pod in page.items
            if _devices(pod) & devices
        ]
    except ApiError:  # most users may not read other namespaces
        return []
    return [pod for pod in found if pod["spec"]["nodeName"]]


def _taker(pod: Json) -> Json:
    containers = [
        {"resources": {"limits": (one.get("resources") or {}).get("limits") or {}}}
        for one in pod["spec"].get("containers") or []
    ]
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": pod["metadata"]["name"], "namespace": pod["metadata"]["namespace"]},
        "spec": {"nodeName": pod["spec"].get("nodeName", ""), "containers": containers},
        "status": {"phase": (pod.get("status") or {}).get("phase", "")},
    }


def _missing(where: str) -> Json:
    """What the server answers for an object that is not there; without a name for a whole kind."""
    target = Target.of(where)
    return {
        "apiVersion": "v1",
        "kind": "Status",
        "status": "Failure",
        "reason": "NotFound",
        "code": 404,
        "details": {"kind": target.resource, "name": target.name},
    }

"""Whatever runs Pods in a cluster, found by its kind and name, or by the labels of its Pods.

The Pods of an object are those from which ownerReferences lead up to it; its label selector, where
it has one, only saves reading the others. Each object on the way is read once.
"""

from __future__ import annotations

import logging
import threading
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final

from k8sjob.backends.api import Snapshot
from k8sjob.backends.cluster.informer import with_groups
from k8sjob.errors import BackendError, JobNotFound
from k8sjob.kube.api_resources import path
from k8sjob.kube.client.discovery import BUILT_IN, POD, Discovery, Resource, is_selector
from k8sjob.kube.client.errors import is_absent
from k8sjob.kube.client.listwatch import list_all
from k8sjob.kube.client.transport import ApiError
from k8sjob.kube.objects import Object, Pod, event_time, in_time, moment, without_managed_fields
from k8sjob.sanitize import safe_line
from k8sjob.targets.jobs import TARGETS, is_job, job_of, job_path
from k8sjob.targets.workload.job import Workload
from k8sjob.targets.workload.pods import controller_of
from k8sjob.targets.workload.target import WorkloadTarget

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from k8sjob.backends.api import JobRef
    from k8sjob.kube.client.transport import Transport
    from k8sjob.kube.objects import Json
    from k8sjob.targets.api import Job

_LOGGER: Final = logging.getLogger("k8sjob")  # its warnings are lines on stderr
_DEPTH: Final = 6
"""The most objects between a Pod and what it belongs to: a RayJob has two, an AppWrapper more."""
_MOST_OWNERS: Final = 64
"""How many owners of Pods are read one by one: those that may be the object's own come first."""
_FEW_OWNERS: Final = 6
"""More than these of one kind are listed at once."""
_MOST_REFUSED: Final = 8
"""How many objects are, of those whose Events say that their Pods are refused."""
_READERS: Final = 8
_LOOK_SECONDS: Final = 2.0
_ONE_START: Final = timedelta(seconds=30)
"""Objects that were made within this time run together; a later one replaces those before it."""


class Workloads:
    """The objects of a cluster that run Pods; it keeps what it has read of their owners."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._discovery = Discovery(transport)
        self._owners: dict[str, Json | None] = {}
        """By uid; None: gone, or it may not be read."""
        self._warned: set[str] = set()

    def serves(self, word: str) -> bool:
        """Whether a word names a kind of object in namespaces."""
        return self._discovery.named(word) is not None

    def find(self, argument: str, namespace: str) -> Job:
        """What KIND/NAME is: a job of one of k8sjob's kinds where it is part of one or has one.

        `pods/KEY=VALUE` are the Pods with these labels.

        Raises:
            JobNotFound: there is no such object.
            BackendError: there is no such kind, or the cluster cannot be asked.
        """
        resource, raw = self._read(argument, namespace)
        self._read_owners([raw], namespace, "")
        for item in (raw, *self._chain(raw)):
            if is_job(item) and (job := job_of(item)).is_training:
                return job
        workload = self._workload(resource, raw, namespace)
        if raw["kind"] == "PodList" and not workload.pods:
            message = f"no pods with the labels {workload.name} in namespace {namespace}"
            raise JobNotFound(f"{message} (context {self._transport.context})")
        return self._wrapped(resource, workload) or workload

    def workload(self, ref: JobRef) -> Workload:
        """The object as it is now, with its Pods; for errors see find."""
        resource, raw = self._read(ref.name, ref.namespace, ref.uid)
        return self._workload(resource, raw, ref.namespace)

    def snapshot(self, ref: JobRef) -> Snapshot:
        """The object with its Pods and all of their Events; for errors see find."""
        resource, raw = self._read(ref.name, ref.namespace, ref.uid)
        with ThreadPoolExecutor(1) as pool:
            events = pool.submit(self._events, resource, raw, ref.namespace)
            workload = self._workload(resource, raw, ref.namespace)
            return self._with_events(workload, events.result())

    def watch(self, ref: JobRef, stop: threading.Event | None = None) -> Iterator[Snapshot]:
        """The object now, and again when it has changed, until it is gone or `stop` is set."""
        stop, before = stop or threading.Event(), None
        with suppress(JobNotFound):
            while not stop.is_set():
                # Read anew each time: no watch can select what ownerReferences lead to.
                now = self.snapshot(ref)
                if (seen := (now.job, now.events)) != before:
                    before = seen
                    yield now
                stop.wait(_LOOK_SECONDS)

    def owners_named(self, name: str, namespace: str) -> list[str]:
        """The KIND/NAME of what has this name and runs Pods now."""
        named: dict[str, None] = {}
        pods = self._listed("pods", path("pods", namespace), {})
        near = [pod for pod in pods if Object(pod).name.startswith(name)]
        self._read_owners(near, namespace, name)
        for item in near:
            for owner in (item, *self._chain(item)):
                resource = self._resource(owner)
                if resource and Object(owner).name == name:
                    named[f"{resource.word}/{name}"] = None
        return list(named)

    # --- the object -------------------------------------------------------------------------------

    def _read(self, argument: str, namespace: str, uid: str = "") -> tuple[Resource, Json]:
        word, _, name = argument.partition("/")
        resource = self._discovery.named(word)
        if resource is None:
            step = "kubectl api-resources --namespaced lists the kinds"
            raise BackendError(f"no kind of object in namespaces is called {word!r} there", step)
        if resource is POD and is_selector(name):
            about = {"name": name, "namespace": namespace}
            return resource, {"apiVersion": "v1", "kind": "PodList", "metadata": about}
        absent = JobNotFound(
            f"no {resource.word}/{name} in namespace {namespace} (context"
            f" {self._transport.context}); -n chooses another namespace"
        )
        try:
            raw = self._transport.request("GET", resource.path(namespace, name))
        except ApiError as error:
            raise (absent if is_absent(error) else error) from error
        if uid and Object(raw).uid != uid:
            raise absent
        about = {"apiVersion": resource.api_version, "kind": resource.kind}
        raw = without_managed_fields({**about, **raw})
        self._owners[Object(raw).uid] = raw
        return resource, raw

    def _workload(self, resource: Resource, raw: Json, namespace: str) -> Workload:
        selector = _selector(raw)
        target = WorkloadTarget(resource.kind, resource.api_version, resource.plural, selector)
        if resource is POD and raw["kind"] == "Pod":
            return Workload.read(target, raw, "pod", [raw])
        query = {"labelSelector": selector} if selector else {}
        pods = self._listed("pods", path("pods", namespace), query)
        if resource is POD:
            return Workload.read(target, raw, "pods", pods)
        own, below = self._own(raw, pods, selected=bool(selector))
        return Workload.read(target, raw, resource.word, own, below)

    def _wrapped(self, resource: Resource, workload: Workload) -> Job | None:
        """The only job of k8sjob's kinds that the object has made."""
        made = list(workload.below)
        # A job that waits in a queue has no Pods that lead to it.
        if not workload.pods and resource not in BUILT_IN:
            for target in TARGETS:
                where = job_path(target, workload.namespace)
                listed = self._listed("", where, {})
                made += (raw for raw in listed if controller_of(raw).get("uid") == workload.uid)
        jobs = [job for item in made if is_job(item) and (job := job_of(item)).is_training]
        return jobs[0] if len(jobs) == 1 else None

    # --- its Pods ---------------------------------------------------------------------------------

    def _own(
        self, raw: Json, pods: Iterable[Json], *, selected: bool
    ) -> tuple[list[Json], list[Json]]:
        """Those of the Pods that belong to an object, and the objects between."""
        root = Object(raw)
        by_owner: defaultdict[str, list[Json]] = defaultdict(list)
        for pod in pods:
            by_owner[str(controller_of(pod).get("uid", ""))].append(pod)
        by_owner.pop("", None)
        own = by_owner.pop(root.uid, [])

        first = [pods[0] for pods in by_owner.values()]
        self._read_owners(first, root.namespace, root.name)
        below: dict[str, Json] = {}
        branches: list[tuple[Object, list[Json]]] = []
        for pod in first:
            chain = self._chain(pod)
            uids = [Object(owner).uid for owner in chain]
            of_owner = by_owner[str(controller_of(pod).get("uid"))]
            if root.uid in uids:
                between = chain[: uids.index(root.uid)]
                below |= {Object(owner).uid: owner for owner in between}
                branches.append((Object(between[-1]), of_owner))
            elif selected and controller_of((chain or [pod])[-1]):
                own += of_owner  # an owner may not be read: the labels alone tell
        return [*own, *_current(branches)], list(below.values())

    def _chain(self, item: Json) -> list[Json]:
        """The objects that control an object, the nearest first, as far as they were read."""
        chain: list[Json] = []
        while len(chain) < _DEPTH and (reference := controller_of(item)):
            owner = self._owners.get(str(reference.get("uid")))
            if owner is None:
                break
            chain.append(owner)
            item = owner
        return chain

    def _read_owners(self, items: Iterable[Json], namespace: str, near: str) -> None:
        """Read all that control these objects, level by level; first what is called like `near`."""
        for _ in range(_DEPTH):
            references = {str(r.get("uid")): r for item in items if (r := controller_of(item))}
            unread = [r for uid, r in references.items() if uid not in self._owners]
            self._list_owners(unread, namespace)
            unread = [r for r in unread if r["uid"] not in self._owners]
            unread.sort(key=lambda r: not str(r.get("name")).startswith(near))
            if len(unread) > _MOST_OWNERS:
                self._warn("", f"of {len(unread)} owners of pods {_MOST_OWNERS} are looked up")
            with ThreadPoolExecutor(_READERS) as pool:
                chosen = unread[:_MOST_OWNERS]
                owners = list(pool.map(lambda r: self._looked_up(r, namespace), chosen))
            for reference, owner in zip(chosen, owners, strict=True):
                # One of the same name that was made later is another.
                same = owner and Object(owner).uid == reference["uid"]
                self._owners[reference["uid"]] = owner if same else None
            items = [owner for uid in references if (owner := self._owners.get(uid))]

    def _list_owners(self, references: Iterable[Mapping[str, str]], namespace: str) -> None:
        """Read those at once of which there are many of a kind, where they may be listed."""
        by_kind: defaultdict[tuple[str, str], list[str]] = defaultdict(list)
        for reference in references:
            by_kind[_kind_of(reference)].append(reference["uid"])
        for (version, kind), uids in by_kind.items():
            resource = self._discovery.of(version, kind) if len(uids) > _FEW_OWNERS else None
            if resource and (listed := self._listed("", resource.path(namespace), {})):
                by_uid = {Object(raw).uid: raw for raw in listed}
                self._owners |= {uid: by_uid.get(uid) for uid in uids}

    def _looked_up(self, reference: Mapping[str, str], namespace: str) -> Json | None:
        resource = self._discovery.of(*_kind_of(reference))
        if resource is None:
            return None
        try:
            where = resource.path(namespace, str(reference.get("name", "")))
            raw = self._transport.request("GET", where)
        except ApiError as error:
            if error.code not in {403, 404}:
                raise
            if error.code == 403:
                self._warn(resource.kind, f"owners of pods cannot be read: {error}")
            return None
        about = {"apiVersion": resource.api_version, "kind": resource.kind}
        return without_managed_fields({**about, **raw})

    def _resource(self, item: Json) -> Resource | None:
        return self._discovery.of(*_kind_of(item))

    # --- Events -----------------------------------------------------------------------------------

    def _events(self, resource: Resource, raw: Json, namespace: str) -> list[Json]:
        """The Events of a Pod, or of the namespace, since none can be selected by an owner."""
        of_pod = {"fieldSelector": f"involvedObject.uid={Object(raw).uid}"}
        is_pod = resource is POD and raw["kind"] == "Pod"
        return self._listed("events", path("events", namespace), of_pod if is_pod else {})

    def _with_events(self, workload: Workload, events: Sequence[Json]) -> Snapshot:
        """The object with those of the Events that are about it, or about what is its own."""
        objects = (workload.raw, *workload.pods, *workload.below)
        uids = {Object(item).uid for item in objects} - {""}
        begun = moment(workload.created)
        refused: dict[str, Json] = {}
        own: list[Json] = []
        for event in events:
            about = Object(event).part("involvedObject")
            uid, name = str(about.get("uid", "")), str(about.get("name", ""))
            if uid in uids:
                own.append(event)
            elif begun and event_time(event) < begun:
                continue
            elif about.get("kind") == "Pod":
                # Of a Pod that is gone its name alone tells; one that is there was found or is not
                # its own.
                if name not in workload.names and workload.replica_named(name):
                    own.append(event)
            elif event.get("type") == "Warning" and name.startswith(workload.name):
                refused[uid] = about
        below = list(workload.below)
        # Where all Pods are refused, none leads to the object between.
        for uid, about in list(refused.items())[-_MOST_REFUSED:]:
            owner = self._owners.get(uid) or self._looked_up(about, workload.namespace)
            self._read_owners([owner] if owner else [], workload.namespace, workload.name)
            if owner and workload.uid in {Object(o).uid for o in self._chain(owner)}:
                below.append(owner)
                uids.add(uid)
        uids &= refused.keys()
        own += (e for e in events if Object(e).part("involvedObject").get("uid") in uids)
        whole = replace(workload, below=tuple(below))
        for item in below:  # its status changes, so the next snapshot reads it again
            self._owners.pop(Object(item).uid, None)
        current = Snapshot(whole, whole.pods, in_time(own), skew=self._transport.skew)
        return with_groups(self._transport, whole.namespace, [current])[0]

    # --- small things -----------------------------------------------------------------------------

    def _listed(self, noun: str, where: str, query: Mapping[str, str]) -> list[Json]:
        """A collection; empty, with a warning, where it may not be read."""
        try:
            return list_all(self._transport, where, query).items
        except ApiError as error:
            if error.code not in {403, 404}:
                raise
            if noun:
                self._warn(noun, f"{noun} cannot be read: {error}")
            return []

    def _warn(self, about: str, text: str) -> None:
        if about not in self._warned:
            self._warned.add(about)
            _LOGGER.warning("warning: %s", safe_line(text))


def _kind_of(item: Mapping[str, Any]) -> tuple[str, str]:
    """The apiVersion and kind of an object, or of a reference to one."""
    return str(item.get("apiVersion")), str(item.get("kind"))


def _selector(raw: Json) -> str:
    """Labels that all of its Pods have, as a query has them; empty where none are known."""
    view = Object(raw)
    if raw["kind"] == "PodList":
        return view.name
    labels = view.part("spec", "selector", "matchLabels")
    # A ReplicationController has the labels alone; who owns a Pod decides in any case.
    labels = view.part("spec", "selector") if raw.get("apiVersion") == "v1" else labels
    return ",".join(f"{key}={value}" for key, value in labels.items())


def _current(branches: Sequence[tuple[Object, list[Json]]]) -> Iterator[Json]:
    """The Pods of an object's branches; of those that a newer one has replaced what still lives.

    The Pods of a CronJob's earlier Jobs have ended, as those of a Deployment's earlier versions.
    """
    newest: dict[object, str] = {}
    for child, _ in branches:
        kind = child.raw.get("kind")
        newest[kind] = max(newest.get(kind, ""), child.created)
    for child, pods in branches:
        begun, last = moment(child.created), moment(newest[child.raw.get("kind")])
        replaced = begun and last and last - begun > _ONE_START
        yield from (pod for pod in pods if not replaced or Pod(pod).live)

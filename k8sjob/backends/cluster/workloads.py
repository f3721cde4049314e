"""Whatever runs Pods in a cluster, found by its kind and name, or by the labels of its Pods.

The Pods of an object are those from which ownerReferences lead up to it; its label selector, where
it has one, only saves reading the others. Each object on the way is read once.
"""

from __future__ import annotations

import logging
import re
import threading
from collections import defaultdict
from contextlib import suppress
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Final

from k8sjob.backends.api import Snapshot
from k8sjob.backends.cluster.informer import with_groups
from k8sjob.errors import BackendError, JobNotFound
from k8sjob.kube.api_resources import BUILT_IN, POD, Resource, is_selector, path
from k8sjob.kube.client.discovery import Discovery
from k8sjob.kube.client.errors import is_absent
from k8sjob.kube.client.listwatch import list_all
from k8sjob.kube.client.transport import ApiError
from k8sjob.kube.objects import Object, Pod, event_time, in_time, moment, without_managed_fields
from k8sjob.sanitize import safe_line
from k8sjob.targets.jobs import KINDS, TARGETS, is_job, job_of, job_path
from k8sjob.targets.workload.job import Workload
from k8sjob.targets.workload.pods import controller_of
from k8sjob.targets.workload.target import WorkloadTarget
from k8sjob.threads import run_parallel

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

    from k8sjob.backends.api import JobRef
    from k8sjob.kube.client.transport import Transport
    from k8sjob.kube.objects import Json
    from k8sjob.targets.api import Job

_LOGGER: Final = logging.getLogger("k8sjob")  # its warnings are lines on stderr
_DEPTH: Final = 6
"""The most objects between a Pod and what it belongs to: a RayJob has two, an AppWrapper more."""
_READERS: Final = 8
_LOOK_SECONDS: Final = 2.0
_ONE_START: Final = timedelta(seconds=30)
"""Objects that were made within this time run together; a later one replaces those before it."""


class Workloads:
    """The objects of a cluster that run Pods."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._discovery = Discovery(transport, KINDS)
        self._warned: set[str] = set()

    def find(self, argument: str, namespace: str) -> Job:
        """What KIND/NAME is: a job of one of k8sjob's kinds where it is part of one or has one.

        `pods/KEY=VALUE` are the Pods with these labels.

        Raises:
            JobNotFound: there is no such object.
            BackendError: there is no such kind, or the cluster cannot be asked.
        """
        resource, raw = self._read(argument, namespace)
        owner = controller_of(raw)
        for item in (raw, *_chain(self._owners([owner], namespace), owner)):
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
        events = self._events(raw, ref.namespace)
        workload = self._workload(resource, raw, ref.namespace, events)
        about_it = in_time(_events_about(workload, events))
        current = Snapshot(workload, workload.pods, about_it, skew=self._transport.skew)
        return with_groups(self._transport, ref.namespace, [current])[0]

    def watch(self, ref: JobRef, stop: threading.Event | None = None) -> Iterator[Snapshot]:
        """The object now, and again when it has changed, until it is gone or `stop` is set."""
        stop, before = stop or threading.Event(), None
        with suppress(JobNotFound):
            while not stop.is_set():
                # Read anew each time: no watch can select what ownerReferences lead to.
                now = self.snapshot(ref)
                if (state := (now.job, now.events)) != before:
                    before = state
                    yield now
                stop.wait(_LOOK_SECONDS)

    # --- the object -------------------------------------------------------------------------------

    def _read(self, argument: str, namespace: str, uid: str = "") -> tuple[Resource, Json]:
        word, _, name = argument.partition("/")
        resource = self._discovery.named(word)
        if resource is None:
            step = "kubectl api-resources --namespaced lists the kinds and their groups"
            raise BackendError(f"the cluster has no kind {word!r} of objects in namespaces", step)
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
        return resource, without_managed_fields(raw)

    def _workload(
        self, resource: Resource, raw: Json, namespace: str, events: Iterable[Json] = ()
    ) -> Workload:
        selector = _selector(raw)
        target = WorkloadTarget(resource.kind, resource.api_version, resource.plural, selector)
        if raw["kind"] == "Pod":
            return Workload.read(target, raw, "pod", [raw])
        query = {"labelSelector": selector} if selector else {}
        pods = self._listed("pods", path("pods", namespace), query)
        if raw["kind"] == "PodList":
            begun = min((Object(pod).created for pod in pods), default="")
            raw = {**raw, "metadata": {**Object(raw).metadata, "creationTimestamp": begun}}
            return Workload.read(target, raw, "pods", pods)
        of_it, below = self._own(Object(raw), pods, events, selected=bool(selector))
        return Workload.read(target, raw, resource.word, of_it, below)

    def _wrapped(self, resource: Resource, workload: Workload) -> Job | None:
        """The only job of k8sjob's kinds that the object has made."""
        children = list(workload.below)
        # A job that waits in a queue has no Pods that lead to it.
        if not workload.pods and resource not in BUILT_IN:
            for target in TARGETS:
                where = job_path(target, workload.namespace)
                listed = self._listed("", where, {})
                children += (raw for raw in listed if controller_of(raw).get("uid") == workload.uid)
        jobs = [job for item in children if is_job(item) and (job := job_of(item)).is_training]
        return jobs[0] if len(jobs) == 1 else None

    # --- its Pods ---------------------------------------------------------------------------------

    def _own(
        self, root: Object, pods: Iterable[Json], events: Iterable[Json], *, selected: bool
    ) -> tuple[list[Json], list[Json]]:
        """Those of the Pods that belong to an object, and the objects between."""
        by_owner: defaultdict[str, list[Json]] = defaultdict(list)  # uid -> its Pods
        references: dict[str, Json] = {}
        for pod in pods:
            if reference := controller_of(pod):
                by_owner[str(reference.get("uid"))].append(pod)
                references[str(reference.get("uid"))] = reference
        # Where all Pods are refused, an Event alone leads to the object between.
        for event in events:
            about = Object(event).part("involvedObject")
            is_near = str(about.get("name", "")).startswith(root.name)
            if is_near and event.get("type") == "Warning" and about.get("kind") != "Pod":
                references.setdefault(str(about.get("uid")), about)
        references.pop(root.uid, None)
        of_root = by_owner.pop(root.uid, [])

        owners = {**self._owners(references.values(), root.namespace), root.uid: root.raw}
        below: dict[str, Json] = {}
        branches: list[tuple[Object, list[Json]]] = []
        for uid, reference in references.items():
            chain = _chain(owners, reference)
            uids = [Object(owner).uid for owner in chain]
            if root.uid in uids:
                between = chain[: uids.index(root.uid)]
                below |= {Object(owner).uid: owner for owner in between}
                branches.append((Object(between[-1]), by_owner[uid]))
            elif selected and (not chain or controller_of(chain[-1])):
                of_root += by_owner[uid]  # an owner may not be read: the labels alone tell
        return [*of_root, *_current(branches)], list(below.values())

    def _owners(self, references: Iterable[Json], namespace: str) -> dict[str, Json]:
        """What these references lead up to, by uid, as far as it is there and may be read."""
        owners: dict[str, Json] = {}
        for _ in range(_DEPTH):
            by_kind: defaultdict[tuple[str, str], dict[str, str]] = defaultdict(dict)
            for reference in references:
                if (uid := str(reference.get("uid", ""))) and uid not in owners:
                    kind = str(reference.get("apiVersion")), str(reference.get("kind"))
                    by_kind[kind][uid] = str(reference.get("name"))
            lists = [
                partial(self._of_kind, kind, names.values(), namespace)
                for kind, names in by_kind.items()
            ]
            listed = run_parallel(lists, _READERS)
            by_uid = {Object(raw).uid: raw for objects in listed for raw in objects}
            # One of the same name that was made later is another.
            level = {uid: by_uid[uid] for uids in by_kind.values() for uid in uids if uid in by_uid}
            owners |= level
            references = [controller_of(owner) for owner in level.values()]
        return owners

    def _of_kind(self, kind: tuple[str, str], names: Collection[str], namespace: str) -> list[Json]:
        """The objects of an apiVersion and kind with these names, and perhaps others."""
        resource = self._discovery.of(*kind)
        if resource is None:
            return []
        query = {}
        if len(names) == 1:  # a namespace may have thousands of a kind
            # The name is another's, and "\\", "," and "=" mean more in a selector.
            name = re.sub(r"([\\,=])", r"\\\1", next(iter(names)))
            query = {"fieldSelector": f"metadata.name={name}"}
        return self._listed(f"{resource.plural}, which own pods,", resource.path(namespace), query)

    def _events(self, raw: Json, namespace: str) -> list[Json]:
        """The Events of a Pod, or of the namespace, since none can be selected by an owner."""
        of_pod = {"fieldSelector": f"involvedObject.uid={Object(raw).uid}"}
        return self._listed(
            "events", path("events", namespace), of_pod if raw["kind"] == "Pod" else {}
        )

    # --- small things -----------------------------------------------------------------------------

    def _listed(self, noun: str, where: str, query: Mapping[str, str]) -> list[Json]:
        """A collection; empty, with a warning, where it may not be read."""
        try:
            return list_all(self._transport, where, query).items
        except ApiError as error:
            if error.code not in {403, 404}:
                raise
            if noun and error.code == 403:
                self._warn(noun, f"{noun} cannot be read: {error}")
            return []

    def _warn(self, about: str, text: str) -> None:
        if about not in self._warned:
            self._warned.add(about)
            _LOGGER.warning("warning: %s", safe_line(text))


def _chain(owners: Mapping[str, Json], reference: Json) -> list[Json]:
    """The objects that a reference leads up to, the nearest first, as far as they were read."""
    chain: list[Json] = []
    while len(chain) < _DEPTH and (owner := owners.get(str(reference.get("uid")))):
        chain.append(owner)
        reference = controller_of(owner)
    return chain


def _events_about(workload: Workload, events: Iterable[Json]) -> Iterator[Json]:
    """Those Events that are about an object or about what is its own."""
    objects = (workload.raw, *workload.pods, *workload.below)
    uids = {Object(item).uid for item in objects} - {""}
    begun = moment(workload.created)
    for event in events:
        about = Object(event).part("involvedObject")
        name = str(about.get("name", ""))
        # Of a Pod that is gone its name alone tells; one that is there was found or is not its own.
        if about.get("uid") in uids or (
            about.get("kind") == "Pod"
            and not (begun and event_time(event) < begun)
            and name not in workload.names
            and workload.replica_named(name)
        ):
            yield event


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

"""The informer of a job: four collections, each followed by a thread, as snapshots of the job."""

from __future__ import annotations

import threading
import time
from contextlib import suppress
from datetime import UTC, datetime
from functools import cache, partial
from typing import TYPE_CHECKING, Final, NamedTuple, Self

from k8sjob.backends.api import JobRef, Snapshot
from k8sjob.errors import JobTooLarge
from k8sjob.kube.api_resources import path
from k8sjob.kube.client.listwatch import Kind, list_all, reflect
from k8sjob.kube.client.transport import ApiError
from k8sjob.kube.gangs import group_names
from k8sjob.kube.objects import Object, Pod, in_time, new_event, without_managed_fields
from k8sjob.targets.api import JobState
from k8sjob.targets.jobs import (
    events_below,
    excess,
    is_below,
    job_path,
    of_kind,
    own_pods,
    with_child,
)
from k8sjob.threads import start

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from k8sjob.kube.client.listwatch import CollectionChange
    from k8sjob.kube.client.transport import Transport
    from k8sjob.kube.objects import Json
    from k8sjob.targets.api import Job, Level

OPTIONAL_SECONDS: Final = 1.0
"""How long to wait at the beginning for what may be missing."""
MIN_SECONDS: Final = 0.1
"""The time between two snapshots, however much happens."""
LOOK_SECONDS: Final = 0.2
_MAX_GROUPS: Final = 3
"""How many PodGroups of a job are read; Volcano makes one of each Job in a set."""


def snapshot(transport: Transport, job: Job) -> Snapshot:
    """A job as it was just read, with all events; without those that the user may not read."""
    name, namespace = job.name, job.namespace
    events_path = path("events", namespace)

    def events(selector: str) -> list[Json]:
        try:
            return list_all(transport, events_path, {"fieldSelector": selector}).items
        except ApiError as error:
            if error.code == 403:  # a job is worth showing without them
                return []
            raise

    def objects_of(kind: Level) -> list[Json]:
        try:
            return [without_managed_fields(transport.request("GET", kind.path(namespace, name)))]
        except ApiError as error:
            if error.code in {403, 404}:
                return []
            raise

    target = job.target
    of_job = {"labelSelector": target.pods.selector(name)}
    # All at once, so that `status` and `why` wait no longer than for the slowest answer.
    listing = start(partial(list_all, transport, path("pods", namespace), of_job))
    about = start(partial(events, f"involvedObject.uid={job.uid}"))
    # Events of Pods cannot be selected by a job: those of all Pods of the namespace come, and
    # `is_below` chooses.
    selectors = ("involvedObject.kind=Pod", *events_below(target, name))
    event_answers = [start(partial(events, selector)) for selector in selectors]
    object_answers = [start(partial(objects_of, kind)) for kind in target.levels]
    below = (event for answer in event_answers for event in answer.result() if is_below(job, event))
    children = [child for answer in object_answers for child in answer.result()]
    own_events = in_time([*about.result(), *below])
    pods = own_pods(job, listing.result().items, children)
    current = Snapshot(with_child(job, children), pods, own_events, skew=transport.skew)
    return with_groups(transport, namespace, [current])[0]


def with_groups(
    transport: Transport, namespace: str, snapshots: Sequence[Snapshot]
) -> list[Snapshot]:
    """Jobs of a namespace, or of all, with the PodGroups of those that a gang may hold up."""

    @cache
    def listed(version: str, where: str, name: str) -> dict[tuple[str, str], Object]:
        query = {"fieldSelector": f"metadata.name={name}"} if name else {}
        listing = path("podgroups", where, api_version=version)
        with suppress(ApiError):  # most clusters have no gang scheduler
            views = map(Object, list_all(transport, listing, query).items)
            return {(view.namespace, view.name): view for view in views}
        return {}

    def groups(job: Job, pods: Sequence[Json]) -> Iterator[Json]:
        if job.state()[0] is not JobState.CREATED or any(Pod(pod).node for pod in pods):
            return
        for version, name in sorted(group_names(job, pods))[:_MAX_GROUPS]:
            # By name for one job, since a namespace may have thousands.
            place = (job.namespace, name) if len(snapshots) == 1 else (namespace, "")
            group = listed(version, *place).get((job.namespace, name))
            # What no Pod names and another object owns only has the job's name.
            if group and (pods or job.uid in {owner.get("uid") for owner in group.owners}):
                yield group.raw

    return [each._replace(groups=tuple(groups(each.job, each.pods))) for each in snapshots]


def refuse_excess(job: Job) -> None:
    """Raise JobTooLarge for a job that has more than MOST_REPLICAS."""
    if problem := excess(job):
        ref = JobRef.of(job)
        advice = f"`k8sjob list` shows its state, `k8sjob delete {ref}` removes it"
        raise JobTooLarge(f"{ref} {problem}, so it is not read; {advice}")


def snapshots(
    transport: Transport, ref: JobRef, stop: threading.Event | None = None
) -> Iterator[Snapshot]:
    """A job, named with its uid, now and after each change, until it is gone or `stop` is set.

    Of the pods' events only warnings are followed: of the others each pod has four that nobody
    needs.
    """
    # Runs in the caller's thread; the informer's threads only note what has changed.
    with _Informer(transport, ref) as informer:
        while not (stop and stop.is_set()):
            if not informer.changed(within=LOOK_SECONDS):
                continue
            now = informer.snapshot()
            if now is None:
                return
            yield now
            # The start of a large job is thousands of changes in a few seconds, of which each
            # snapshot takes all that have come.
            time.sleep(MIN_SECONDS)


class _Source(NamedTuple):
    """One collection; a refusal to read an optional one is only reported."""

    path: str
    query: Mapping[str, str]
    keep: Callable[[Json], bool] = lambda _: True
    optional: bool = False


class _Informer:
    """A job and what belongs to it, kept up to date while the `with` block lasts."""

    def __init__(self, transport: Transport, ref: JobRef) -> None:
        self._transport, self._ref = transport, ref
        meta = {"name": ref.name, "namespace": ref.namespace, "uid": ref.uid}
        target = of_kind(ref.kind)
        self._about = {"kind": target.kind, "metadata": meta}
        events = path("events", ref.namespace)
        own_events = {"fieldSelector": f"involvedObject.uid={ref.uid}"}
        warnings = {"fieldSelector": "involvedObject.kind=Pod,type=Warning"}
        by_name = {"fieldSelector": f"metadata.name={ref.name}"}

        def below(event: Json) -> bool:  # perhaps; the job is needed to know
            about = Object(event).part("involvedObject")
            return str(about.get("name", "")).startswith(ref.name)

        self._sources = {
            "job": _Source(job_path(target, ref.namespace), by_name),
            "pods": _Source(
                path("pods", ref.namespace), {"labelSelector": target.pods.selector(ref.name)}
            ),
            "the job's events": _Source(events, own_events, optional=True),
            "the pods' events": _Source(events, warnings, keep=below, optional=True),
        }
        # Names of sources are words of the message that one cannot be read.
        self._children = [f"its {child.kind}" for child in target.levels]
        below_selectors = events_below(target, ref.name)
        levels = zip(self._children, target.levels, below_selectors, strict=True)
        for name, child, selector in levels:
            named = {"fieldSelector": f"metadata.name={ref.name}{child.suffix}"}
            self._sources[name] = _Source(child.path(ref.namespace), named, optional=True)
            selected = {"fieldSelector": selector}
            self._sources[f"{name}'s events"] = _Source(events, selected, keep=below, optional=True)
        self._news = threading.Condition()
        self._stop = threading.Event()
        self._begun = time.monotonic()
        # All of the following under the condition's lock.
        self._objects: dict[str, dict[str, Json]] = {name: {} for name in self._sources}
        self._unsynced = set(self._sources)
        self._lost: set[str] = set()
        self._lost_at = 0.0
        self._notices: list[Json] = []
        self._error: BaseException | None = None
        self._changed = True

    def __enter__(self) -> Self:
        for name in self._sources:
            threading.Thread(target=self._run, args=(name,), name=name, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()  # the threads end by themselves; one may still wait for an answer

    def changed(self, within: float) -> bool:
        """Whether all is listed, and anything is new since the last call; waits for it so long."""
        with self._news:
            # A predicate: other threads change what it asks while this one waits.
            if not self._news.wait_for(
                lambda: self._error or (self._changed and self._ready()), within
            ):
                return False
            if self._error:
                raise self._error
            self._changed = False
            return True

    def snapshot(self) -> Snapshot | None:
        """The job as it is known; None: it is gone."""
        with self._news:
            by_source = {name: list(objects.values()) for name, objects in self._objects.items()}
            notices = tuple(self._notices)
        # A new job of the same name is another job: this one is gone.
        raw = next((raw for raw in by_source["job"] if Object(raw).uid == self._ref.uid), None)
        if raw is None:
            return None
        job = of_kind(self._ref.kind).job(raw)
        refuse_excess(job)
        below_sources = ["the pods' events", *(f"{name}'s events" for name in self._children)]
        perhaps_below = (event for name in below_sources for event in by_source[name])
        below = (event for event in perhaps_below if is_below(job, event))
        events = (*in_time([*by_source["the job's events"], *below]), *notices)
        children = [child for name in self._children for child in by_source[name]]
        pods = own_pods(job, by_source["pods"], children)
        current = Snapshot(with_child(job, children), pods, events, skew=self._transport.skew)
        return with_groups(self._transport, job.namespace, [current])[0]

    def _ready(self) -> bool:
        # A first snapshot without Pods would show a running job as one that has none. Events and
        # children may follow later; they are waited for a second at most.
        needed = {name for name in self._unsynced if not self._sources[name].optional}
        late = time.monotonic() - self._begun > OPTIONAL_SECONDS
        return not needed if late else not self._unsynced

    def _run(self, name: str) -> None:
        source = self._sources[name]
        try:
            for change in reflect(
                self._transport, source.path, source.query, stop=self._stop, keep=source.keep
            ):
                with self._news:
                    self._apply(name, change)
                    self._news.notify_all()
        except Exception as error:  # noqa: BLE001 - raised by `changed`
            with self._news:
                self._fail(name, error)
                self._news.notify_all()

    def _apply(self, name: str, change: CollectionChange) -> None:
        match change.kind:
            case Kind.ADDED | Kind.MODIFIED:
                self._objects[name][Object(change.object).uid] = change.object
            case Kind.DELETED:
                self._objects[name].pop(Object(change.object).uid, None)
            case Kind.SYNCED:
                self._unsynced.discard(name)
            case Kind.LOST:
                if not self._lost:
                    self._lost_at = time.monotonic()
                    why = change.why and change.why.detail
                    message = f"the connection to the cluster is lost ({why}); trying again"
                    self._notice("ConnectionLost", message)
                self._lost.add(name)
            case Kind.RESTORED:
                self._lost.discard(name)
                if not self._lost:
                    seconds = time.monotonic() - self._lost_at
                    message = f"the connection to the cluster is back after {seconds:.0f} s"
                    self._notice("ConnectionRestored", message)
        self._changed = True

    def _fail(self, name: str, error: Exception) -> None:
        if not (self._sources[name].optional and isinstance(error, ApiError)):
            self._error = self._error or error
            return
        self._unsynced.discard(name)
        self._lost.discard(name)
        # Who may not read Events has several such sources: one line says it.
        if not any(notice["reason"] == "NotReadable" for notice in self._notices):
            self._notice("NotReadable", f"{name} cannot be read: {error}")
        self._changed = True

    def _notice(self, reason: str, message: str) -> None:
        """A warning of the job about the connection."""
        now = datetime.now(UTC)
        self._notices.append(new_event(self._about, "Warning", reason, message, now))

"""Views of Kubernetes objects: metadata, conditions, pods, events; the labels of k8sjob. Pure."""

from __future__ import annotations

import re
import uuid
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from k8sjob.contract import CONTAINER_NAMES, Reason

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    Trim = Callable[["Json"], "Json"]
    """Makes of an object what is kept of it."""


Json = dict[str, Any]
"""A Kubernetes object, as parsed from JSON."""


_NAME: Final = re.compile(r"\w[\w.:-]{0,252}", re.ASCII)
_LONG_AGO: Final = datetime.fromtimestamp(0, UTC)
_YEARS: Final = (1900, 2999)
"""A clock that is lost may show other years; with days added or taken away they stay a date."""


def at_path(value: Any, *path: str | int) -> Any:
    """The value at a path of keys and indexes in JSON of any shape; None if there is none."""
    for key in path:
        if isinstance(key, int):
            value = value[key] if isinstance(value, list) and key < len(value) else None
        else:
            value = value.get(key) if isinstance(value, dict) else None
    return value


def mappings(value: Any) -> list[Json]:
    """The mappings in a list; none where there is no list."""
    return [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []


def is_name(text: object) -> bool:
    """Whether it may be a name in Kubernetes, or none.

    Only such a name becomes a part of a path, or a word of a command to paste.
    """
    return not text or (isinstance(text, str) and _NAME.fullmatch(text) is not None)


def odd_name(item: Json) -> str:
    """A name in an object that is none in Kubernetes; empty if there is none."""
    view = Object(item)
    meta = view.part("details" if item.get("kind") == "Status" else "metadata")
    names = [*(meta.get(key) for key in ("name", "namespace", "uid")), view.spec.get("nodeName")]
    return next((ascii(name) for name in names if not is_name(name)), "")


def differing(
    first: Any, second: Any, at: tuple[str | int, ...] = ()
) -> Iterator[tuple[str | int, ...]]:
    """The paths at which two JSON values differ, as deep as both have the same shape."""
    if isinstance(first, dict) and isinstance(second, dict):
        for key in sorted({*first, *second}):
            yield from differing(first.get(key), second.get(key), (*at, key))
    elif isinstance(first, list) and isinstance(second, list) and len(first) == len(second):
        for index, pair in enumerate(zip(first, second, strict=True)):
            yield from differing(*pair, (*at, index))
    elif first != second:
        yield at


class Condition(NamedTuple):
    """A condition of an object; one that is not there is neither true nor false, and empty."""

    status: str = ""
    reason: str = ""
    message: str = ""
    changed: str = ""
    """Its lastTransitionTime."""

    def __bool__(self) -> bool:
        return bool(self.status)

    @property
    def since(self) -> datetime | None:
        """When it changed last; None if that is not known."""
        return moment(self.changed)

    @property
    def true(self) -> bool:
        """Whether its status is "True"."""
        return self.status == "True"

    @property
    def false(self) -> bool:
        """Whether its status is "False"; "Unknown" is neither."""
        return self.status == "False"


@dataclass(frozen=True, slots=True)
class Object:
    """Any object: what is missing in it reads as empty.

    Attributes:
        raw: the object, as parsed from JSON.
    """

    raw: Json

    def part(self, *path: str) -> Json:
        """The mapping at a path of keys; empty if there is none."""
        value = at_path(self.raw, *path)
        return value if isinstance(value, dict) else {}

    @property
    def metadata(self) -> Json:
        """Its metadata."""
        return self.part("metadata")

    @property
    def name(self) -> str:
        """metadata.name."""
        return str(self.metadata.get("name") or "")

    @property
    def namespace(self) -> str:
        """metadata.namespace."""
        return str(self.metadata.get("namespace") or "")

    @property
    def uid(self) -> str:
        """metadata.uid."""
        return str(self.metadata.get("uid") or "")

    @property
    def labels(self) -> dict[str, str]:
        """metadata.labels."""
        return self.part("metadata", "labels")

    @property
    def annotations(self) -> dict[str, str]:
        """metadata.annotations."""
        return self.part("metadata", "annotations")

    @property
    def owners(self) -> list[Json]:
        """metadata.ownerReferences."""
        return self.metadata.get("ownerReferences") or []

    @property
    def created(self) -> str:
        """metadata.creationTimestamp, RFC 3339."""
        return str(self.metadata.get("creationTimestamp") or "")

    @property
    def deleting(self) -> bool:
        """Whether its deletion was asked for."""
        return bool(self.metadata.get("deletionTimestamp"))

    def condition(self, kind: str) -> Condition:
        """The condition of that type, true or not; empty if there is none."""
        for condition in self.status.get("conditions") or ():
            if condition.get("type") == kind:
                keys = ("status", "reason", "message", "lastTransitionTime")
                return Condition(*(condition.get(key) or "" for key in keys))
        return Condition()

    @property
    def spec(self) -> Json:
        """Its spec."""
        return self.part("spec")

    @property
    def status(self) -> Json:
        """Its status."""
        return self.part("status")


class Pod(Object):
    """A Pod, and the status of its training container."""

    __slots__ = ()

    @property
    def phase(self) -> str:
        """status.phase; "Pending" before there is one."""
        return str(self.status.get("phase") or "Pending")

    @property
    def live(self) -> bool:
        """Whether it has neither succeeded nor failed."""
        return self.phase not in {"Succeeded", "Failed"}

    @property
    def node(self) -> str:
        """The name of its node; empty before it is scheduled."""
        return str(self.spec.get("nodeName") or "")

    @property
    def main(self) -> Json:
        """The training container as it is asked for; of several unknown ones as kubectl chooses."""
        asked = self.spec.get("containers") or []
        default = self.annotations.get("kubectl.kubernetes.io/default-container")
        named = (container for container in asked if container.get("name") == default)
        return training(asked) or next(named, next(iter(asked), {}))

    @property
    def container(self) -> Object:
        """The status of the training container; empty before the kubelet has written it."""
        statuses = self.status.get("containerStatuses") or []
        named = (status for status in statuses if status.get("name") == self.main.get("name"))
        return Object(training(statuses) or next(named, {}))

    @property
    def restarts(self) -> int:
        """The container's restart count."""
        return int(self.container.raw.get("restartCount", 0))

    @property
    def terminated(self) -> Json:
        """The end of the container; empty while it runs, or waits to be started again."""
        return self.container.part("state", "terminated")

    @property
    def terminated_before(self) -> Json:
        """The end of the previous start; empty if there was none."""
        return self.container.part("lastState", "terminated")

    @property
    def preflight_refusals(self) -> dict[str, str]:
        """The nodes that a preflight refused in its last start or the one before, each with why."""
        ends = (self.terminated_before, self.terminated)
        reasons = [Reason.decode(str(end.get("message") or "")) for end in ends]
        # Every rank ends with the same reason, so one Pod of the job tells.
        return {node: reason.message for reason in reasons if reason for node in reason.nodes}

    @property
    def failed_inits(self) -> Iterator[tuple[Object, Json]]:
        """The statuses of init containers that fail, each with its last end."""
        # A sidecar is an init container that keeps running beside the training; once it has
        # started, its restarts are not failures.
        sidecars = {
            container.get("name")
            for container in self.spec.get("initContainers") or ()
            if container.get("restartPolicy") == "Always"
        }
        for status in map(Object, self.status.get("initContainerStatuses") or ()):
            now, before = (status.part(key, "terminated") for key in ("state", "lastState"))
            ended = now if now.get("exitCode") else before
            over = now.get("exitCode") == 0
            trains = status.raw.get("name") in sidecars and status.raw.get("started")
            if ended.get("exitCode") and not over and not trains:
                yield status, ended


def without_managed_fields(item: Json) -> Json:
    """The object itself, rid of its managedFields and of kubectl's, which are often half of it."""
    Object(item).metadata.pop("managedFields", None)
    Object(item).annotations.pop("kubectl.kubernetes.io/last-applied-configuration", None)
    return item


def outline(item: Json) -> Json:
    """The same, with name, image and environment alone of the containers in its templates."""
    _shorten_pods(item.get("spec"))
    return without_managed_fields(item)


def _shorten_pods(part: Any) -> None:
    if isinstance(part, dict) and "containers" in part:
        for container in mappings(part["containers"]):
            _leave(container, {"name", "image", "env"})
        _leave(part, {"containers", "restartPolicy"})
    elif isinstance(part, dict | list):
        for value in part.values() if isinstance(part, dict) else part:
            _shorten_pods(value)


def _leave(part: Json, names: set[str]) -> None:
    for name in part.keys() - names:
        del part[name]


# --- conditions -----------------------------------------------------------------------------------


def true_conditions(status: Json) -> dict[str, Json]:
    """The true conditions of a status by type; their order has no meaning."""
    conditions = status.get("conditions") or ()
    return {str(c.get("type")): c for c in conditions if c.get("status") == "True"}


# --- times and events -----------------------------------------------------------------------------


def moment(timestamp: str | None) -> datetime | None:
    """A timestamp of the apiserver; None for none, and for one that no calendar has.

    Who writes an Event may choose the year 0, and Go's own zero is the year 1: no time either.
    """
    try:
        time = datetime.fromisoformat(timestamp or "")
    except ValueError:
        return None
    return time if time.tzinfo and _YEARS[0] <= time.year <= _YEARS[1] else None


def stamp(now: datetime) -> str:
    """A timestamp as the apiserver writes it: RFC 3339 in UTC, whole seconds."""
    return now.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def event_time(event: Json) -> datetime:
    """When an Event last happened; 1970 where it has no time.

    Which of its times is kept up to date depends on the API through which it was recorded, and the
    scheduler's have an eventTime alone.
    """
    series = event.get("series") or {}
    last = filter(None, map(moment, (series.get("lastObservedTime"), event.get("lastTimestamp"))))
    first = event.get("eventTime") or event.get("firstTimestamp") or Object(event).created
    return max(last, default=None) or moment(first) or _LONG_AGO


def in_time(events: Iterable[Json]) -> tuple[Json, ...]:
    """Events, oldest first."""
    return tuple(sorted(events, key=event_time))


def new_event(about: Json, kind: str, reason: str, message: str, now: datetime) -> Json:
    """An Event as an apiserver would return it, "Normal" or "Warning"; its reason is CamelCase."""
    of, when, uid = Object(about), stamp(now), str(uuid.uuid4())
    return {
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": {
            "name": f"{of.name}.{uid[:8]}",
            "namespace": of.namespace,
            "uid": uid,
            "creationTimestamp": when,
        },
        "involvedObject": {"kind": about.get("kind", ""), "name": of.name, "uid": of.uid},
        "type": kind,
        "reason": reason,
        "message": message,
        "count": 1,
        "firstTimestamp": when,
        "lastTimestamp": when,
    }


# --- pods ---------------------------------------------------------------------------------------


def containers(pod: Json) -> list[Json]:
    """The containers of a Pod's spec, in the order in which they start."""
    return [*(pod.get("initContainers") or ()), *(pod.get("containers") or ())]


def training(items: Iterable[Json] | None) -> Json:
    """The training container among those of a Pod, or its status among their statuses.

    By its name, or the only one; empty if there are others alone.
    """
    every = list(items or ())
    named = {container.get("name"): container for container in every}
    # Jobs of others may call their only container anything; of several without a known name none
    # can be chosen.
    alone = every[0] if len(every) == 1 else {}
    return next((named[name] for name in CONTAINER_NAMES if name in named), alone)


# --- labels and annotations that k8sjob sets --------------------------------------------------

MANAGED_BY: Final = "app.kubernetes.io/managed-by"
"""A label with the value "k8sjob" on every job and on its pods."""
MANIFEST_DIGEST: Final = "k8sjob/manifest-sha256"
"""An annotation of the job, the hash of all that was rendered; equal hashes are equal jobs."""
IMAGE_ORIGIN: Final = "k8sjob/image-origin"
"""An annotation of the job: what its image was made of, see k8sjob.provenance."""
NOTIFY: Final = "k8sjob/notify"
"""An annotation of the job: what `k8sjob collect` sends messages about, as "failed,stalled"."""
ISTIO: Final = "sidecar.istio.io/inject"
"""An annotation of pods: "false" keeps a service mesh out of the ranks' connections."""
QUEUE: Final = "kueue.x-k8s.io/queue-name"
"""A label of the job, for Kueue: the queue in which it waits."""
PRIORITY: Final = "kueue.x-k8s.io/priority-class"
"""A label of the job, for Kueue: its WorkloadPriorityClass."""
REQUIRED_AFFINITY: Final = "requiredDuringSchedulingIgnoredDuringExecution"
"""The key of what a node must fulfil for a Pod."""
TOPOLOGY: Final = "kueue.x-k8s.io/podset-{}-topology"
"""An annotation of pods, for Kueue: the level, which is required or preferred."""
PODSET_GROUP: Final = "kueue.x-k8s.io/podset-group-name"
"""An annotation of pods, for Kueue: exactly two templates with the same one share a domain."""
RESERVED: Final = (
    "training.kubeflow.org/",
    "batch.kubernetes.io/",
    "jobset.sigs.k8s.io/",
    "trainer.kubeflow.org/",
)
"""How labels begin that controllers set on the pods of a job."""


def is_ours(item: Json) -> bool:
    """Whether k8sjob has made an object."""
    return Object(item).labels.get(MANAGED_BY) == "k8sjob"


def same_manifest(first: Json, second: Json) -> bool:
    """Whether two jobs were rendered from the same; false for one without the hash."""
    hashes = [Object(job).annotations.get(MANIFEST_DIGEST) for job in (first, second)]
    return hashes[0] is not None and hashes[0] == hashes[1]

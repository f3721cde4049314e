"""Normal form of a job, and the overlay that turns one into another."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Final

from k8sjob.contract import AGENT, CONFIG_ENV, after_agent
from k8sjob.kube.objects import (
    IMAGE_ORIGIN,
    MANAGED_BY,
    MANIFEST_DIGEST,
    QUEUE,
    Json,
    Object,
    at_path,
    mappings,
    training,
)
from k8sjob.kube.quantity import parse
from k8sjob.rendering.merge import list_key, merge
from k8sjob.spec.replicas import SHM_VOLUME
from k8sjob.targets.jobs import config_of, job_of
from k8sjob.targets.readers import reader_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

_OPTIONAL: Final = (
    "annotations args command env envFrom imagePullSecrets initContainers labels limits "
    "nodeSelector ports requests resources runPolicy schedulingPolicy securityContext "
    "tolerations topologySpreadConstraints volumeMounts volumes"
)
_EMPTY_IS_ABSENT: Final = frozenset(_OPTIONAL.split())
_REFERENCE: Final = re.compile(r"\$\$|\$\(([A-Za-z_.-][A-Za-z0-9_.-]*)\)")

_MARKS: Final = (
    ("labels", MANAGED_BY, "k8sjob"),
    ("annotations", MANIFEST_DIGEST, None),
    ("annotations", IMAGE_ORIGIN, None),
)
"""Metadata that k8sjob adds: the group, the key, and the value if another counts."""


def normal(manifest: Json, *, config: bool) -> Json:
    """A job with what its controller and Kubernetes fill in; the argument is not changed.

    Args:
        manifest: a job in the layout that k8sjob renders, whose fields have the right types.
        config: keep K8SJOB_CONFIG, which only k8sjob's runtime reads.
    """
    job: Json = _without_empty(manifest)
    _metadata(job)
    reader = reader_of(job)
    reader.settle(job)
    if QUEUE in Object(job).labels:  # Kueue's webhook does so
        job = merge(job, reader.target.suspension(value=True))
    for path in reader.quantities:
        _amounts(at_path(job, *path))
    for place in {role.path for role in job_of(job).replicas}:
        template = at_path(job, *place)
        _metadata(template)
        _pod(Object(template).spec, config=config)
    return job


def pods(manifest: Json) -> Iterator[tuple[str, Json]]:
    """Role and pod spec of each role, as they are in the manifest."""
    job = job_of(manifest)
    for role in job.replicas:
        yield role.role, Object(at_path(manifest, *role.path)).spec


def _without_empty(value: Any) -> Any:
    """A copy without nulls, and without what is empty if that is the same as absent."""
    if isinstance(value, dict):
        fields = {key: _without_empty(item) for key, item in value.items() if item is not None}
        return {k: v for k, v in fields.items() if v not in ({}, []) or k not in _EMPTY_IS_ABSENT}
    if isinstance(value, list):
        return [_without_empty(item) for item in value]
    return value


def _metadata(holder: Json) -> None:
    """Leave k8sjob's marks out of an object's or a template's metadata."""
    metadata = Object(holder).metadata
    for group, key, value in _MARKS:
        entries = metadata.get(group, {})
        if key in entries and value in (None, entries[key]):
            del entries[key]
        if entries == {}:
            metadata.pop(group, None)
    if not metadata:
        holder.pop("metadata", None)


def _pod(pod: Json, *, config: bool) -> None:
    # Kubernetes' deprecated name of serviceAccountName; the apiserver fills in both.
    alias = pod.pop("serviceAccount", None)
    if alias is not None:
        pod.setdefault("serviceAccountName", alias)
    pod.setdefault("automountServiceAccountToken", True)
    pod.setdefault("terminationGracePeriodSeconds", 30)
    _leave_out(pod, serviceAccountName="default", dnsPolicy="ClusterFirst", hostNetwork=False)
    _leave_out(pod, schedulerName="default-scheduler")
    containers = [*mappings(pod.get("containers")), *mappings(pod.get("initContainers"))]
    for container in containers:
        _container(container, config=config)
    trains = training(mappings(pod.get("containers")))
    if after_agent(trains.get("command") or []) == []:  # with -P or without
        trains["command"] = list(AGENT)
    for volume in mappings(pod.get("volumes")):
        _volume(volume)
    _rename_shm(pod, containers)


def _leave_out(holder: Json, **defaults: Any) -> None:
    """Remove fields that only state a default."""
    for key, default in defaults.items():
        if holder.get(key) == default and type(holder.get(key)) is type(default):
            del holder[key]


def _container(container: Json, *, config: bool) -> None:
    for key in ("command", "args"):
        if isinstance(words := container.get(key), list):
            container[key] = [
                _UNREPLACED.sub("$$(", word) if isinstance(word, str) else word for word in words
            ]
    _leave_out(container, terminationMessagePath="/dev/termination-log")
    # The log also appears in the pod's status: it changes nothing that runs.
    _leave_out(container, terminationMessagePolicy="FallbackToLogsOnError")
    if image := container.get("image"):
        container.setdefault("imagePullPolicy", default_pull_policy(image))
    if resources := container.get("resources"):
        _amounts(resources.get("limits"))
        _amounts(resources.get("requests"))
        # The apiserver's default: a limit without a request is also the request.
        if limits := resources.get("limits"):
            resources["requests"] = {**limits, **resources.get("requests", {})}
    for port in mappings(container.get("ports")):
        _leave_out(port, protocol="TCP")
    for mount in mappings(container.get("volumeMounts")):
        _leave_out(mount, readOnly=False)
    if env := _env(container.pop("env", []), config=config):
        container["env"] = env


def default_pull_policy(image: str) -> str:
    """The imagePullPolicy that Kubernetes uses for an image without one."""
    name = image.rpartition("/")[2]
    is_latest = "@" not in name and (":" not in name or name.endswith(":latest"))
    return "Always" if is_latest else "IfNotPresent"


def _amounts(holder: Json | None) -> None:
    if holder:
        amounts = {key: getattr(value, "text", None) or value for key, value in holder.items()}
        holder.update({key: _Amount(value) for key, value in amounts.items()})


_UNREPLACED: Final = re.compile(r"(?<!\$)\$\((?![A-Za-z_][\w.-]*\))")
"""A `$(` that names no variable, as in a shell: Kubernetes leaves it alone."""
_VOLUME_DEFAULTS: Final[dict[str, Json]] = {
    "emptyDir": {"medium": ""},
    "configMap": {"defaultMode": 0o644, "optional": False},
    "secret": {"defaultMode": 0o644, "optional": False},
    "hostPath": {"type": ""},
    "persistentVolumeClaim": {"readOnly": False},
}


def _volume(volume: Json) -> None:
    for kind, defaults in _VOLUME_DEFAULTS.items():
        _leave_out(volume.get(kind, {}), **defaults)
    if "sizeLimit" in (source := volume.get("emptyDir", {})):
        source["sizeLimit"] = _Amount(source["sizeLimit"])


def _rename_shm(pod: Json, containers: list[Json]) -> None:
    """Call the memory volume at /dev/shm as k8sjob does; a volume's name has no meaning."""
    mounts = [mount for c in containers for mount in mappings(c.get("volumeMounts"))]
    at_shm = {m.get("name") for m in mounts if m.get("mountPath") == "/dev/shm"}  # noqa: S108 - a mount point
    volumes = mappings(pod.get("volumes"))
    names = [volume.get("name") for volume in volumes]
    for volume in volumes:
        memory = at_path(volume, "emptyDir", "medium") == "Memory"
        if memory and volume.get("name") in at_shm and SHM_VOLUME not in names:
            for user in (volume, *(m for m in mounts if m.get("name") == volume["name"])):
                user["name"] = SHM_VOLUME
            return


def _env(variables: list[Any], *, config: bool) -> list[Any]:
    """Variables with only the last one of each name, and each value's references resolved."""
    if not config:
        variables = [v for v in variables if at_path(v, "name") != CONFIG_ENV]
    used = {n for v in variables for n in _references(at_path(v, "value"))}
    last = {at_path(variable, "name"): index for index, variable in enumerate(variables)}
    resolved: list[Any] = []
    defined: set[str] = set()
    for index, variable in enumerate(variables):
        name = at_path(variable, "name")
        # Of several with one name the last one counts, the others for references between them.
        if last[name] == index or name in used:
            resolved.append(_expanded(variable, defined))
        defined.add(str(name))
    return resolved


def _references(value: Any) -> Iterable[str]:
    return (name for name in _REFERENCE.findall(value) if name) if isinstance(value, str) else ()


def _expanded(variable: Any, defined: set[str]) -> Any:
    value = at_path(variable, "value")
    references = frozenset(_references(value))
    if not references:
        return variable
    text = _Expanded(value)
    text.defined = references & defined
    return {**variable, "value": text}


# --- values -------------------------------------------------------------------------------------


class _Amount(str):
    """A quantity as it was written, equal to every other way of writing the same value."""

    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, str) and _value(self) == _value(other)

    def __ne__(self, other: object) -> bool:
        return not self == other

    __hash__ = str.__hash__


class _Expanded(str):
    """A value with $(NAME) in it, and those names that are defined before it."""

    __slots__ = ("defined",)
    defined: frozenset[str]

    def __eq__(self, other: object) -> bool:
        defined: frozenset[str] = getattr(other, "defined", frozenset())
        return isinstance(other, str) and str(self) == str(other) and self.defined == defined

    def __ne__(self, other: object) -> bool:
        return not self == other

    __hash__ = str.__hash__


def _value(text: str) -> object:
    try:
        return parse(text)
    except ValueError:
        return str(text)


SAME: Final = object()
"""The result of `difference` for two values that mean the same."""
_ORDERED: Final = frozenset({"initContainers", "command", "args", "envFrom"})


def same_meaning(first: Json, second: Json) -> bool:
    """Whether two jobs make their controller do the same, k8sjob's own marks left aside."""
    return same(*normal_pair(first, second))


def normal_pair(first: Json, second: Json) -> tuple[Json, Json]:
    """Two jobs in normal form, with K8SJOB_CONFIG where both have it."""
    config = config_of(first) is not None and config_of(second) is not None
    return normal(first, config=config), normal(second, config=config)


def same(first: Any, second: Any) -> bool:
    """Whether two values in normal form mean the same."""
    return difference(first, second) is SAME


def aligned(base: Any, goal: Any, name: str = "") -> Any:
    """The first of two values in normal form, written as the second where both mean the same."""
    if difference(base, goal, name) is SAME:
        return goal
    if isinstance(base, dict) and isinstance(goal, dict):
        return {k: aligned(v, goal[k], k) if k in goal else v for k, v in base.items()}
    if isinstance(base, list) and isinstance(goal, list) and len(base) == len(goal):
        return [aligned(*pair) for pair in zip(base, goal, strict=True)]
    return base


def difference(base: Any, goal: Any, name: str = "") -> Any:
    """The overlay that turns one JSON value into another, or SAME.

    It is a patch for k8sjob.rendering.merge.merge: null deletes, lists whose items all have a
    name merge by it, other lists are replaced.

    Args:
        base: the value that is there.
        goal: the value that the merge shall give; without nulls.
        name: the key that the values stand under, which says whether an order has a meaning.
    """
    if isinstance(base, dict) and isinstance(goal, dict):
        return _mappings_differ(base, goal)
    if isinstance(base, list) and isinstance(goal, list):
        return _lists_differ(base, goal, name)
    same = isinstance(base, bool) == isinstance(goal, bool) and base == goal
    return SAME if same else goal


def _mappings_differ(base: Json, goal: Json) -> Any:
    patch: Json = {key: None for key in base if key not in goal}
    for key, value in goal.items():
        change = difference(base[key], value, key) if key in base else value
        if change is not SAME:
            patch[key] = change
    return patch or SAME


def _lists_differ(base: list[Any], goal: list[Any], name: str) -> Any:
    pairs = zip(base, goal, strict=False)
    if len(base) == len(goal) and all(difference(*pair) is SAME for pair in pairs):
        return SAME
    key = list_key(base, goal)
    if key is None or name in _ORDERED or not base or not goal:
        return goal
    items = {item[key]: item for item in base}
    names = {item[key] for item in goal}
    patch = [{key: gone, "$patch": "delete"} for gone in items if gone not in names]
    for item in goal:
        change = difference(items.get(item[key], {}), item)
        if change is not SAME:
            patch.append({key: item[key], **change})
    return patch or SAME

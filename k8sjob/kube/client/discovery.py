"""Kinds of objects by the words that people and ownerReferences have for them, as served.

What runs Pods in every cluster is known; any other kind is asked for, by its group where that is
given, else in all groups.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from k8sjob.errors import BackendError
from k8sjob.kube.api_resources import path
from k8sjob.kube.client.transport import ApiError
from k8sjob.kube.objects import Object

if TYPE_CHECKING:
    from collections.abc import Iterable

    from k8sjob.kube.client.transport import Transport
    from k8sjob.kube.objects import Json

_READERS: Final = 8


@dataclass(frozen=True, slots=True)
class Resource:
    """A kind of object in a namespace, as its apiserver calls it.

    Attributes:
        kind: "RayJob".
        plural: "rayjobs", in paths.
        api_version: "ray.io/v1".
        words: other names for the kind: the singular, short names.
    """

    kind: str
    plural: str
    api_version: str
    words: tuple[str, ...] = ()

    @property
    def group(self) -> str:
        """The group of its API; empty for Kubernetes' core."""
        return self.api_version.rpartition("/")[0]

    @property
    def word(self) -> str:
        """What a command line calls it: "deployment", "rayjobs.ray.io"."""
        return self.kind.lower() if self in BUILT_IN else f"{self.plural}.{self.group}"

    def path(self, namespace: str, name: str = "") -> str:
        """The path of one of its objects, or of all in a namespace."""
        version = self.api_version if self.group else ""
        return path(self.plural, namespace, name, api_version=version)

    def is_called(self, word: str) -> bool:
        """Whether a word in lower case names the kind."""
        names = (self.kind.lower(), self.plural, *self.words)
        return word in names or word in {f"{name}.{self.group}" for name in names}


POD: Final = Resource("Pod", "pods", "v1", ("po",))
BUILT_IN: Final = (
    POD,
    Resource("Job", "jobs", "batch/v1"),
    Resource("CronJob", "cronjobs", "batch/v1", ("cj",)),
    Resource("Deployment", "deployments", "apps/v1", ("deploy",)),
    Resource("StatefulSet", "statefulsets", "apps/v1", ("sts",)),
    Resource("DaemonSet", "daemonsets", "apps/v1", ("ds",)),
    Resource("ReplicaSet", "replicasets", "apps/v1", ("rs",)),
    Resource("ReplicationController", "replicationcontrollers", "v1", ("rc",)),
)
"""The kinds of every cluster that run Pods."""


def is_built_in(word: str) -> bool:
    """Whether a word names a kind that every cluster has, so that it needs no request."""
    return any(resource.is_called(word.lower()) for resource in BUILT_IN)


def is_selector(name: str) -> bool:
    """Whether it is a label selector and not a name."""
    return any(character in name for character in "=!,( ")


class Discovery:
    """The kinds that a cluster serves; each answer is kept."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._by_version: dict[str, list[Resource]] = {}
        self._by_word: dict[str, Resource | None] = {}

    def named(self, word: str) -> Resource | None:
        """The kind that a word names: "deploy", "rayjobs.ray.io"; None if none does.

        Raises:
            BackendError: kinds of several groups are called so.
            ApiError: the apiserver does not tell its kinds.
        """
        word = word.lower()
        if word not in self._by_word:
            self._by_word[word] = self._looked_up(word)
        return self._by_word[word]

    def _looked_up(self, word: str) -> Resource | None:
        head, _, group = word.partition(".")
        versions: Iterable[str] = ()
        if not is_built_in(word):
            versions = self._preferred(group)
        with ThreadPoolExecutor(_READERS) as pool:
            served = [*BUILT_IN, *(r for rs in pool.map(self._served, versions) for r in rs)]
        named = [resource for resource in dict.fromkeys(served) if resource.is_called(word)]
        if len(named) > 1:
            words = ", ".join(f"{resource.plural}.{resource.group}" for resource in named)
            raise BackendError(f"{head!r} is a kind of several groups; write one of {words}")
        return next(iter(named), None)

    def of(self, api_version: str, kind: str) -> Resource | None:
        """The kind of an object; None where it is not served, or not told."""
        for resource in BUILT_IN:
            if (resource.api_version, resource.kind) == (api_version, kind):
                return resource
        if api_version.count("/") != 1:
            return None
        with suppress(ApiError):
            return next((r for r in self._served(api_version) if r.kind == kind), None)
        return None

    def _preferred(self, group: str) -> list[str]:
        """The preferred version of a group, or of all groups for an empty name."""
        try:
            answer = self._transport.request("GET", f"/apis/{group}" if group else "/apis")
        except ApiError as error:
            if group and error.code in {403, 404}:
                return []
            raise
        groups = [answer] if group else answer.get("groups") or []
        versions = (Object(g).part("preferredVersion").get("groupVersion") for g in groups)
        return [str(version) for version in versions if version]

    def _served(self, api_version: str) -> list[Resource]:
        """The kinds of a version of a group that are in namespaces, without subresources."""
        if api_version not in self._by_version:
            answer = self._transport.request("GET", f"/apis/{api_version}")
            listed: list[Json] = answer.get("resources") or []
            self._by_version[api_version] = [
                Resource(
                    str(kind.get("kind")),
                    str(kind.get("name")),
                    api_version,
                    (str(kind.get("singularName")), *(kind.get("shortNames") or ())),
                )
                for kind in listed
                if kind.get("namespaced") and "/" not in str(kind.get("name"))
            ]
        return self._by_version[api_version]

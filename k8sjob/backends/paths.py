"""Where the apiserver keeps which objects: paths made, and read again for messages."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final
from urllib.parse import quote, unquote, urlencode

from k8sjob.errors import BackendError

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["JOBS", "Target", "path", "with_query"]

JOBS: Final = "pytorchjobs"

_GROUPS: Final = {
    JOBS: "kubeflow.org/v1",
    "customresourcedefinitions": "apiextensions.k8s.io/v1",
    "deployments": "apps/v1",
    "storageclasses": "storage.k8s.io/v1",
    "selfsubjectaccessreviews": "authorization.k8s.io/v1",
    "localqueues": "kueue.x-k8s.io/v1beta1",
    "priorityclasses": "scheduling.k8s.io/v1",
    "runtimeclasses": "node.k8s.io/v1",
    "workloads": "kueue.x-k8s.io/v1beta1",
}


def path(resource: str, namespace: str = "", name: str = "", subresource: str = "") -> str:
    """The path of a resource, of one object, or of a part of it.

    Args:
        resource: in the plural, as "pods"; its API group is known here.
        namespace: empty for all of them, or for what has none.
        name: of the object; empty: the collection.
        subresource: as "log".

    Raises:
        BackendError: a part that a client on the way would take for a step, as "..".
    """
    if dots := {".", ".."} & {namespace, name}:
        raise BackendError(f"{dots.pop()!r} is no name of a namespace or of an object")
    group = _GROUPS.get(resource)
    parts = ["apis", *group.split("/")] if group else ["api", "v1"]
    parts += ["namespaces", namespace] if namespace else []
    parts += [resource, name, subresource]
    return "/" + "/".join(quote(part, safe="") for part in parts if part)


def with_query(path: str, query: Mapping[str, str] | None) -> str:
    """A path with its parameters, which are not encoded yet."""
    return f"{path}?{urlencode(query)}" if query else path


@dataclass(frozen=True, slots=True)
class Target:
    """What a path speaks of; empty where it does not say.

    Attributes:
        group: the API group, empty for the core.
        version: its version.
        resource: in the plural.
        namespace: the object's namespace.
        name: the object's name.
        subresource: a part of it.
    """

    group: str = ""
    version: str = ""
    resource: str = ""
    namespace: str = ""
    name: str = ""
    subresource: str = ""

    @classmethod
    def of(cls, path: str) -> Target:
        """The inverse of `path`, for any group."""
        _, root, *parts = path.split("/")
        group = parts.pop(0) if root == "apis" and parts else ""
        version, *parts = [*map(unquote, parts), ""]
        namespace = ""
        if len(parts) > 3 and parts[0] == "namespaces":
            namespace, parts = parts[1], parts[2:]
        resource, name, subresource, *_ = [*parts, "", "", ""]
        return cls(group, version, resource, namespace, name, subresource)

    def __str__(self) -> str:
        kind = f"{self.resource}/{self.subresource}" if self.subresource else self.resource
        named = f"{kind} {self.name!r}" if self.name else kind
        return f"{named} in namespace {self.namespace}" if self.namespace else named

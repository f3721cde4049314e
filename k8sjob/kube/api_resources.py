"""API resources: the paths of their objects, those that a Pod refers to, and foreign kinds."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple
from urllib.parse import quote, unquote, urlencode

from k8sjob.errors import BackendError
from k8sjob.kube.objects import at_path, containers

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from k8sjob.kube.objects import Json

_GROUPS: Final = {
    "customresourcedefinitions": "apiextensions.k8s.io/v1",
    "deployments": "apps/v1",
    "storageclasses": "storage.k8s.io/v1",
    "selfsubjectaccessreviews": "authorization.k8s.io/v1",
    "clusterqueues": "kueue.x-k8s.io/v1beta2",
    "queues": "scheduling.volcano.sh/v1beta1",
    "localqueues": "kueue.x-k8s.io/v1beta2",
    "priorityclasses": "scheduling.k8s.io/v1",
    "runtimeclasses": "node.k8s.io/v1",
    "workloadpriorityclasses": "kueue.x-k8s.io/v1beta2",
    "workloads": "kueue.x-k8s.io/v1beta2",
}


class Controller(NamedTuple):
    """The controller of a kind of object.

    Attributes:
        kind: of these objects.
        name: the controller, in a sentence.
        missing: the next step if the cluster does not have the kind.
        webhooks: how the names of its admission webhooks end; empty: it has none.
        deployment: the label selector of its Deployment and of its Pods; empty: it is part of
            Kubernetes.
        namespace: where it is installed by default.
        delay: after how many seconds at most it replaces a Pod, where it waits with that.
        init_image: the image of the init container that it adds to some Pods.
        image_flag: its flag for another one.
        template_flag: its flag for a template of that container.
        gang_flag: its flag without which it ignores what a job asks of a gang scheduler.
        target: the name of the kind as a target, where doctor examines another by default.
        companions: the resource of the objects that stand beside those of the kind.
        newest: a pattern of the fields that k8sjob renders and an older controller lacks.
    """

    kind: str
    name: str
    missing: str
    webhooks: str = ""
    deployment: str = ""
    namespace: str = ""
    delay: int = 0
    init_image: str = ""
    image_flag: str = ""
    template_flag: str = ""
    gang_flag: str = ""
    target: str = ""
    companions: str = ""
    newest: str = ""


def path(
    resource: str,
    namespace: str = "",
    name: str = "",
    subresource: str = "",
    *,
    api_version: str = "",
) -> str:
    """The path of a resource, of one object, or of a part of it.

    Args:
        resource: in the plural, as "pods".
        namespace: empty for all of them, or for what has none.
        name: of the object; empty: the collection.
        subresource: as "log".
        api_version: of a resource that is not Kubernetes' own.

    Raises:
        BackendError: a name that is a step of a path, as "..".
    """
    # Percent-encoding leaves dots as they are, and clients and proxies resolve such steps: the
    # request would be for another object.
    if dots := {".", ".."} & {namespace, name}:
        raise BackendError(f"{dots.pop()!r} is not the name of a namespace or of an object")
    group = api_version or _GROUPS.get(resource)
    parts = ["apis", *group.split("/")] if group else ["api", "v1"]
    parts += ["namespaces", namespace] if namespace else []
    parts += [resource, name, subresource]
    return "/" + "/".join(quote(part, safe="") for part in parts if part)


def with_query(path: str, query: Mapping[str, str] | None) -> str:
    """A path with its parameters, which are not encoded yet."""
    return f"{path}?{urlencode(query)}" if query else path


class Resource(NamedTuple):
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


def is_selector(name: str) -> bool:
    """Whether it is a label selector and not a name."""
    return any(character in name for character in "=!,( ")


class ResourcePath(NamedTuple):
    """The parts of a path; empty if it has none. The core API has no group."""

    group: str = ""
    version: str = ""
    resource: str = ""
    namespace: str = ""
    name: str = ""
    subresource: str = ""

    @classmethod
    def of(cls, path: str) -> ResourcePath:
        """The inverse of `path`, for any group."""
        _, root, *parts = path.split("/")
        group = parts.pop(0) if root == "apis" and parts else ""
        version, *parts = [*map(unquote, parts), ""]
        namespace = ""
        # /namespaces/NAME is a Namespace itself; with more parts it is the place of another
        # resource.
        if len(parts) > 3 and parts[0] == "namespaces":
            namespace, parts = parts[1], parts[2:]
        resource, name, subresource, *_ = [*parts, "", "", ""]
        return cls(group, version, resource, namespace, name, subresource)

    @property
    def plural(self) -> str:
        """With its group, which other kinds of this plural do not have: "jobs.batch"."""
        return f"{self.resource}.{self.group}"

    def __str__(self) -> str:
        kind = f"{self.resource}/{self.subresource}" if self.subresource else self.resource
        named = f"{kind} {self.name!r}" if self.name else kind or f"the kinds of {self.group}"
        return f"{named} in namespace {self.namespace}" if self.namespace else named


_RESOURCES: Final = {
    "service account": "serviceaccounts",
    "secret": "secrets",
    "pull secret": "secrets",
    "config map": "configmaps",
    "claim": "persistentvolumeclaims",
    "priority class": "priorityclasses",
    "runtime class": "runtimeclasses",
    "queue": "localqueues",
    "workload priority class": "workloadpriorityclasses",
}
OF_THE_CLUSTER: Final = frozenset({"priority class", "runtime class", "workload priority class"})
"""The kinds of references to what is of no namespace."""


class ObjectReference(NamedTuple):
    """An object that a job needs, its kind in plain words: "secret", "claim"."""

    kind: str
    name: str

    def __str__(self) -> str:
        return f"{self.kind} {self.name}"

    @property
    def resource(self) -> str:
        """Its resource at the apiserver, in the plural."""
        return _RESOURCES[self.kind]

    def path(self, namespace: str) -> str:
        """Its path at the apiserver."""
        return path(self.resource, "" if self.kind in OF_THE_CLUSTER else namespace, self.name)


def references_of(pod: Json) -> Iterator[ObjectReference]:
    """The objects that a Pod's spec names and that must exist for it to start."""
    for kind, key in (
        ("service account", "serviceAccountName"),
        ("priority class", "priorityClassName"),
        ("runtime class", "runtimeClassName"),
    ):
        if pod.get(key):
            yield ObjectReference(kind, pod[key])
    for secret in pod.get("imagePullSecrets") or ():
        yield ObjectReference("pull secret", secret.get("name", ""))
    for volume in pod.get("volumes") or ():
        yield from _of_volume(volume)
    for container in containers(pod):
        for source in container.get("envFrom") or ():
            yield from _named(source, ("secret", "secretRef"), ("config map", "configMapRef"))
        for variable in container.get("env") or ():
            source = variable.get("valueFrom") or {}
            yield from _named(source, ("secret", "secretKeyRef"), ("config map", "configMapKeyRef"))


def _of_volume(volume: Json) -> Iterator[ObjectReference]:
    yield from _named(volume, ("claim", "persistentVolumeClaim"), field="claimName")
    yield from _named(volume, ("secret", "secret"), field="secretName")
    yield from _named(volume, ("config map", "configMap"))
    for source in (volume.get("projected") or {}).get("sources") or ():
        yield from _named(source, ("secret", "secret"), ("config map", "configMap"))


def _named(source: Json, *kinds: tuple[str, str], field: str = "name") -> Iterator[ObjectReference]:
    """References of the form `{configMapRef: {name: NAME}}`."""
    for kind, key in kinds:
        named = source.get(key)
        # Pods start without an optional Secret or ConfigMap.
        if named and not named.get("optional"):
            yield ObjectReference(kind, named.get(field, ""))


def foreign_kind(item: Any) -> str:
    """What an object is that runs programs and is no job for k8sjob; empty for any other."""
    group = str(at_path(item, "apiVersion")).partition("/")[0]
    text = _foreign_kinds()["kinds"].get(f"{at_path(item, 'kind')} {group}", "")
    return text.format(**_foreign_kinds()["steps"])


@cache
def _foreign_kinds() -> dict[str, dict[str, str]]:
    import tomllib  # noqa: PLC0415 - only for manifests of others

    file = Path(__file__).with_name("foreign_kinds.toml")
    return tomllib.loads(file.read_text(encoding="utf-8"))

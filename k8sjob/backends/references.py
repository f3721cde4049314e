"""The objects that a PyTorchJob's pods name, and the paths where they are. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from k8sjob.backends.paths import path
from k8sjob.labels import QUEUE

if TYPE_CHECKING:
    from collections.abc import Iterator

    from k8sjob.backends.api import Json

__all__ = ["Reference", "containers", "pod_specs", "references"]

_RESOURCES: Final = {
    "service account": "serviceaccounts",
    "secret": "secrets",
    "pull secret": "secrets",
    "config map": "configmaps",
    "claim": "persistentvolumeclaims",
    "priority class": "priorityclasses",
    "runtime class": "runtimeclasses",
    "queue": "localqueues",
}
_OF_THE_CLUSTER: Final = frozenset({"priority class", "runtime class"})


@dataclass(frozen=True, slots=True)
class Reference:
    """An object that a job needs beside itself.

    Attributes:
        kind: "secret", "claim", ... in plain words.
        name: its name.
    """

    kind: str
    name: str

    def __str__(self) -> str:
        return f"{self.kind} {self.name}"

    @property
    def resource(self) -> str:
        """What the apiserver calls its kind, in the plural."""
        return _RESOURCES[self.kind]

    def path(self, namespace: str) -> str:
        """Where the apiserver has it."""
        return path(self.resource, "" if self.kind in _OF_THE_CLUSTER else namespace, self.name)


def pod_specs(job: Json) -> Iterator[tuple[str, int, Json]]:
    """Each role of a PyTorchJob: its name, how many replicas it has, and their Pods' spec."""
    for role, replica in ((job.get("spec") or {}).get("pytorchReplicaSpecs") or {}).items():
        yield role, replica.get("replicas") or 1, (replica.get("template") or {}).get("spec") or {}


def containers(pod: Json) -> list[Json]:
    """The containers of a Pod's spec, in the order in which they start."""
    return [*(pod.get("initContainers") or ()), *(pod.get("containers") or ())]


def references(job: Json) -> list[Reference]:
    """Everything that has to be there for the job's Pods to start, each once.

    What is marked as optional is left out.
    """
    found: dict[Reference, None] = {}
    queue = ((job.get("metadata") or {}).get("labels") or {}).get(QUEUE)
    if queue:
        found[Reference("queue", queue)] = None
    for _, _, pod in pod_specs(job):
        found |= dict.fromkeys(_of_pod(pod))
    return [one for one in found if one.name not in {"", ".", ".."}]


def _of_pod(pod: Json) -> Iterator[Reference]:
    for kind, key in (
        ("service account", "serviceAccountName"),
        ("priority class", "priorityClassName"),
        ("runtime class", "runtimeClassName"),
    ):
        if pod.get(key):
            yield Reference(kind, pod[key])
    for secret in pod.get("imagePullSecrets") or ():
        yield Reference("pull secret", secret.get("name", ""))
    for volume in pod.get("volumes") or ():
        yield from _of_volume(volume)
    for container in containers(pod):
        for source in container.get("envFrom") or ():
            yield from _named(source, ("secret", "secretRef"), ("config map", "configMapRef"))
        for variable in container.get("env") or ():
            source = variable.get("valueFrom") or {}
            yield from _named(source, ("secret", "secretKeyRef"), ("config map", "configMapKeyRef"))


def _of_volume(volume: Json) -> Iterator[Reference]:
    claim = volume.get("persistentVolumeClaim")
    if claim:
        yield Reference("claim", claim.get("claimName", ""))
    secret = volume.get("secret")
    if secret and not secret.get("optional"):
        yield Reference("secret", secret.get("secretName", ""))
    yield from _named(volume, ("config map", "configMap"))
    for source in (volume.get("projected") or {}).get("sources") or ():
        yield from _named(source, ("secret", "secret"), ("config map", "configMap"))


def _named(source: Json, *kinds: tuple[str, str]) -> Iterator[Reference]:
    """References of the form `{configMapRef: {name: NAME}}`."""
    for kind, key in kinds:
        named = source.get(key)
        if named and not named.get("optional"):
            yield Reference(kind, named.get("name", ""))

"""The facts about a job of any kind that checks use; values of a wrong type count as absent."""

from __future__ import annotations

import re
import shlex
from functools import cached_property
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from k8sjob.findings import Finding
from k8sjob.kube.capacity import counts_gpus
from k8sjob.kube.objects import Json, at_path, training
from k8sjob.targets.api import Job, RoleReplicas

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from k8sjob.contract import Role
    from k8sjob.findings import FieldPath
    from k8sjob.targets.api import Target

_SHELLS: Final = frozenset({"sh", "bash", "ash", "dash", "zsh", "ksh", "env"})
_PYTHON: Final = re.compile(r"(pypy|python)\d*(\.\d+)?")
_LAUNCHERS: Final = re.compile(
    r"torchrun|torch\.distributed\.(run|launch)|accelerate|deepspeed|k8sjob|horovodrun|mpirun|mpiexec"
    r"|colossalai|composer|torchx|ray\b|lightning"
)
_FLAG_ONLY: Final = frozenset({"--standalone", "--no-python", "--module", "-m", "--run-path"})


class ManifestContainer(NamedTuple):
    """One container and its path."""

    path: FieldPath
    data: Json

    @property
    def name(self) -> str:
        """Its name, or empty."""
        return str(self.data.get("name") or "")

    @property
    def command(self) -> list[str]:
        """Its own command; empty if the image's entrypoint runs."""
        return [str(word) for word in self.items("command")]

    def items(self, field: str) -> list[Any]:
        """The items of a field: command, args, env, ports, volumeMounts."""
        return list(self.data.get(field, ()))

    @property
    def argv(self) -> list[str]:
        """Command and arguments; without a command the arguments of an unknown program."""
        return [*self.command, *(str(word) for word in self.items("args"))]

    @property
    def is_shell(self) -> bool:
        """Whether a shell reads the arguments."""
        return any(PurePosixPath(word).name in _SHELLS for word in self.command[:3])

    @property
    def gpus(self) -> list[str]:
        """The resources among its limits and requests that count GPUs."""
        resources = self.data.get("resources")
        names = {n for group in ("limits", "requests") for n in at_path(resources, group) or ()}
        return sorted(filter(counts_gpus, names))


class ManifestReplica(RoleReplicas):
    """Replicas of one Pod template, with its containers.

    Their role is "Pod" where there are no roles, and they are one where their number is not known.
    """

    def containers(self, kind: str = "containers") -> list[ManifestContainer]:
        """Its containers, or its `initContainers`."""
        return [
            ManifestContainer((*self.path, "spec", kind, index), item)
            for index, item in enumerate(self.pod.get(kind, ()))
        ]

    @property
    def trainer(self) -> ManifestContainer | None:
        """The container that trains."""
        containers = self.containers()
        trains = training(container.data for container in containers)
        return next((c for c in containers if trains and c.data is trains), None)


class ManifestJob:
    """A job, or an object beside it that has its Pod templates.

    Attributes:
        target: its kind.
        data: the object, without fields of a wrong type.
        wrong: those fields.
        place: line and column of a path in it, in the file that the user edits.
        rendered: whether that file is a job.yaml, which this is rendered from.
        base: the image that the job's own is made from; empty if that is not known.
    """

    rendered = False
    base = ""

    def __init__(
        self, target: Target, data: Json, place: Callable[[FieldPath], tuple[int, int]]
    ) -> None:
        self.target, self.place = target, place
        self.data, self.wrong = target.typed(data)

    @cached_property
    def as_job(self) -> Job:
        """The object as a job."""
        return self.target.job(self.data)

    def at(self, path: FieldPath, message: str, next_step: str = "") -> Finding:
        """A finding at a field, or at the nearest thing around it."""
        line, column = self.place(path)
        return Finding("", message, next_step, line=line, column=column)

    def step(self, manifest: str, spec: str) -> str:
        """The next step in the words of the file that the user edits."""
        return spec if self.rendered else manifest

    def get(self, *path: str) -> Any:
        """The value at a path, or None."""
        return at_path(self.data, *path)

    @cached_property
    def refusals(self) -> Sequence[Finding]:
        """Why the operator's webhook would refuse it, apart from wrong types."""
        typed_wrong = [wrong.path for wrong in self.wrong]
        return [
            problem
            for problem in self.target.problems(self.data)
            if not any(problem.path[: len(path)] == path for path in typed_wrong)
        ]

    @cached_property
    def replicas(self) -> Sequence[ManifestReplica]:
        """The replicas of each role, or of each Pod template where the kind has no checks."""
        if self.target.rules:
            return [
                ManifestReplica(r.role, r.count, r.path, r.template, r.restart_policy)
                for r in self.as_job.replicas
            ]
        pods = _templates(self.data)
        return [ManifestReplica("Pod", 1, path, template, "") for path, template in pods]

    def replica(self, role: Role) -> ManifestReplica | None:
        """The replicas of a role."""
        return next((replica for replica in self.replicas if replica.role == role), None)

    @property
    def nodes(self) -> int:
        """Pods of the job."""
        return sum(replica.count for replica in self.replicas)

    @property
    def elastic(self) -> Json | None:
        """The elastic policy, if there is one."""
        policy: Json | None = self.get("spec", "elasticPolicy")
        return policy

    def containers(
        self, *, init: bool = False
    ) -> Iterator[tuple[ManifestReplica, ManifestContainer]]:
        """The containers of each role, with the init containers if asked for.

        A process that stands outside the Pod templates is one, too; see Target.process_at.
        """
        at = self.target.process_at
        if at and (process := self.get(*at)):
            as_container = {**process, "resources": process.get("resourcesPerNode")}
            yield ManifestReplica("Pod", 1, at, {}, ""), ManifestContainer(at, as_container)
        for replica in self.replicas:
            for container in replica.containers():
                yield replica, container
            for container in replica.containers("initContainers") if init else ():
                yield replica, container

    def trainers(self) -> Iterator[tuple[ManifestReplica, ManifestContainer]]:
        """The container that trains, of each role."""
        for replica in self.replicas:
            if replica.trainer is not None:
                yield replica, replica.trainer


def _templates(value: Any, path: FieldPath = ()) -> Iterator[tuple[FieldPath, Json]]:
    """Every Pod template in an object."""
    if isinstance(value, dict):
        if path[-1:] == ("template",) and isinstance(at_path(value, "spec", "containers"), list):
            yield path, value
        for key, item in value.items():
            yield from _templates(item, (*path, key))
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from _templates(item, (*path, index))


def launcher_of(container: ManifestContainer) -> str:
    """The launcher of the processes: "other", a launcher; "none", a plain python; "" not known."""
    argv = container.argv
    if not container.command:
        return ""
    if _LAUNCHERS.search(" ".join(argv)):
        return "other"
    if _PYTHON.fullmatch(PurePosixPath(argv[0]).name):
        return "none"
    if container.is_shell and re.search(r"(^|[;&\n]|exec)[ \t]*python[\d.]*\s", argv[-1]):
        several = re.search(r"\bfor\b|\bwhile\b|[^&]&\s*$|\.sh\b", argv[-1])
        return "" if several else "none"
    return ""


def launcher_flags(container: ManifestContainer) -> dict[str, str]:
    """The flags of torchrun on the command line, their names with underscores."""
    words = container.argv
    if container.is_shell:
        try:
            words = [part for word in words for part in shlex.split(word)]
        except ValueError:
            return {}
    starts = [
        i for i, word in enumerate(words) if re.search(r"torchrun$|torch\.distributed\.", word)
    ]
    arguments = iter(words[starts[0] + 1 :] if starts else ())
    flags: dict[str, str] = {}
    for word in arguments:
        if not word.startswith("-"):
            break
        name, equals, value = word.partition("=")
        if not equals and name not in _FLAG_ONLY:
            value = next(arguments, "")
        flags[name.lstrip("-").replace("-", "_")] = value
    return flags

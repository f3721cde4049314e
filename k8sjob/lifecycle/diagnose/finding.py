"""What a diagnosis says: a cause by its name, what was seen, and what to do now."""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Final, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from datetime import datetime

__all__ = [
    "REPLICA",
    "SAME_STEPS",
    "Cause",
    "Finding",
    "Seen",
    "Told",
    "grouped",
    "lasting",
    "passed",
    "plain",
    "who",
]


_OF_ONE_POD: Final = re.compile(
    r' \(pod: "[^"]*", container: [^)]*\)|"?[0-9a-f]{64}"? ?'
    r"|[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}"
)
"""Identifiers in the kubelet's messages, which differ by Pod where the trouble is the same."""


_BY_REPLICA: Final = re.compile(
    r"(?:master|worker)-\d+\b|\brank ?\d+|\[?\d+\.\d+\.\d+\.\d+\]?(?:[:<]\d+>?)?"
    r"|\d+ times over"
)


SAME_STEPS: Final = (
    "let all ranks take the same number of steps, in the same order: run.batches and a"
    " DistributedSampler give each as many batches; torch's Join stands in for who is done"
)
"""The next step where a rank was done before the others."""
REPLICA: Final = "{replica}"
"""Stands in a Seen's next step, which is one for all replicas of a finding, for the first one."""


class Cause(StrEnum):
    """The causes by their stable names; docs/reference/states.md says what each one means."""

    SUPERVISOR_GONE = "supervisor-gone"
    STOPPED = "stopped"
    SUSPENDED = "suspended"
    QUEUED = "queued"
    NO_QUEUE = "no-queue"
    DELETING = "deleting"
    OPERATOR_SILENT = "operator-silent"

    QUOTA = "quota"
    LIMIT_RANGE = "limit-range"
    POD_SECURITY = "pod-security"
    SERVICE_ACCOUNT = "service-account"
    WEBHOOK = "webhook"
    NAME_TAKEN = "name-taken"
    JOB_NAME = "job-name"
    REFUSED = "refused"

    NODE_LOST = "node-lost"
    EVICTED = "evicted"
    PREEMPTED = "preempted"
    POD_DELETED = "pod-deleted"
    NODE_REFUSED = "node-refused"

    UNSCHEDULABLE = "unschedulable"
    VOLUME_CLAIM = "volume-claim"
    VOLUME = "volume"
    SECRET = "secret"  # noqa: S105 - the name of a cause
    CONFIG_MAP = "config-map"
    IMAGE_MISSING = "image-missing"
    IMAGE_ACCESS = "image-access"
    IMAGE_NAME = "image-name"
    REGISTRY = "registry"
    IMAGE = "image"
    CONTAINER = "container"
    SANDBOX = "sandbox"
    INIT = "init"
    SIDECAR = "sidecar"

    HUNG = "hung"
    RENDEZVOUS = "rendezvous"
    CONFIGURATION = "configuration"
    MEMORY = "memory"
    START = "start"
    SHARED_MEMORY = "shared-memory"
    MISSING_MODULE = "missing-module"
    GPU_MEMORY = "gpu-memory"
    GPU_DRIVER = "gpu-driver"
    GPU_FAULT = "gpu-fault"
    SAME_GPU = "same-gpu"
    INTERFACE = "interface"
    NCCL_VERSION = "nccl-version"
    INFINIBAND = "infiniband"
    COLLECTIVE_TIMEOUT = "collective-timeout"
    CONNECTION = "connection"
    LEFT_EARLY = "left-early"
    NO_GROUP = "no-group"
    NAN_LOSS = "nan-loss"
    NCCL = "nccl"
    ADDRESS_IN_USE = "address-in-use"
    KILLED = "killed"
    CRASH = "crash"

    RESTART_LIMIT = "restart-limit"
    DEADLINE = "deadline"
    LEFTOVER = "leftover"
    MASTER_AWAITED = "master-awaited"
    WAITING = "waiting"


@dataclass(frozen=True, slots=True)
class Finding:
    """One cause and what to do about it.

    Attributes:
        cause: a Cause.
        message: what was seen, in one paragraph; it begins with the replicas that it concerns.
        next_step: what to do now.
        replica: "worker-2", the first of the replicas; empty where it concerns the whole job.
        replicas: all that it concerns.
        over: whether it has passed, since the replicas run again.
    """

    cause: str
    message: str
    next_step: str
    replica: str = ""
    replicas: tuple[str, ...] = ()
    over: bool = False

    def as_dict(self) -> dict[str, Any]:
        """The finding as the data of a FINDING event."""
        replicas = list(self.replicas or ((self.replica,) if self.replica else ()))
        data = {**asdict(self), "cause": str(self.cause), "replicas": replicas}
        del data["over"]  # the message says it
        return data


class Told(NamedTuple):
    """What a text says, wherever it stands: a Cause, what was seen, and what to do now."""

    cause: Cause
    what: str
    next_step: str


@dataclass(frozen=True, slots=True)
class Seen:
    """A cause at one replica, before it is known how many others have the same.

    Attributes:
        cause: a Cause.
        what: what was seen, without the replica's name and without what differs by replica.
        next_step: what to do now; REPLICA in it is the first of the replicas that have it.
        replica: "worker-2".
        since: since when, where that is worth telling.
        at: when it happened, of what has passed.
        over: whether the replica runs again.
    """

    cause: Cause
    what: str
    next_step: str
    replica: str
    since: datetime | None = None
    at: datetime | None = None
    over: bool = False


def grouped(seen: Iterable[Seen], now: datetime) -> list[Finding]:
    """One finding for all replicas at which the same was seen, in the order of the first ones."""
    groups: dict[object, list[Seen]] = {}
    for one in seen:
        key = one.cause, same_text(one.what), same_text(one.next_step), one.over
        groups.setdefault(key, []).append(one)
    return [_of_all(members, now) for members in groups.values()]


def same_text(text: str) -> str:
    """A text without the names, ranks and addresses in which it differs by replica."""
    return _BY_REPLICA.sub("", text)


def _of_all(members: Sequence[Seen], now: datetime) -> Finding:
    first = members[0]
    replicas = tuple(one.replica for one in members)
    begun = min((one.since for one in members if one.since), default=None)
    newest = max((one.at for one in members if one.at), default=None)
    message = f"{who(replicas)}: {first.what}" + (f", for {lasting(begun, now)}" if begun else "")
    if newest or first.over:
        message += passed(newest, now, again=first.over)
    step = first.next_step.replace(REPLICA, first.replica)
    return Finding(first.cause, message, step, first.replica, replicas, first.over)


def passed(moment: datetime | None, now: datetime, *, again: bool) -> str:
    """The end of a message about the past: how long ago it was, and whether training resumed."""
    age = f", {lasting(moment, now)} ago" if moment else ""
    return age + "; it runs again" * again


def who(replicas: Iterable[str]) -> str:
    """The replicas by name, at most three of them: `worker-3, worker-7 and 995 more`."""
    names = list(replicas)
    if len(names) > 3:
        names = [*names[:2], f"{len(names) - 2} more"]
    return " and ".join(part for part in (", ".join(names[:-1]), *names[-1:]) if part)


def lasting(begun: datetime, now: datetime) -> str:
    """How long something has lasted: `40 s`, `12 min`, `3 h`, `2 days`."""
    seconds = max(int((now - begun).total_seconds()), 0)
    for size, unit in ((86400, "days"), (3600, "h"), (60, "min")):
        if seconds >= 2 * size:
            return f"{seconds // size} {unit}"
    return f"{seconds} s"


def plain(said: str) -> str:
    """A message of the kubelet's in one line, without what is true of one Pod alone."""
    return " ".join(_OF_ONE_POD.sub("", said).split()).rstrip(".")

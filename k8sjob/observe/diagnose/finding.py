"""Causes, findings, and rules that recognize a cause by a text."""

from __future__ import annotations

import re
import shlex
import tomllib
from enum import StrEnum
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from k8sjob.contract import NO_PROGRESS, OWN_LAUNCHER
from k8sjob.findings import Finding, Severity, listed

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from datetime import datetime

_POD_IDENTIFIERS: Final = re.compile(
    r' \(pod: "[^"]*", container: [^)]*\)|"?[0-9a-f]{64}"? ?'
    r"|[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}"
)
"""Parts of the kubelet's messages that differ by Pod where the problem is the same."""
_REPLICA_IDENTIFIERS: Final = re.compile(
    r"(?:master|worker)-\d+\b|\brank ?\d+|\[?(?<!\d)\d++\.\d+\.\d+\.\d+\]?(?:[:<]\d+>?)?"
    r"|, \d+ times\b(?: in \d+ \w+)?"
)
_MAX_LINES: Final = 5
_MAX_LINE: Final = 500
POD: Final = "{pod}"
"""In the next step of an Explanation: the Pod of the first of the replicas that share it."""


class Cause(StrEnum):
    """The causes by their stable names; docs/reference/states.md says what each one means."""

    SUPERVISOR_GONE = "supervisor-gone"
    STOPPED = "stopped"
    SUSPENDED = "suspended"
    QUEUED = "queued"
    NO_QUEUE = "no-queue"
    COMPANION = "companion"
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
    STARTED_AGAIN = "started-again"

    PREFLIGHT = "preflight"
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
    COLLECTIVE_MISMATCH = "collective-mismatch"
    CONNECTION = "connection"
    LEFT_EARLY = "left-early"
    NO_PROGRESS = NO_PROGRESS
    NO_GROUP = "no-group"
    OWN_LAUNCHER = OWN_LAUNCHER
    NAN_LOSS = "nan-loss"
    NCCL = "nccl"
    DISK = "disk"
    ADDRESS_IN_USE = "address-in-use"
    KILLED = "killed"
    CRASH = "crash"

    RESTART_LIMIT = "restart-limit"
    DEADLINE = "deadline"
    FAILED = "failed"
    LEFTOVER = "leftover"
    MASTER_AWAITED = "master-awaited"
    WAITING = "waiting"


def as_data(finding: Finding) -> dict[str, Any]:
    """A finding as `why` prints it: the data of a FINDING event, and of records."""
    return {
        "cause": str(finding.id),
        "message": finding.message,
        "next_step": finding.next_step,
        "replica": finding.replica,
        "replicas": list(finding.replicas),
    }


class Explanation(NamedTuple):
    """A cause, perhaps at one replica, before it is known which others share it.

    It is no Finding, since a message names all replicas and the time of the first or the last of
    them, which only the group has; see grouped.

    Attributes:
        cause: a Cause.
        problem: what is wrong, without the replica's name.
        next_step: what to do now; see POD.
        replica: "worker-2".
        since: when it began, where that is worth saying.
        at: when it happened, if it is past.
        over: whether the replica is running again.
        pod: the name of its Pod, where that is known.
    """

    cause: Cause
    problem: str
    next_step: str
    replica: str = ""
    since: datetime | None = None
    at: datetime | None = None
    over: bool = False
    pod: str = ""


class Rule(NamedTuple):
    """A cause that a text names.

    Attributes:
        pattern: how the cause is written.
        cause: a Cause.
        problem: what is wrong; the pattern's groups and the caller's facts fill its braces.
        next_step: what to do now, filled likewise.
        local_step: the next step for a job on this machine, where that differs.
        any_line: whether each line with this text tells the cause, and not only an exception's;
            where an exception is needed, other lines that contain it are warnings.
        types: a pattern for the classes of exceptions that it is about, or its name in the file;
            empty: DEFAULT of the file, or all. An exception of the script's own may quote the text.
    """

    pattern: str
    cause: Cause
    problem: str
    next_step: str
    local_step: str = ""
    any_line: bool = False
    types: str = ""

    def search(self, text: str) -> re.Match[str] | None:
        """The match of the cause in a text."""
        return re.search(self.pattern, text, re.DOTALL)

    def explain(
        self, match: re.Match[str], facts: Mapping[str, str], *, local: bool = False
    ) -> Explanation:
        """The explanation of a match, filled in."""
        groups = match.groupdict("")
        quoted = {name: _ShellWord(text) for name, text in groups.items()}
        step = (local and self.local_step) or self.next_step
        return Explanation(
            self.cause,
            self.problem.format_map({**groups, **facts}),
            step.format_map({**quoted, **facts}),
        )


class _ShellWord(str):
    """A text that stands as one word in commands to paste: `{name}` quotes it, `{name!r}` not."""

    __slots__ = ()

    def __format__(self, spec: str) -> str:
        return shlex.quote(self) if self else ""


@cache
def load_data(name: str) -> dict[str, Any]:
    """The content of a file in the folder `rules`."""
    file = Path(__file__).with_name("rules") / f"{name}.toml"
    return tomllib.loads(file.read_text(encoding="utf-8"))


@cache
def load_rules(name: str) -> tuple[Rule, ...]:
    """The rules of a file in the folder `rules`, in their order; read when they are needed."""
    rules, classes = [], load_data(name).get("classes", {})
    for fields in load_data(name)["rule"]:
        pattern, types = fields["pattern"], fields.get("types", "")
        joined = pattern if isinstance(pattern, str) else "|".join(pattern)
        cause = Cause(fields.get("cause", Cause.CRASH))
        types = classes.get(types or "DEFAULT", types)
        rules.append(Rule(**{**fields, "pattern": joined, "cause": cause, "types": types}))
    return tuple(rules)


def first_match(rules: Iterable[Rule], text: str, **facts: str) -> Explanation | None:
    """The explanation of the first rule whose pattern is in the text."""
    explanations = (rule.explain(match, facts) for rule in rules if (match := rule.search(text)))
    return next(explanations, None)


def best_match(rules: Iterable[Rule], text: str, **facts: str) -> Explanation:
    """The same of rules whose last one matches everything."""
    return next(rule.explain(match, facts) for rule in rules if (match := rule.search(text)))


def grouped(explanations: Iterable[Explanation], now: datetime) -> list[Finding]:
    """One finding for all replicas with the same problem, in the order of the first ones."""
    groups: dict[object, list[Explanation]] = {}
    for explanation in explanations:
        pod = explanation.pod or POD
        texts = (explanation.problem.replace(pod, POD), explanation.next_step.replace(pod, POD))
        key = explanation.cause, *map(without_replica, texts), explanation.over
        groups.setdefault(key, []).append(explanation)
    return [_merged(members, now) for members in groups.values()]


def without_replica(text: str) -> str:
    """A text without the names, ranks and addresses by which it differs between replicas."""
    return _REPLICA_IDENTIFIERS.sub("", text)


def _merged(members: Sequence[Explanation], now: datetime) -> Finding:
    first = members[0]
    replicas = tuple(member.replica for member in members)
    begun = min((member.since for member in members if member.since), default=None)
    newest = max((member.at for member in members if member.at), default=None)
    message = f"{listed(replicas)}: {first.problem}" + (f", for {age(begun, now)}" if begun else "")
    message += ago(newest, now, again=first.over)
    step = first.next_step.replace(POD, first.pod)
    severity = Severity.WARNING if first.over else Severity.ERROR
    return Finding(first.cause, message, step, severity, replicas=replicas)


def ago(moment: datetime | None, now: datetime, *, again: bool = False) -> str:
    """The end of a message about the past: `, 5 min ago; it is running again`."""
    passed = f", {age(moment, now)} ago" if moment else ""
    return passed + "; it is running again" * again


def age(begun: datetime, now: datetime) -> str:
    """The time since a moment: `40 s`, `12 min`, `3 h`, `2 days`."""
    seconds = max(int((now - begun).total_seconds()), 0)
    for size, unit in ((86400, "days"), (3600, "h"), (60, "min")):
        if seconds >= 2 * size:
            return f"{seconds // size} {unit}"
    return f"{seconds} s"


def shortened(text: str) -> str:
    """The beginning of a script's text, which may be of any size: few lines, none of them long.

    A long line keeps its end, too: what was wrong often stands there.
    """
    lines, half = text.strip().splitlines(), _MAX_LINE // 2
    shown = [
        line if len(line) <= _MAX_LINE else f"{line[:half]} ... {line[-half:]}"
        for line in lines[:_MAX_LINES]
    ]
    return "\n".join([*shown, "..."] if len(lines) > _MAX_LINES else shown)


def one_line(message: str) -> str:
    """A message of the kubelet's in one line, without the identifiers of one Pod."""
    return " ".join(_POD_IDENTIFIERS.sub("", message).split()).rstrip(".")

"""How the containers of a job ended, as far as its objects still tell. Pure.

A Pod shows its container's last end. When the operator has deleted the Pod (a crashing one counts
as running, so cleanPodPolicy Running takes it away) the Events about the job still tell it.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Final

from k8sjob.contract import CONTAINER_NAME, ExitCode, Reason
from k8sjob.lifecycle.status import last_end

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from k8sjob.backends.api import Json, Snapshot

__all__ = ["End", "ends", "recreated"]

_ABNORMAL: Final = re.compile(
    rf"Error pod (?P<pod>\S+) container {CONTAINER_NAME} exitCode: (?P<code>\d+)"
    r" terminated message: (?P<said>.*)",
    re.DOTALL,
)
_EXITED: Final = re.compile(r"Pod: \S+?\.(?P<pod>\S+) exited with code (?P<code>[1-9]\d*)")
"""All that is left of a Pod that the ExitCode policy has made anew."""
_RETRIED: Final = 128
"""The ExitCode policy starts a replica again for this exit code and those above."""
_CONSEQUENCES: Final = frozenset({ExitCode.PEER_LOST, ExitCode.STOPPED})
_CUT: Final = re.compile(
    r'\{"exit_code": (?P<code>[0-9]{1,3}), "rank": (?P<rank>-?[0-9]{1,6}),'
    r' "type": "(?P<type>[^"\\]*)", "message": "(?P<said>(?:[^"\\]|\\.)*)'
)
"""A Reason in an Event, which keeps 1024 characters."""


@dataclass(frozen=True, slots=True)
class End:
    """One container that ended badly.

    Attributes:
        replica: "worker-2".
        exit_code: of the failure; the container's own where nothing more is known.
        why: the kubelet's reason: "Error", "OOMKilled", "StartError".
        message: the termination message, as it is.
        reason: the same, read; None where something else than k8sjob's runtime wrote it.
        time: seconds since the epoch at which it failed.
    """

    replica: str
    exit_code: int
    why: str
    message: str
    reason: Reason | None
    time: float

    @property
    def told(self) -> str:
        """Who it was: the replica, and its rank where that is known."""
        rank = self.reason.rank if self.reason else -1
        return f"{self.replica}, rank {rank}" if rank >= 0 else self.replica

    @property
    def consequence(self) -> bool:
        """Whether another failure, or a request, was the cause of this one."""
        named = bool(self.reason and self.reason.culprits)  # the others did not come at all
        return self.exit_code in _CONSEQUENCES and not named


def ends(snapshot: Snapshot) -> list[End]:
    """The newest bad end of each replica that has one."""
    newest: dict[str, End] = {}
    name = snapshot.job.get("metadata", {}).get("name", "")
    for end in (*_of_events(name, snapshot.events), *_of_pods(name, snapshot.pods)):
        if end.replica not in newest or newest[end.replica].time <= end.time:
            newest[end.replica] = end
    for end in _exited(name, snapshot.events):
        newest.setdefault(end.replica, end)
    return list(newest.values())


def _of_pods(name: str, pods: Iterable[Json]) -> Iterator[End]:
    for pod in pods:
        ended = last_end(pod)
        if ended.get("exitCode"):
            said = ended.get("message", "")
            yield _end(
                pod["metadata"]["name"].removeprefix(f"{name}-"),
                int(ended["exitCode"]),
                ended.get("reason", ""),
                said,
                ended.get("finishedAt", ""),
            )


def _of_events(name: str, events: Iterable[Json]) -> Iterator[End]:
    for event in events:
        found = _ABNORMAL.fullmatch(event.get("message", ""))
        if found:
            yield _end(
                found["pod"].removeprefix(f"{name}-"),
                int(found["code"]),
                event.get("reason", ""),
                found["said"],
                event.get("lastTimestamp") or "",
            )


def _exited(name: str, events: Sequence[Json]) -> Iterator[End]:
    """The newest first."""
    for event in reversed(events):
        found = _EXITED.fullmatch(event.get("message", ""))
        if found:
            replica = found["pod"].removeprefix(f"{name}-")
            yield _end(replica, int(found["code"]), "", "", event.get("lastTimestamp") or "")


def recreated(snapshot: Snapshot, replica: str) -> int:
    """How often the operator has replaced a replica's Pod under the ExitCode policy."""
    roles = (snapshot.job.get("spec") or {}).get("pytorchReplicaSpecs") or {}
    role = roles.get(replica.partition("-")[0].capitalize()) or {}
    if role.get("restartPolicy") != "ExitCode":  # the operator writes these Events always
        return 0
    name = snapshot.job.get("metadata", {}).get("name", "")
    return sum(
        int(event.get("count") or 1)
        for event in snapshot.events
        if (found := _EXITED.fullmatch(event.get("message", "")))
        and found["pod"] == f"{name}-{replica}"
        and int(found["code"]) >= _RETRIED
    )


def _end(replica: str, exit_code: int, why: str, said: str, stamp: str) -> End:
    reason = Reason.decode(said) or _cut(said)
    seen = datetime.fromisoformat(stamp).timestamp() if stamp else 0.0
    time = reason.time if reason and reason.time else seen
    # The container's own may be RESTARTS_SPENT; a container that failed did not end with 0.
    code = (reason.exit_code if reason else 0) or exit_code
    return End(replica, code, why, said, reason, time)


def _cut(said: str) -> Reason | None:
    """The reason in a termination message whose end is missing."""
    found = _CUT.match(said)
    if found is None:
        return None
    whole = re.sub(r"\\u[0-9a-f]{0,3}$", "", found["said"])  # the cut may be within a character
    try:
        message = json.loads(f'"{whole}"', strict=False)
    except ValueError:
        return None
    return Reason(int(found["code"]), int(found["rank"]), found["type"], message)

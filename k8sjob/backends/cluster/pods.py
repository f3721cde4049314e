"""The Pods of one job, listed once for all that read its replicas' output.

A reader of a log must know how its container stands: to begin, to see that it was started again, to
end. Each reader of 32 asking for its own Pod twice a second would be 64 requests; together they are
two at the most, and fewer where a listing takes long.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from k8sjob.backends.cluster.belongings import owned
from k8sjob.backends.paths import path
from k8sjob.contract import CONTAINER_NAME
from k8sjob.labels import JOB_NAME, REPLICA_INDEX, replica_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from k8sjob.backends.api import Json
    from k8sjob.backends.transport import Transport

__all__ = ["Instance", "JobPods", "Pace"]

_SHARE: Final = 10
"""A listing that took t seconds is good for t times this many: a large job is listed less often."""
_MOST_NAMED: Final = 100
"""More replicas than these are not named one by one: the request would be too long."""


@dataclass(frozen=True, slots=True)
class Pace:
    """How often readers look, and how long they wait; in seconds.

    Attributes:
        look: the age up to which a listing of Pods is taken for the present.
        pause: between two attempts to read on.
        longest_pause: the same after attempts that failed.
        idle: of silence, after which a connection is made anew: it may be dead.
        linger: so long a container that nobody ends is followed after the end of its job.
        patience: so long no apiserver may answer; an upgrade of its only one takes a minute or two.
    """

    look: float = 0.4
    pause: float = 0.3
    longest_pause: float = 2.0
    idle: float = 30.0
    linger: float = 10.0
    patience: float = 300.0


@dataclass(frozen=True, slots=True)
class Instance:
    """The newest start of a replica's container, as its Pod shows it.

    Attributes:
        pod: the Pod's name.
        uid: the Pod's uid.
        number: the container's restart count.
        state: "waiting", "running" or "terminated".
        started: whether this instance exists: there is a file of its output.
        leaving: whether the Pod is being deleted.
        made: when the Pod was made, RFC 3339.
        previous_to: when the instance before it ended, RFC 3339; empty where that is not told.
    """

    pod: str
    uid: str
    number: int
    state: str
    started: bool
    leaving: bool
    made: str
    previous_to: str = ""

    @property
    def ended(self) -> bool:
        """Whether it has written all it will."""
        return self.started and self.state != "running"


class JobPods:
    """How the containers of a job's replicas stand. Safe to use from several threads.

    Attributes:
        pace: how often they are looked at.
    """

    def __init__(
        self,
        transport: Transport,
        namespace: str,
        job_name: str,
        job_uid: str,
        *,
        pace: Pace | None = None,
    ) -> None:
        self.pace = pace or Pace()
        self._transport = transport
        self._path = path("pods", namespace)
        self._job_name, self._job_uid = job_name, job_uid
        self._lock = threading.Lock()
        self._asked: set[str] = set()
        self._instances: dict[str, Instance] = {}
        self._at = 0.0
        self._good_until = 0.0
        self._over = False
        self._ask_at = 0.0

    def instance(self, replica: str, *, after: float = 0.0) -> Instance | None:
        """The newest instance of a replica's container; None where it has no Pod.

        Args:
            replica: "master-0", "worker-2".
            after: the answer must be newer than this moment of time.monotonic().

        Raises:
            ApiError: the Pods cannot be listed.
        """
        with self._lock:
            now = time.monotonic()
            if replica not in self._asked or now > self._good_until or after > self._at:
                self._asked.add(replica)
                self._list(now)
            return self._instances.get(replica)

    def job_is_over(self, ended: Callable[[], bool]) -> bool:
        """Whether the job has ended; `ended` is asked as often as the Pods are looked at."""
        with self._lock:
            if not self._over and time.monotonic() >= self._ask_at:
                self._over = ended()
                self._ask_at = time.monotonic() + self.pace.look
            return self._over

    def _list(self, now: float) -> None:
        selector = f"{JOB_NAME}={self._job_name}"
        if len(self._asked) <= _MOST_NAMED:
            indexes = sorted({replica.rpartition("-")[2] for replica in self._asked})
            selector += f",{REPLICA_INDEX} in ({','.join(indexes)})"
        # Version 0: as the apiserver's cache has it, which is milliseconds old.
        query = {"labelSelector": selector, "resourceVersion": "0"}
        found = self._transport.request("GET", self._path, query=query)
        self._instances = {
            replica_of(pod): _instance(pod) for pod in found.get("items") or [] if self._is(pod)
        }
        took = time.monotonic() - now
        self._at, self._good_until = now, now + max(self.pace.look, took * _SHARE)

    def _is(self, pod: Json) -> bool:
        """Whether it is the job's own, and not that of one of the same name before it."""
        return not self._job_uid or owned(pod, self._job_uid)


def _instance(pod: Json) -> Instance:
    meta, status = pod["metadata"], pod.get("status") or {}
    statuses = status.get("containerStatuses") or []
    container: Json = next((one for one in statuses if one.get("name") == CONTAINER_NAME), {})
    now, before = container.get("state") or {}, container.get("lastState") or {}
    state = next((kind for kind in ("running", "terminated") if kind in now), "waiting")
    if status.get("phase") in {"Failed", "Succeeded"} and state == "running":
        state = "terminated"  # evicted, or its node is lost
    ended = before.get("terminated") or {}
    return Instance(
        pod=meta["name"],
        uid=meta["uid"],
        number=int(container.get("restartCount", 0)),
        state=state,
        # Waiting with a last state: that is the newest instance, dead, and its file is there.
        started=state != "waiting" or bool(ended),
        leaving=bool(meta.get("deletionTimestamp")),
        made=meta.get("creationTimestamp", ""),
        previous_to=ended.get("finishedAt") or "",
    )

"""The newest start of each replica's container, by one list of Pods for all readers of logs.

A reader must know the state of its container: to begin, to see a restart, to end. 32 readers that
ask for their own Pod twice a second make 64 requests; together they make two at the most, and fewer
where a list takes long.
"""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Final, NamedTuple

from k8sjob.contract import CONTAINER_NAME
from k8sjob.kube.api_resources import path
from k8sjob.kube.objects import Pod
from k8sjob.targets.jobs import newest_pods, of_kind, perhaps_owned

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from k8sjob.backends.api import JobRef
    from k8sjob.kube.client.transport import Transport
    from k8sjob.kube.objects import Json

_VALID_FACTOR: Final = 10
"""A list that took t seconds is valid for t times this many: a large job is listed less often."""
_MAX_NAMED: Final = 100
"""More replicas than these are not named one by one: the request would be too long."""


class Pace(NamedTuple):
    """How often readers look, and how long they wait; in seconds.

    Attributes:
        look: the age up to which a list of Pods is used.
        pause: between two attempts to read on.
        longest_pause: the same after attempts that failed.
        idle: of silence, after which a connection is replaced: it may be dead.
        linger: how long a container that is not stopped is followed after the end of its job.
        patience: how long no apiserver may answer; an upgrade of the only one takes minutes.
    """

    look: float = 0.4
    pause: float = 0.3
    longest_pause: float = 2.0
    idle: float = 30.0
    linger: float = 10.0
    patience: float = 300.0


class Instance(NamedTuple):
    """The newest start of a replica's container, as its Pod shows it.

    Attributes:
        pod: the Pod's name.
        container: the name of its training container.
        uid: the Pod's uid.
        number: the container's restart count.
        state: "waiting", "running" or "terminated".
        started: whether this instance exists: there is a file of its output.
        leaving: whether the Pod is being deleted.
        created: when the Pod was created, RFC 3339.
    """

    pod: str
    container: str
    uid: str
    number: int
    state: str
    started: bool
    leaving: bool
    created: str

    @classmethod
    def of(cls, raw: Json) -> Instance:
        """The instance that a Pod shows."""
        pod = Pod(raw)
        states = pod.container.part("state")
        state = next((kind for kind in ("running", "terminated") if kind in states), "waiting")
        if state == "running" and not pod.live:
            state = "terminated"  # evicted, or its node is lost
        return cls(
            pod=pod.name,
            container=str(pod.container.raw.get("name", CONTAINER_NAME)),
            uid=pod.uid,
            number=pod.restarts,
            state=state,
            # Waiting with a last state: that is the newest instance, ended, and its file exists.
            started=state != "waiting" or bool(pod.terminated_before),
            leaving=pod.deleting,
            created=pod.created,
        )

    @property
    def ended(self) -> bool:
        """Whether it will write nothing more."""
        return self.started and self.state != "running"


class JobPods:
    """The state of a job's containers. Safe to use from several threads.

    Of a job whose uid is known, Pods of an earlier one of the same name are left out. `ended` tells
    whether the job has ended or is gone; it is called as often as the Pods are listed. `newest`
    lists the Pods, by replica, of what is no kind of job.
    """

    def __init__(
        self,
        transport: Transport,
        ref: JobRef,
        ended: Callable[[], bool] = lambda: False,
        *,
        pace: Pace | None = None,
        newest: Callable[[], Mapping[str, Json]] | None = None,
    ) -> None:
        self.transport, self.ref, self.pace = transport, ref, pace or Pace()
        self._ended, self._newest = ended, newest
        self._lock = threading.Lock()
        self._asked: set[str] = set()
        self._listed: set[str] = set()
        self._pods: Mapping[str, Json] = {}
        self._instances: dict[str, Instance] = {}
        self._at = 0.0
        self._good_until = 0.0
        self._over = False
        self._ask_at = 0.0

    def instance(self, replica: str, *, after: float = 0.0) -> Instance | None:
        """The newest instance of a replica's container; None if it has no Pod.

        The answer is newer than the moment `after` of time.monotonic().

        Raises:
            ApiError: the Pods cannot be listed.
        """
        # Before the lock, which is held during the request: of 32 readers that come at once the
        # first lists, the second lists for all who came meanwhile, and the others find its answer.
        self._asked.add(replica)
        with self._lock:
            now = time.monotonic()
            unknown = replica not in self._listed and self._newest is None
            if unknown or now > self._good_until or after > self._at:
                self._list(now)
            if replica not in self._instances and replica in self._pods:
                self._instances[replica] = Instance.of(self._pods[replica])
            return self._instances.get(replica)

    def job_is_over(self) -> bool:
        """Whether the job has ended, or is gone."""
        with self._lock:
            if not self._over and time.monotonic() >= self._ask_at:
                self._over = self._ended()
                self._ask_at = time.monotonic() + self.pace.look
            return self._over

    def _list(self, now: float) -> None:
        asked = self._asked.copy()
        self._pods = self._newest() if self._newest else self._selected(asked)
        self._listed, self._instances = asked, {}
        # `now` was before the request, so the answer is no older but for the milliseconds of the
        # cache.
        took = time.monotonic() - now
        self._at, self._good_until = now, now + max(self.pace.look, took * _VALID_FACTOR)

    def _selected(self, replicas: set[str]) -> Mapping[str, Json]:
        # By their names the server need not send the other Pods of a large job.
        few = replicas if len(replicas) <= _MAX_NAMED else ()
        target, uid = of_kind(self.ref.kind), self.ref.uid
        selector = target.pods.selector(self.ref.name, few)
        # Version 0: as the apiserver's cache has it, which is milliseconds old.
        query = {"labelSelector": selector, "resourceVersion": "0"}
        listing = self.transport.request("GET", path("pods", self.ref.namespace), query=query)
        pods = (p for p in listing.get("items") or [] if not uid or perhaps_owned(target, p, uid))
        return newest_pods(target, pods)

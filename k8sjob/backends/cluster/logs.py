"""A replica's output, over broken connections, restarted containers and Pods made anew.

A clean end of an answer does not say that the container has ended: the apiserver or the kubelet may
have. So each instance is read once more when its Pod says that it has ended. A gap that cannot be
filled is told in a line of its own.
"""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Final

from k8sjob.backends.cluster.output import Output
from k8sjob.backends.transport import ApiError
from k8sjob.errors import BackendError

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator
    from datetime import datetime

    from k8sjob.backends.api import LogLine
    from k8sjob.backends.cluster.pods import Instance, JobPods
    from k8sjob.backends.transport import Transport

__all__ = ["replica_logs"]

_TRIES_AFTER_THE_END: Final = 5
_STEADY_SECONDS: Final = 5.0
_TRANSIENT: Final = frozenset({0, 408, 429, 500, 502, 503, 504})
_GONE: Final = "its pod is gone, and its output with it"


def replica_logs(
    transport: Transport,
    namespace: str,
    replica: str,
    *,
    pods: JobPods,
    follow: bool = False,
    previous: bool = False,
    tail: int | None = None,
    since: datetime | None = None,
    stop: threading.Event | None = None,
    ended: Callable[[], bool] = lambda: False,
) -> Iterator[LogLine]:
    """A replica's output, as far as its node still has it.

    Args:
        transport: reaches the cluster.
        namespace: the job's.
        replica: "master-0", "worker-2".
        pods: the job's, shared with the readers of its other replicas.
        follow: wait for more, also for a Pod that has not started yet, until the job has ended and
            all is read.
        previous: the attempt before the last one alone.
        tail: so many of the last lines are wanted; not with `follow`.
        since: what is older is not wanted; a little of it may come.
        stop: set from another thread to end the iteration within a second.
        ended: whether the job has ended, or is gone; asked now and then while following, and where
            there is no Pod.

    Raises:
        ApiError: the output may not be read, or no apiserver answers for minutes.
        BackendError: `previous`, and there is no output of an earlier attempt.
    """
    stop = stop or threading.Event()
    output = Output(transport, namespace, replica, since=since, idle=pods.pace.idle, stop=stop)
    if follow:
        return _Follower(output, pods, stop, ended).lines()
    if previous:
        return _previous(output, pods)
    return _present(output, pods, tail, ended)


def _present(
    output: Output, pods: JobPods, tail: int | None, ended: Callable[[], bool]
) -> Iterator[LogLine]:
    now = pods.instance(output.replica)
    if now is None and pods.job_is_over(ended):
        yield output.gap(None, _GONE)
    if now is None or not now.started:
        return
    if tail is not None:
        yield from output.last(now, tail)
        return
    yield from output.catch_up(now)
    yield from output.read(now)


def _previous(output: Output, pods: JobPods) -> Iterator[LogLine]:
    replica, now = output.replica, pods.instance(output.replica)
    if now is None:
        raise BackendError(f"{replica} has no pod, and the output of an earlier one went with it")
    if not now.number:
        raise BackendError(f"{replica} was started once only; leave --previous out")
    if now.state == "waiting":  # its node would give the newest one
        raise BackendError(
            f"{replica} waits to be started again, and its node has the output of its last attempt"
            " alone; leave --previous out"
        )
    if not (yield from output.read(now, before=True)):
        raise BackendError(
            f"{replica}: its node has not kept the output of the attempt before the last one;"
            " leave --previous out"
        )


class _Follower:
    """Goes from instance to instance until the job has ended."""

    def __init__(
        self, output: Output, pods: JobPods, stop: threading.Event, ended: Callable[[], bool]
    ) -> None:
        self._output, self._pods, self._stop, self._ended = output, pods, stop, ended
        self._pod: Instance | None = None
        self._looked = False
        self._after = 0.0
        self._failures = self._drains = 0
        self._answered = time.monotonic()
        self._ended_at: float | None = None

    def lines(self) -> Iterator[LogLine]:
        pace = self._pods.pace
        while not self._stop.is_set():
            began = time.monotonic()
            try:
                if (yield from self._step()):
                    return
                self._failures = 0
            except ApiError as error:
                silent = time.monotonic() - self._answered > pace.patience
                if silent or error.code not in _TRANSIENT:
                    raise
                # What broke after a while did work: a container that is silent breaks it, too.
                lasted = time.monotonic() - began > _STEADY_SECONDS
                self._failures = 0 if lasted else self._failures + 1
            self._stop.wait(min(pace.pause * 2 ** min(self._failures, 9), pace.longest_pause))

    def _step(self) -> Generator[LogLine, None, bool]:
        """One look at the Pod, and what follows from it; whether nothing more will come."""
        now = self._pods.instance(self._output.replica, after=self._after)
        self._answered = time.monotonic()
        if self._pod and (now is None or now.uid != self._pod.uid):
            yield from self._leave(self._pod)
        came, self._looked = not self._looked, True
        if now is None or not now.started:
            over = self._is_over()
            if came and over and now is None and not self._output.since:
                yield self._output.gap(None, _GONE)
            return over
        self._pod = now
        yield from self._output.catch_up(now)
        if now.ended and not self._output.drained:
            yield from self._drain(now)
        if self._output.drained:
            return self._is_over()
        yield from self._stream(now)
        return self._is_left_over(now)

    def _stream(self, now: Instance) -> Iterator[LogLine]:
        self._output.whole = False
        source = self._output.read(now, follow=True)
        try:
            while True:
                line = next(source)
                self._failures = 0
                yield line
                if self._is_left_over(now):
                    return
        except StopIteration as end:
            self._output.whole = bool(end.value)
        finally:
            source.close()
            self._after = time.monotonic()  # an older look at the Pod knows less than this

    def _drain(self, now: Instance) -> Iterator[LogLine]:
        """The rest of an instance that has ended."""
        self._drains += 1
        given_up = self._drains > _TRIES_AFTER_THE_END and self._is_over()
        there = not given_up and (yield from self._output.read(now))
        if self._stop.is_set():
            return
        if not there and not self._output.whole:
            yield self._output.gap(now, "the rest of its output cannot be read any more")
        self._output.whole = self._output.drained = True
        self._drains = 0

    def _leave(self, pod: Instance) -> Iterator[LogLine]:
        """The Pod is gone, and with it what was not read."""
        if not self._output.whole:
            missing = "output may be missing here: the pod was deleted before all of it was read"
            yield self._output.gap(pod, missing)
        self._output.leave_pod()
        self._pod = None

    def _is_over(self) -> bool:
        """Whether the job has ended."""
        if self._ended_at is None and self._pods.job_is_over(self._ended):
            self._ended_at = time.monotonic()
        return self._ended_at is not None

    def _is_left_over(self, now: Instance) -> bool:
        """Whether the container runs on though its job ended a while ago and nobody ends it."""
        self._is_over()
        if self._ended_at is None or time.monotonic() - self._ended_at < self._pods.pace.linger:
            return False
        latest = self._pods.instance(self._output.replica)
        return bool(latest and latest.uid == now.uid and not (latest.leaving or latest.ended))

"""A replica's output, over broken connections, restarted containers and replaced Pods.

What is read is always one *instance*: the n-th start of the container in one Pod. An apiserver has
the output of the newest, and of the one before it while the newest runs. The clean end of an answer
does not mean that the container has ended: the apiserver or the kubelet may have. So each instance
is read once more when its Pod says that it has ended. A gap that cannot be filled becomes a line.
"""

from __future__ import annotations

import re
import threading
import time
from collections import deque
from datetime import UTC, datetime
from functools import lru_cache
from typing import TYPE_CHECKING, Final, Unpack

from k8sjob.backends.api import LogLine
from k8sjob.errors import BackendError
from k8sjob.kube.api_resources import path
from k8sjob.kube.client.transport import ApiError
from k8sjob.kube.objects import moment

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator

    from k8sjob.backends.api import LogOptions
    from k8sjob.backends.cluster.instances import Instance, JobPods

_NOT_THERE: Final = frozenset({400, 404})
_TRANSIENT: Final = frozenset({0, 408, 429, 500, 502, 503, 504})
_STAMP: Final = re.compile(rb"(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d)(?:\.(\d+))?(Z|[+-]\d\d:\d\d) ")
_TRIES_AFTER_THE_END: Final = 5
_STEADY_SECONDS: Final = 5.0
_POD_GONE: Final = "its pod is gone, and its output with it"


def replica_logs(job_pods: JobPods, replica: str, **how: Unpack[LogOptions]) -> Iterator[LogLine]:
    """A replica's output, as far as its node still has it; see Backend.logs.

    `job_pods` is shared with the readers of the job's other replicas.

    Raises:
        ApiError: the output may not be read, or no apiserver answers for minutes.
        BackendError: `previous`, and there is no output of an earlier attempt.
    """
    stop = how.get("stop") or threading.Event()
    output = _Output(job_pods, replica, how.get("since"), stop)
    if how.get("follow"):
        return _Follower(output, job_pods, stop).lines()
    if how.get("previous"):
        return _previous(output, job_pods)
    return _present(output, job_pods, how.get("tail"))


def _present(output: _Output, pods: JobPods, tail: int | None) -> Iterator[LogLine]:
    now = pods.instance(output.replica)
    # The operator removes Pods at the end of a job (cleanPodPolicy): silence would look like a
    # replica that wrote nothing.
    if now is None and pods.job_is_over():
        yield output.gap(None, _POD_GONE)
    if now is None or not now.started:
        return
    if tail is not None:
        yield from output.last(now, tail)
        return
    yield from output.catch_up(now)
    yield from output.read(now)


def _previous(output: _Output, pods: JobPods) -> Iterator[LogLine]:
    replica, now = output.replica, pods.instance(output.replica)
    if now is None:
        raise BackendError(f"{replica} has no pod, and the output of its earlier pod is lost")
    if not now.number:
        raise BackendError(f"{replica} was started only once; omit --previous")
    if now.state == "waiting":  # its node would give the newest one
        raise BackendError(
            f"{replica} waits to be restarted, and its node has only the output of its last"
            " attempt; omit --previous"
        )
    if not (yield from output.read(now, before=True)):
        raise BackendError(
            f"{replica}: its node has not kept the output of the attempt before the last one;"
            " omit --previous"
        )


# --- instance by instance -------------------------------------------------------------------------


class _Follower:
    """Reads instance after instance until the job has ended."""

    def __init__(self, output: _Output, pods: JobPods, stop: threading.Event) -> None:
        self._output, self._pods, self._stop = output, pods, stop
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
                # A 403 or 404 of the list ends it; an apiserver that is being upgraded is away for
                # minutes.
                silent = time.monotonic() - self._answered > pace.patience
                if silent or error.code not in _TRANSIENT:
                    raise
                # A connection that broke after a while did work: a silent container breaks it, too.
                lasted = time.monotonic() - began > _STEADY_SECONDS
                self._failures = 0 if lasted else self._failures + 1
            self._stop.wait(min(pace.pause * 2 ** min(self._failures, 9), pace.longest_pause))

    def _step(self) -> Generator[LogLine, None, bool]:
        """Look at the Pod once and act on it; whether nothing more will come."""
        # The state is newer than the end of the last stream. With an older one a container that has
        # just ended would be followed again.
        now = self._pods.instance(self._output.replica, after=self._after)
        self._answered = time.monotonic()
        # Replicas keep their names: a new Pod of the same name has an output of its own.
        if self._pod and (now is None or now.uid != self._pod.uid):
            yield from self._leave(self._pod)
        first, self._looked = not self._looked, True
        if now is None or not now.started:
            over = self._is_over()
            if first and over and now is None and not self._output.since:
                yield self._output.gap(None, _POD_GONE)
            return over
        self._pod = now
        yield from self._output.catch_up(now)
        # The last reading of an instance comes after its end, so that nothing can be missing. An
        # instance is read in this way once: in CrashLoopBackOff a follower would get the same
        # output again and again (7,760 lines of 40).
        if now.ended and not self._output.drained:
            yield from self._drain(now)
        if self._output.drained:
            return self._is_over()
        yield from self._stream(now)
        return self._is_left_over(now)

    def _stream(self, now: Instance) -> Iterator[LogLine]:
        self._output.whole = False
        source = self._output.read(now, follow=True)
        look_at = 0.0
        try:
            while True:
                line = next(source)
                self._failures = 0
                yield line
                if time.monotonic() < look_at:
                    continue
                if self._is_left_over(now):
                    return
                look_at = time.monotonic() + self._pods.pace.look
        except StopIteration as end:
            self._output.whole = bool(end.value)
        finally:
            source.close()
            self._after = time.monotonic()  # an older look at the Pod knows less than this

    def _drain(self, now: Instance) -> Iterator[LogLine]:
        """The rest of an instance that has ended."""
        self._drains += 1
        # While the job runs, its node may come back; after the job's end a few attempts are enough.
        given_up = self._drains > _TRIES_AFTER_THE_END and self._is_over()
        readable = not given_up and (yield from self._output.read(now))
        if self._stop.is_set():
            return
        if not readable and not self._output.whole:
            yield self._output.gap(now, "the rest of its output can no longer be read")
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
        if self._ended_at is None and self._pods.job_is_over():
            self._ended_at = time.monotonic()
        return self._ended_at is not None

    def _is_left_over(self, now: Instance) -> bool:
        """Whether the container still runs, and is not stopped, a while after its job's end."""
        self._is_over()
        if self._ended_at is None or time.monotonic() - self._ended_at < self._pods.pace.linger:
            return False
        latest = self._pods.instance(self._output.replica)
        return bool(latest and latest.uid == now.uid and not (latest.leaving or latest.ended))


# --- the lines of one instance --------------------------------------------------------------------


class _Output:
    """The output of a replica: what was read of it, and how to read on.

    Attributes:
        replica: "master-0", "worker-2".
        number: the instance that is being read, within its Pod.
        whole: whether all of that instance was read, as far as its connection tells.
        drained: whether all of it was read for certain, after its end.
        since: what was written before this second is not wanted; RFC 3339, or empty.
    """

    def __init__(
        self, pods: JobPods, replica: str, since: datetime | None, stop: threading.Event
    ) -> None:
        self.replica = replica
        self.since = since.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ") if since else ""
        self._pods, self._stop = pods, stop
        self._earlier_pods = 0
        self._start()

    def leave_pod(self) -> None:
        """Prepare for lines of another Pod, whose clock may differ."""
        self._earlier_pods += self.number + 1
        self.since = ""
        self._start()

    def _start(self) -> None:
        self.number, self.whole, self.drained = 0, False, False
        self._seen, self._file, self._last = _SeenLines(), -1, ""
        self._quiet = bool(self.since)  # what is older is not missed

    def catch_up(self, now: Instance) -> Iterator[LogLine]:
        """The rest of the instances before the newest; what is lost is reported."""
        # A node keeps the newest output and the one before. While the container waits to be
        # restarted its newest output is that of the instance that has ended, and "previous" gives
        # the same.
        oldest = now.number if now.state == "waiting" else now.number - 1
        if oldest > self.number:
            # An instance of which all was read is not lost, though the node has removed it.
            lost = range(self.number + self.whole, oldest)
            self.number, self.whole, self.drained = oldest, False, False
            if lost and not self._quiet:
                yield self.gap(now, self._missing(lost))
        if now.number > self.number:
            complete = self.drained or (yield from self.read(now, before=True))
            if not (complete or self.whole or self._quiet):
                yield self.gap(now, self._missing(range(self.number, now.number)))
            self.number, self.whole, self.drained = now.number, False, False
        self._quiet = False

    def last(self, now: Instance, count: int) -> Iterator[LogLine]:
        """The last lines of the newest two instances, at least `count` if there are so many."""
        lines = deque(self.read(now, tail=count), maxlen=count)
        if len(lines) < count and now.number and now.state != "waiting":
            yield from self.read(now, before=True, tail=count - len(lines))
        yield from lines

    def read(
        self, now: Instance, *, before: bool = False, follow: bool = False, tail: int | None = None
    ) -> Generator[LogLine, None, bool]:
        """The lines of an instance, or the one before, that were not read yet.

        Returns whether its node has it, and the answer ended.
        """
        number = now.number - before
        resumed = number == self._file
        self._seen.reconnect()
        try:
            for raw in self._lines(now, before=before, follow=follow, tail=tail):
                stamp, written = stamped(raw)
                if not stamp:  # a message of the node: it has no such file any more
                    return False
                # An answer may break off in the middle of a line.
                if not raw.endswith(b"\n") and now.state == "running" and not before:
                    break  # the rest of the line comes with the next reading
                # sinceTime is cut to whole seconds by the server, so the lines of one second come
                # again.
                if not self._seen.is_new(stamp):
                    continue
                # A connection that continues repeats at least the last line. If it does not, the
                # kubelet has begun a new file (at 10 MiB), and a GET returns the current file
                # alone.
                if resumed and not self._seen.repeats:
                    yield self.gap(now, "output may be missing here: its log was rotated")
                resumed, self._file, self._last = False, number, stamp
                attempt = self._earlier_pods + number
                yield LogLine.of(self.replica, attempt, stamp, written)
        except ApiError as error:
            if error.code not in _NOT_THERE:
                raise
            return False
        return not self._stop.is_set()

    def gap(self, now: Instance | None, message: str) -> LogLine:
        """A line that says what is missing here; `now` is None if there is no Pod."""
        time = (now and moment(now.created)) or datetime.now(UTC)
        # As old as the last line, so that views which sort by time show the gap at its place.
        stamp = self._last or f"{time.astimezone(UTC).isoformat()[:19]}.000000000Z"
        attempt = self._earlier_pods + self.number
        return LogLine(self.replica, attempt, stamp, f"k8sjob: {self.replica}: {message}", gap=True)

    def _lines(
        self, now: Instance, *, before: bool, follow: bool, tail: int | None
    ) -> Iterator[bytes]:
        query = {"container": now.container, "timestamps": "true"}
        if tail is not None:
            query["tailLines"] = str(tail)
        # sinceTime is a moment by the node's own clock, as the stamps are. The server refuses it
        # together with sinceSeconds (422).
        if since := (tail is None and self._seen.since) or self.since:
            query["sinceTime"] = since
        query |= {"previous": "true"} if before else {"follow": "true"} if follow else {}
        where = path("pods", self._pods.ref.namespace, now.pod, "log")
        idle = self._pods.pace.idle
        return self._pods.transport.stream(where, query=query, idle=idle, stop=self._stop)

    def _missing(self, numbers: range) -> str:
        first, last = (self._earlier_pods + numbers[end] for end in (0, -1))
        attempts = f"attempt {first}" if first == last else f"attempts {first} to {last}"
        return f"output of {attempts} is missing here: its node has not kept it"


class _SeenLines:
    """The lines that were read in the last two seconds of a Pod's output that had any.

    A new connection can only ask for whole seconds, and repeats their lines. Lines of stdout and
    stderr may be in the file a little out of order, so each timestamp is counted.

    Attributes:
        repeats: whether this connection has repeated a line.
    """

    def __init__(self) -> None:
        self.repeats = False
        self._seconds: dict[str, dict[str, int]] = {}  # the count of each timestamp
        self._repeated: dict[str, dict[str, int]] = {}

    @property
    def since(self) -> str:
        """The time to continue reading from; empty for the beginning."""
        return f"{min(self._seconds)}Z" if self._seconds else ""

    def reconnect(self) -> None:
        """The next lines come from `since` on, again."""
        self._repeated = {second: stamps.copy() for second, stamps in self._seconds.items()}
        self.repeats = False

    def is_new(self, stamp: str) -> bool:
        """Whether a line was not read yet; from now on it was."""
        second = stamp[:19]
        repeated = self._repeated.get(second)
        if repeated and repeated.get(stamp):
            repeated[stamp] -= 1
            self.repeats = True
            return False
        counts = self._seconds.get(second)
        if counts is None:
            if len(self._seconds) > 1:
                del self._seconds[min(self._seconds)]
            counts = self._seconds[second] = {}
        counts[stamp] = counts.get(stamp, 0) + 1
        return True


def stamped(raw: bytes) -> tuple[str, bytes]:
    """A line's timestamp, in UTC, and what was written; no timestamp where it has none."""
    match = _STAMP.match(raw)
    second = _in_utc(match[1], match[3]) if match else ""
    if not (match and second):
        return "", b""
    # Always with nine digits, so that stamps can be compared as text.
    return f"{second}.{(match[2] or b'').decode():0<9}Z", raw[match.end() :]


@lru_cache(64)  # thousands of lines may have the same
def _in_utc(second: bytes, zone: bytes) -> str:
    """A second of a node, whose containers' logs may be in another time zone; empty for none."""
    time = moment((second + zone).decode())
    return time.astimezone(UTC).isoformat()[:19] if time else ""

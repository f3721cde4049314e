"""One container's output, read over one connection after another without a line twice.

What is read is always one *instance*: the n-th start of the container in one Pod. An apiserver
gives that of the newest, and of the one before it while the newest runs.
"""

from __future__ import annotations

import re
from collections import Counter, deque
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Final

from k8sjob.backends.api import LogLine
from k8sjob.backends.paths import path
from k8sjob.backends.transport import ApiError
from k8sjob.contract import CONTAINER_NAME

if TYPE_CHECKING:
    import threading
    from collections.abc import Generator, Iterator

    from k8sjob.backends.cluster.pods import Instance
    from k8sjob.backends.transport import Transport

__all__ = ["Output", "stamped"]

_NOT_THERE: Final = frozenset({400, 404})
_STAMP: Final = re.compile(rb"(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d)(?:\.(\d+))?(Z|[+-]\d\d:\d\d) ")


class Output:
    """The output of a replica: what was given of it, and how to read on.

    Attributes:
        replica: "master-0", "worker-2".
        number: the instance that is being read, within its Pod.
        whole: whether all of that instance was given, as far as its connection tells.
        drained: whether all of it was given for certain: it was read after its end.
        since: what was written before this second is not wanted; RFC 3339, or empty.
    """

    def __init__(
        self,
        transport: Transport,
        namespace: str,
        replica: str,
        *,
        since: datetime | None,
        idle: float,
        stop: threading.Event,
    ) -> None:
        self.replica = replica
        self.since = since.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ") if since else ""
        self._transport = transport
        self._namespace = namespace
        self._idle, self._stop = idle, stop
        self._earlier_pods = 0
        self._start()

    def leave_pod(self) -> None:
        """What comes next is of another Pod: its clock may be another one."""
        self._earlier_pods += self.number + 1
        self.since = ""
        self._start()

    def _start(self) -> None:
        self.number, self.whole, self.drained = 0, False, False
        self._given, self._file, self._last = _Given(), -1, ""
        self._quiet = bool(self.since)  # what lies before it is not missed

    def catch_up(self, now: Instance) -> Iterator[LogLine]:
        """What is left of the instances before the newest; what is gone is told."""
        oldest = now.number if now.state == "waiting" else now.number - 1
        if oldest > self.number:
            lost = range(self.number + self.whole, oldest)
            self.number, self.whole, self.drained = oldest, False, False
            if lost and not self._quiet:
                yield self.gap(now, self._missing(lost))
        if now.number > self.number:
            known = self.drained or (yield from self._before(now)) or self.whole or self._quiet
            if not known:
                yield self.gap(now, self._missing(range(self.number, now.number)))
            self.number, self.whole, self.drained = now.number, False, False
        self._quiet = False

    def _before(self, now: Instance) -> Generator[LogLine, None, bool]:
        if self._quiet and now.previous_to and now.previous_to < self.since:
            return True
        return (yield from self.read(now, before=True))

    def last(self, now: Instance, count: int) -> Iterator[LogLine]:
        """The last lines of the newest two instances, at least `count` if there are so many."""
        lines = deque(self.read(now, tail=count), maxlen=count)
        if len(lines) < count and now.number and now.state != "waiting":
            yield from self.read(now, before=True, tail=count - len(lines))
        yield from lines

    def read(
        self, now: Instance, *, before: bool = False, follow: bool = False, tail: int | None = None
    ) -> Generator[LogLine, None, bool]:
        """What was not given yet of an instance; whether the node has it, and the answer ended.

        Args:
            now: the newest instance.
            before: the one before it instead.
            follow: until the answer ends.
            tail: the last lines alone.

        Raises:
            ApiError: the connection broke, or the request is refused.
        """
        number = now.number - before
        resumed = number == self._file
        self._given.reconnect()
        try:
            for raw in self._lines(now, before=before, follow=follow, tail=tail):
                stamp, written = stamped(raw)
                if not stamp:  # the node's own words: it has no such file any more
                    return False
                if not raw.endswith(b"\n") and now.state == "running" and not before:
                    break  # the rest of the line comes with the next reading
                if not self._given.takes(stamp):
                    continue
                if resumed and not self._given.met:
                    yield self.gap(now, "output may be missing here: its log was rotated")
                resumed, self._file, self._last = False, number, stamp
                attempt = self._earlier_pods + number
                yield LogLine.of(self.replica, attempt, stamp, written)
        except ApiError as error:
            if error.code not in _NOT_THERE:
                raise
            return False
        return not self._stop.is_set()

    def gap(self, now: Instance | None, words: str) -> LogLine:
        """A line that says what is missing here; `now` is None where there is no Pod."""
        made = now.made if now else datetime.now(UTC).isoformat()
        stamp = self._last or f"{made[:19]}.000000000Z"
        attempt = self._earlier_pods + self.number
        return LogLine(self.replica, attempt, stamp, f"k8sjob: {self.replica}: {words}", gap=True)

    def _lines(
        self, now: Instance, *, before: bool, follow: bool, tail: int | None
    ) -> Iterator[bytes]:
        query = {"container": CONTAINER_NAME, "timestamps": "true"}
        if tail is not None:
            query["tailLines"] = str(tail)
        if since := (tail is None and self._given.since) or self.since:
            query["sinceTime"] = since
        query |= {"previous": "true"} if before else {"follow": "true"} if follow else {}
        where = path("pods", self._namespace, now.pod, "log")
        return self._transport.stream(where, query=query, idle=self._idle, stop=self._stop)

    def _missing(self, numbers: range) -> str:
        first, last = (self._earlier_pods + numbers[end] for end in (0, -1))
        attempts = f"attempt {first}" if first == last else f"attempts {first} to {last}"
        return f"output of {attempts} is missing here: its node has not kept it"


class _Given:
    """What was given of a Pod's output in its last two seconds that had any.

    A new connection can ask for whole seconds alone, and repeats them. The lines of stdout and
    stderr may stand in the file a little out of order, so each is known by itself.

    Attributes:
        met: whether this connection has shown a line that was given before it.
    """

    def __init__(self) -> None:
        self.met = False
        self._seconds: dict[str, Counter[str]] = {}
        self._known: dict[str, Counter[str]] = {}

    @property
    def since(self) -> str:
        """From where to read on; empty for the beginning."""
        return f"{min(self._seconds)}Z" if self._seconds else ""

    def reconnect(self) -> None:
        """The next lines come from `since` on, again."""
        self._known = {second: stamps.copy() for second, stamps in self._seconds.items()}
        self.met = False

    def takes(self, stamp: str) -> bool:
        """Whether a line was not given yet; it counts as given from now on."""
        second = stamp[:19]
        known = self._known.get(second)
        if known and known[stamp]:
            known[stamp] -= 1
            self.met = True
            return False
        if second not in self._seconds and len(self._seconds) > 1:
            del self._seconds[min(self._seconds)]
        self._seconds.setdefault(second, Counter())[stamp] += 1
        return True


def stamped(raw: bytes) -> tuple[str, bytes]:
    """A line's timestamp, in UTC, and what was written; no timestamp where it carries none."""
    match = _STAMP.match(raw)
    if not match:
        return "", b""
    second, fraction, zone = (part.decode() if part else "" for part in match.groups())
    if zone != "Z":  # a node whose containers' logs are in another time zone
        second = datetime.fromisoformat(second + zone).astimezone(UTC).isoformat()[:19]
    return f"{second}.{fraction:0<9}Z", raw[match.end() :]

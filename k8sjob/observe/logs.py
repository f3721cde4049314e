"""The output of a job's replicas: chosen, cut to size, and put in one order."""

from __future__ import annotations

import heapq
from collections import deque
from contextlib import suppress
from datetime import datetime
from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING, Final, TypeVar

from k8sjob.backends.api import JobRef, LogLine
from k8sjob.contract import counted
from k8sjob.errors import BackendError, JobNotFound
from k8sjob.findings import listed
from k8sjob.kube.objects import Pod
from k8sjob.observe.merge import Merge
from k8sjob.observe.status import processes
from k8sjob.targets.jobs import replica_names, replica_order
from k8sjob.threads import run_parallel

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
    from threading import Event

    from k8sjob.backends.api import Backend, Snapshot
    from k8sjob.kube.objects import Json
    from k8sjob.targets.api import Job

S = TypeVar("S")
T = TypeVar("T")

TAIL_LINES: Final = 200
"""Last lines of each replica that are enough to explain why it ended."""
_EXCERPT: Final = 4096
"""Characters of a line that a diagnosis reads: its patterns take longer than linear time."""
MOST_AT_ONCE: Final = 32
"""Replicas that are followed, or read side by side: each is a connection, or a kubectl."""
_READERS: Final = 8
"""Replicas whose last lines are requested at the same time."""
_timestamp: Final = attrgetter("timestamp")


def logs(
    backend: Backend,
    ref: JobRef,
    replicas: Sequence[str],
    *,
    follow: bool = False,
    previous: bool = False,
    since: datetime | None = None,
    tail: int | None = None,
    fits: Callable[[LogLine], bool] | None = None,
) -> Iterator[LogLine]:
    """The output of the chosen replicas.

    Without `follow` the lines of all replicas come in the order of their timestamps; those of more
    than MOST_AT_ONCE replicas come one replica after the other, unless `tail` is given. With
    `follow` they come in the order in which they arrive, until the job ends, of the first
    MOST_AT_ONCE replicas. Lines are as the job wrote them: control sequences are the view's to
    strip.

    With `previous` only each replica's attempt before its last one is read, and nothing is waited
    for; `since` leaves out what was written before that moment (with a time zone), and `tail` all
    but so many of the last lines of each replica. `fits` is asked for each line before `tail`
    counts it, except for marks of gaps, which are part of every choice.

    Raises:
        BackendError: a replica's output cannot be read.
    """

    def read(replica: str) -> Iterator[LogLine]:
        # The last lines that fit may be anywhere.
        last = None if fits else tail
        lines = backend.logs(ref, replica, previous=previous, tail=last, since=since)
        return _chosen(lines, since, fits)

    if follow and not previous:
        yield from _followed(backend, ref, replicas[:MOST_AT_ONCE], since, tail, fits=fits)
    elif tail is not None:
        ends = in_parallel(lambda replica: deque(read(replica), tail), replicas)
        yield from heapq.merge(*ends, key=_timestamp)
    elif len(replicas) <= MOST_AT_ONCE:
        yield from heapq.merge(*map(read, replicas), key=_timestamp)
    else:
        for replica in replicas:
            yield from read(replica)


def _followed(
    backend: Backend,
    ref: JobRef,
    replicas: Sequence[str],
    since: datetime | None,
    tail: int | None,
    *,
    fits: Callable[[LogLine], bool] | None,
) -> Iterator[LogLine]:
    # First the last lines of all replicas, merged by time; then each is followed from its own end.
    # The time alone does not say where that is, as several lines may have the same: see _End.
    ends = {replica: _End() for replica in replicas}

    def last_lines(replica: str) -> deque[LogLine]:
        # One line at least, to know where to continue.
        last = None if fits and tail else max(tail or 0, 1)
        lines = backend.logs(ref, replica, tail=last, since=since)
        return deque(_chosen(ends[replica].before(lines), since, fits), tail)

    def follow(replica: str, stop: Event) -> Iterator[LogLine]:
        end = ends[replica]
        begin = datetime.fromisoformat(end.stamp) if end.stamp else since
        lines = backend.logs(ref, replica, follow=True, since=begin, stop=stop)
        return _chosen(end.after(lines), since, fits)

    if tail is not None:
        yield from heapq.merge(*in_parallel(last_lines, replicas), key=_timestamp)
    with Merge[LogLine]() as merge:
        for replica in replicas:
            merge.add(replica, partial(follow, replica))
        while merge.open:
            item = merge.get()
            if isinstance(item, LogLine):
                yield item
            elif item and item.error and not isinstance(item.error, JobNotFound):
                raise item.error


def last_lines(backend: Backend, snapshot: Snapshot) -> dict[str, list[str]]:
    """The end of each replica's output, for `diagnose`; without those that cannot be read.

    Of a job of more than MOST_AT_ONCE replicas so many are read: the first that ended with each
    exit code, then those that ended badly in the order of their ends, then the others.
    """
    ref, pods = JobRef.of(snapshot.job), snapshot.pods_by_replica
    ends = {name: Pod(pod).terminated or Pod(pod).terminated_before for name, pod in pods.items()}
    bad = [name for name, end in ends.items() if end.get("exitCode")]
    bad.sort(key=lambda name: str(ends[name].get("finishedAt")))
    # One that ended in its own way may be the cause, however many ended before it.
    first_by_code: dict[int, str] = {}
    for name in bad:
        first_by_code.setdefault(ends[name]["exitCode"], name)
    names = (*first_by_code.values(), *bad, *replica_names(snapshot.job)[:MOST_AT_ONCE])
    chosen = sorted(list(dict.fromkeys(names))[:MOST_AT_ONCE], key=replica_order)

    def tail(replica: str) -> list[str] | None:
        with suppress(BackendError):
            return tail_lines(backend, ref, replica, pods)
        return None

    tails = zip(chosen, in_parallel(tail, chosen), strict=True)
    return {replica: lines for replica, lines in tails if lines is not None}


def tail_lines(backend: Backend, ref: JobRef, replica: str, pods: Mapping[str, Json]) -> list[str]:
    """Excerpts of a replica's last lines, TAIL_LINES at most, without gaps; see Backend.logs."""
    lines = backend.logs(ref, replica, tail=TAIL_LINES, pods=pods)
    return list(deque((Excerpt.of(line) for line in lines if not line.gap), maxlen=TAIL_LINES))


class Excerpt(str):
    """A line as a diagnosis reads it: the beginning and the end of a very long one.

    Attributes:
        timestamp: when it was written, as that of a LogLine.
    """

    __slots__ = ("timestamp",)
    timestamp: str

    @property
    def time(self) -> float:
        """Seconds since the epoch at which it was written."""
        return datetime.fromisoformat(self.timestamp).timestamp()

    @classmethod
    def of(cls, line: LogLine) -> Excerpt:
        """The excerpt of a line."""
        text = line.text
        if len(text) > _EXCERPT:
            text = f"{text[: _EXCERPT // 2]} ... {text[-_EXCERPT // 2 :]}"
        excerpt = cls(text)
        excerpt.timestamp = line.timestamp
        return excerpt


def select(job: Job, replicas: Sequence[str] = (), ranks: Sequence[int] = ()) -> tuple[str, ...]:
    """The names of the chosen replicas, in the job's order; all of them when none is named.

    They are chosen by names ("master-0"), their beginnings ("worker"), or the ranks of their
    processes.

    Raises:
        BackendError: the job has no such replica or rank.
    """
    names = replica_names(job)
    chosen = {replica_of_rank(job, rank) for rank in ranks}
    for prefix in replicas:
        matching = {name for name in names if f"{name}-".startswith(f"{prefix.lower()}-")}
        if not matching:
            raise BackendError(f"{prefix!r} is not a replica of this job; it has {listed(names)}")
        chosen |= matching
    return tuple(name for name in names if name in chosen or not chosen)


def replica_of_rank(job: Job, rank: int) -> str:
    """The name of the replica that runs a process rank: ranks follow the replicas in their order.

    Raises:
        BackendError: the job has no such rank.
    """
    if not job.has_ranks:
        raise BackendError("its pods have no ranks: not each has an index and runs torchrun")
    names, (first, each) = replica_names(job), processes(job)
    total = first + each * (len(names) - 1)
    if not 0 <= rank < total:
        shape = f"{counted(len(names), 'replica')} x {counted(each, 'process', 'es')}"
        if first != each:
            shape = (
                f"{counted(first, 'process', 'es')} of {names[0]} and {len(names) - 1} x"
                f" {each} others"
            )
        raise BackendError(f"rank {rank} is not in this job; {shape} give ranks 0 to {total - 1}")
    return str(names[0 if rank < first else 1 + (rank - first) // each])


class _End:
    """Where the last lines of a replica end, and following it continues."""

    stamp = ""  # of the last line
    _ties = 0  # lines with that stamp: several may have the same

    def before(self, lines: Iterable[LogLine]) -> Iterator[LogLine]:
        """The last lines, all of which are to be taken."""
        for line in lines:
            self._ties = self._ties + 1 if line.timestamp == self.stamp else 1
            self.stamp = line.timestamp
            yield line

    def after(self, lines: Iterable[LogLine]) -> Iterator[LogLine]:
        """Those of the lines that come after the last one; from the first on all of them."""
        ties, passed = self._ties, not self.stamp
        for line in lines:
            if not passed and line.timestamp <= self.stamp:
                ties -= line.timestamp == self.stamp
                if line.timestamp < self.stamp or ties >= 0:
                    continue
            passed = True
            yield line


def _chosen(
    lines: Iterator[LogLine], since: datetime | None, fits: Callable[[LogLine], bool] | None
) -> Iterator[LogLine]:
    if since is not None:
        lines = (line for line in lines if datetime.fromisoformat(line.timestamp) >= since)
    return (line for line in lines if line.gap or fits(line)) if fits else lines


def in_parallel(function: Callable[[S], T], sources: Sequence[S]) -> list[T]:
    """The results of a function for each replica or job, several at a time."""
    return run_parallel([partial(function, source) for source in sources], _READERS)

"""The output of a job's replicas: chosen, cut to size, and put in one order."""

from __future__ import annotations

import heapq
from collections import deque
from contextlib import suppress
from datetime import UTC, datetime
from functools import partial
from typing import TYPE_CHECKING, Final

from k8sjob.backends.api import LogLine
from k8sjob.errors import BackendError, JobNotFound
from k8sjob.lifecycle.funnel import Ended, Funnel
from k8sjob.lifecycle.status import replica_names

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from threading import Event

    from k8sjob.backends.api import Backend, JobRef, Json

__all__ = ["TAIL_LINES", "instant", "last_lines", "logs", "replica_of_rank", "select"]


TAIL_LINES: Final = 200
"""So many last lines of each replica are enough to say why it ended."""


def logs(
    backend: Backend,
    ref: JobRef,
    *,
    replicas: Sequence[str] = (),
    ranks: Sequence[int] = (),
    follow: bool = False,
    previous: bool = False,
    since: datetime | None = None,
    tail: int | None = None,
) -> Iterator[LogLine]:
    """What the chosen replicas wrote.

    Without `follow` the lines of all replicas come in the order of their timestamps; with `follow`
    in the order in which they arrive, until the job ends. Lines are as the job wrote them: control
    sequences are the view's to strip.

    Args:
        backend: where the job lives.
        ref: the job.
        replicas: names ("master-0") or roles ("worker"); together with `ranks` empty: all.
        ranks: process ranks; the replicas that run them are added.
        follow: wait for more until the job ends.
        previous: each replica's attempt before its last one alone.
        since: leave out what was written before this moment (with a time zone).
        tail: only this many of the last lines of each replica, then what follows.

    Raises:
        JobNotFound: there is no such job.
        BackendError: the job has no such replica or rank.
    """
    chosen = select(backend.snapshot(ref).job, replicas, ranks)

    def of(replica: str, stop: Event | None = None, *, wait: bool = False) -> Iterator[LogLine]:
        lines = backend.logs(ref, replica, follow=wait, previous=previous, stop=stop)
        return (line for line in lines if since is None or instant(line.timestamp) >= since)

    if not follow:
        parts = (_last(of(replica), tail) for replica in chosen)
        yield from heapq.merge(*parts, key=lambda line: line.timestamp)
        return
    skip = {replica: _older(of(replica), tail) for replica in chosen}
    with Funnel[LogLine]() as funnel:
        for replica in chosen:
            funnel.add(replica, partial(of, replica, wait=True))
        while funnel.open:
            item = funnel.get()
            if isinstance(item, Ended):
                if item.error and not isinstance(item.error, JobNotFound):
                    raise item.error
            elif item and skip[item.replica]:
                skip[item.replica] -= 1
            elif item:
                yield item


def last_lines(backend: Backend, ref: JobRef, job: Json) -> dict[str, list[str]]:
    """The end of each replica's output, for `diagnose`; without those that cannot be read."""
    tails = {}
    for replica in replica_names(job):
        with suppress(BackendError):
            lines = deque(backend.logs(ref, replica), maxlen=TAIL_LINES)
            tails[replica] = [line.text for line in lines]
    return tails


def select(job: Json, replicas: Sequence[str] = (), ranks: Sequence[int] = ()) -> tuple[str, ...]:
    """The names of the chosen replicas, in the job's order; all of them when none is named.

    Raises:
        BackendError: the job has no such replica or rank.
    """
    every = replica_names(job)
    wanted = {replica_of_rank(job, rank) for rank in ranks}
    for name in replicas:
        matching = {one for one in every if name.lower() in (one, one.rpartition("-")[0])}
        if not matching:
            raise BackendError(f"{name!r} is no replica of this job; it has {', '.join(every)}")
        wanted |= matching
    return tuple(name for name in every if name in wanted or not wanted)


def replica_of_rank(job: Json, rank: int) -> str:
    """The name of the replica that runs a process rank: node rank = rank // nproc_per_node.

    Raises:
        BackendError: the job has no such rank.
    """
    every = replica_names(job)
    each = 1
    with suppress(ValueError):  # "auto", "gpu" and "cpu" count as 1, as the operator does it
        each = int(job.get("spec", {}).get("nprocPerNode", 1))
    if not 0 <= rank < len(every) * each:
        raise BackendError(
            f"rank {rank} is not in this job; {len(every)} replicas x {each} processes give "
            f"ranks 0 to {len(every) * each - 1}"
        )
    return every[rank // each]


def instant(timestamp: str) -> datetime:
    """The moment of an RFC 3339 timestamp, to the microsecond (nanoseconds are cut off)."""
    head, dot, rest = timestamp.rstrip("Z").partition(".")
    return datetime.fromisoformat(head + dot + rest[:6].ljust(6, "0") * bool(dot)).replace(
        tzinfo=UTC
    )


def _last(lines: Iterable[LogLine], tail: int | None) -> Iterable[LogLine]:
    return lines if tail is None else deque(lines, maxlen=max(tail, 0))


def _older(lines: Iterable[LogLine], tail: int | None) -> int:
    """How many lines lie before the last `tail` ones now."""
    return 0 if tail is None else max(sum(1 for _ in lines) - tail, 0)

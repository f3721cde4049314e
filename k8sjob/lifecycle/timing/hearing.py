"""What the output of replicas tells of their way to the first training step."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from itertools import islice
from typing import TYPE_CHECKING, Any, Final

from k8sjob.backends.api import JobRef
from k8sjob.contract import Event, EventKind
from k8sjob.errors import BackendError
from k8sjob.lifecycle.logs import MOST_AT_ONCE, instant
from k8sjob.lifecycle.status import replica_names, speaker
from k8sjob.lifecycle.timing.moments import Heard, last_to_start

if TYPE_CHECKING:
    from collections.abc import Generator, Iterable

    from k8sjob.backends.api import Backend, LogLine, Snapshot

__all__ = ["hear", "listen"]

MOST_LINES: Final = 20_000
"""Output in which no step is told by then tells of none."""
_READERS: Final = 8
_LONGEST: Final = 1e7
"""Seconds; a longer time is not believed, whoever told it."""


def hear(backend: Backend, snapshot: Snapshot) -> dict[str, Heard]:
    """Read the beginnings of a job's output, by replica; without what cannot be read.

    Of the first rank that trains it is read up to its first step, of the others the first line
    alone, and of more than MOST_AT_ONCE replicas the output of those that started last.
    """
    job = snapshot.job
    names, first = replica_names(job), speaker(job)
    elastic = job.get("spec", {}).get("elasticPolicy") is not None  # any may have rank 0 then
    chosen = [first, *(name for name in last_to_start(snapshot) if name != first)]
    ref = JobRef.of(job)

    def read(name: str) -> Heard | None:
        try:
            with closing(_lines(backend, ref, name)) as lines:
                return listen(lines if elastic or name == first else islice(lines, 1))
        except BackendError:
            return None

    with ThreadPoolExecutor(_READERS) as pool:
        found = dict(zip(chosen, pool.map(read, chosen[:MOST_AT_ONCE]), strict=False))
    return {name: heard for name in names if (heard := found.get(name)) and heard.first_line}


def _lines(backend: Backend, ref: JobRef, replica: str) -> Generator[LogLine, None, None]:
    """A replica's lines, without those that tell of a gap."""
    for line in backend.logs(ref, replica):
        if not line.gap:
            yield line


def listen(lines: Iterable[LogLine]) -> Heard:
    """What lines tell; no more of them are taken than it needs."""
    heard = Heard()
    for line in islice(lines, MOST_LINES):
        now = instant(line.timestamp).timestamp()
        if heard.first_line is None or line.attempt != heard.attempt:
            heard = Heard(first_line=now, attempt=line.attempt)
        event = Event.decode(line.text)
        if event and event.kind == EventKind.PROGRESS:
            return replace(heard, step=now)
        if event and event.kind == EventKind.STARTED:
            heard = _met(heard, now, event.data)
    return heard


def _met(heard: Heard, now: float, told: dict[str, Any]) -> Heard:
    """The kubelet's clock says when; the runtime says for how long."""
    waited, imported = _seconds(told.get("rendezvous_s")), _seconds(told.get("import_s"))
    opened = None if waited is None else now - waited
    began = None if opened is None or imported is None else opened - imported
    return replace(heard, met=now, imported=opened, began=began)


def _seconds(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if 0 <= value < _LONGEST else None

"""Many jobs while they run: what changes about each of them.

Memory is needed for the jobs that have not ended: of the others a number is kept until they are
deleted.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, Final

from k8sjob.backends.api import Snapshot
from k8sjob.contract import Event, EventKind
from k8sjob.kube.client.listwatch import Kind
from k8sjob.observe.status import job_status
from k8sjob.observe.watch import job_data, warning
from k8sjob.targets.api import JobState

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable, Iterable, Iterator

    from k8sjob.kube.client.listwatch import Change
    from k8sjob.observe.status import JobStatus

__all__ = ["poll_all", "watch_all"]

_LOOK_SECONDS: Final = 0.5


def watch_all(changes: Iterable[Change]) -> Iterator[Event]:
    """The jobs that have not ended, and then whatever happens to any job.

    A JOB event's data has `namespace`, `name` and `counts` (replicas by phase) beside what that of
    a single job has. A connection that is lost, and is back, is a WARNING.

    Args:
        changes: of a back end's jobs, see ClusterBackend.watch_jobs.

    Raises:
        BackendError: the jobs cannot be read any more.
    """
    reported: dict[str, int] = {}
    synced = False
    lost_at = 0.0
    for change in changes:
        match change.kind:
            case Kind.ADDED | Kind.MODIFIED:
                yield from _changed(reported, job_status(Snapshot(change.object)), quiet=not synced)
            case Kind.DELETED:
                yield from _deleted(reported, job_status(Snapshot(change.object)))
            case Kind.SYNCED:
                synced = True
            case Kind.LOST:
                lost_at = time.monotonic()
                yield warning(f"the connection to the cluster is lost, trying again: {change.why}")
            case Kind.RESTORED:
                away = time.monotonic() - lost_at
                yield warning(f"the connection to the cluster is back after {away:.0f} s")


def poll_all(jobs: Callable[[], Iterable[Snapshot]], stop: threading.Event) -> Iterator[Event]:
    """What watch_all reports, by looking again and again, until `stop` is set.

    Args:
        jobs: all jobs there are now.
        stop: ends the iteration within a second.
    """
    reported: dict[str, int] = {}
    seen: dict[str, JobStatus] = {}
    quiet = True
    while not stop.is_set():
        now = {status.ref.uid: status for status in map(job_status, jobs())}
        for uid in seen.keys() - now.keys():
            yield from _deleted(reported, seen[uid])
        for status in now.values():
            yield from _changed(reported, status, quiet=quiet)
        seen, quiet = now, False
        stop.wait(_LOOK_SECONDS)


def _changed(reported: dict[str, int], status: JobStatus, *, quiet: bool) -> Iterator[Event]:
    """What is new about a job; nothing of one that had ended before the watch began."""
    counts = tuple(sorted(status.counts.items()))
    now = hash((status.state, status.reason, status.message, counts))
    if reported.get(status.ref.uid) == now:
        return
    reported[status.ref.uid] = now
    if not (quiet and status.state.finished):
        yield Event(EventKind.JOB, _data(status), time.time())


def _deleted(reported: dict[str, int], status: JobStatus) -> Iterator[Event]:
    if reported.pop(status.ref.uid, None) is not None:
        state = JobState.DELETED
        gone = {"state": str(state), "reason": "", "exit_code": state.exit_code, "counts": {}}
        message = "the job was deleted"
        yield Event(EventKind.JOB, _data(status) | gone | {"message": message}, time.time())


def _data(status: JobStatus) -> dict[str, Any]:
    where = {"namespace": status.ref.namespace, "name": status.ref.name}
    return where | job_data(status) | {"counts": dict(status.counts)}

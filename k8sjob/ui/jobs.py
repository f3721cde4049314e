"""The jobs of all places that the page shows.

The jobs on this machine are read when somebody asks for news; those of a cluster are listed and
watched by a thread without their Pods, so that thousands cost one connection a kind of job.
"""

from __future__ import annotations

import threading
import time
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from typing import TYPE_CHECKING, Any, Final

from k8sjob.backends.api import LOCAL, JobRef, Snapshot
from k8sjob.errors import BackendError
from k8sjob.kube.client.listwatch import Kind
from k8sjob.kube.objects import MANAGED_BY, outline
from k8sjob.observe.status import job_status
from k8sjob.targets.jobs import job_of
from k8sjob.view.json_output import state_document

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from k8sjob.backends.api import Backend
    from k8sjob.backends.cluster.backend import ClusterBackend
    from k8sjob.kube.client.listwatch import CollectionChange
    from k8sjob.targets.api import Job

_LOCAL_SECONDS: Final = 1.0
"""Seconds between checks of the jobs on this machine, at least."""
_PAUSE: Final = 9
"""Times the duration of a check: many jobs take a tenth of a core."""
RETRY_SECONDS: Final = 5.0
"""Until a cluster that refused is asked again."""
_NEW_SECONDS: Final = 5.0
CLUSTER: Final = "cluster"


@dataclass(frozen=True, slots=True)
class JobEntry:
    """A job on the page.

    Attributes:
        key: what its address on the page is made of: its place and its uid.
        backend: where it lives.
        snapshot: its objects, as far as a list has them.
        row: what the list shows of it, as JSON.
        version: larger than that of any earlier row.
    """

    key: str
    backend: Backend
    snapshot: Snapshot
    row: dict[str, Any]
    version: int

    @property
    def ref(self) -> JobRef:
        """The reference to the job."""
        return JobRef.of(self.snapshot.job)


class Jobs:
    """All jobs of the page.

    Args:
        local: this machine; None: its jobs are not shown.
        cluster: the cluster; None: there is none.
        records: jobs of records.
        all_namespaces: the cluster's jobs of all namespaces.

    Attributes:
        problems: why a place cannot be read now, by its name.
        closed: set when the places are not read any more.
    """

    def __init__(
        self,
        local: Backend | None,
        cluster: ClusterBackend | None = None,
        records: Sequence[Backend] = (),
        *,
        all_namespaces: bool = False,
    ) -> None:
        self._local, self._cluster, self._all = local, cluster, all_namespaces
        self.problems: dict[str, str] = {}
        self._entries: dict[str, JobEntry] = {}
        self._unread = set() if cluster is None else {CLUSTER}
        self._versions = count(1)
        self._lock = threading.RLock()
        self._read_local_again = 0.0  # time.monotonic()
        self.closed = threading.Event()
        for number, backend in enumerate(records):
            self._replace(f"record-{number}", backend, backend.jobs())

    def start(self) -> None:
        """Read the cluster from now on."""
        threading.Thread(target=self._follow_cluster, name="cluster", daemon=True).start()

    def close(self) -> None:
        """Stop to read it."""
        self.closed.set()

    def find(self, key: str) -> JobEntry | None:
        """The job of a key."""
        return self._entries.get(key)

    def await_job(self, key: str) -> None:
        """Wait until a new job has been read, for some seconds at most."""
        until = time.monotonic() + _NEW_SECONDS
        while key not in self._entries and time.monotonic() < until:
            self._read_local()
            self.closed.wait(0.1)

    def news(self, versions: dict[str, int]) -> dict[str, Any]:
        """What has changed for a reader, who then has seen it.

        It has `jobs` (rows), `gone` (keys), `problems`, and `unread`: places whose first list has
        not come.

        Args:
            versions: the version of each key that the reader has; it is brought up to date.
        """
        self._read_local()
        with self._lock:
            entries = dict(self._entries)
        gone = [key for key in versions if key not in entries]
        for key in gone:
            del versions[key]
        changed = [entry for entry in entries.values() if versions.get(entry.key) != entry.version]
        versions.update((entry.key, entry.version) for entry in changed)
        rows = [entry.row for entry in changed]
        unread = sorted(self._unread - self.problems.keys())
        return {"jobs": rows, "gone": gone, "problems": dict(self.problems), "unread": unread}

    # --- the places -------------------------------------------------------------------------------

    def _read_local(self) -> None:
        """Read the jobs on this machine, unless that was done just now."""
        with self._lock:
            if self._local is None or time.monotonic() < self._read_local_again:
                return
            begun = time.thread_time()
            with self._problem(LOCAL):
                self._replace(LOCAL, self._local, self._local.jobs())
            pause = max(_LOCAL_SECONDS, _PAUSE * (time.thread_time() - begun))
            self._read_local_again = time.monotonic() + pause

    def _follow_cluster(self) -> None:
        if self._cluster is None:
            return
        while not self.closed.is_set():
            with self._problem(CLUSTER):
                changes = self._cluster.watch_jobs(stop=self.closed, all_namespaces=self._all)
                self._take(changes, self._cluster)
            self.closed.wait(RETRY_SECONDS)

    def _take(self, changes: Iterable[CollectionChange], backend: ClusterBackend) -> None:
        # The jobs of this watch's first list; None once it is complete. A watch that is opened
        # again lists all jobs, and what is not among them is gone.
        listed: set[str] | None = set()
        for change in changes:
            match change.kind:
                case Kind.ADDED | Kind.MODIFIED:
                    job = job_of(outline(change.object))  # there are thousands
                    snapshot = Snapshot(job, skew=backend.transport.skew)
                    key = self._put(CLUSTER, backend, snapshot)
                    if listed is not None:
                        listed.add(key)
                case Kind.DELETED:
                    with self._lock:
                        self._entries.pop(key_of(CLUSTER, job_of(change.object)), None)
                case Kind.SYNCED:
                    self._unread.discard(CLUSTER)
                    self.problems.pop(CLUSTER, None)
                    if listed is not None:
                        self._keep(CLUSTER, listed)
                    listed = None
                case Kind.LOST:
                    self.problems[CLUSTER] = f"the connection is lost, trying again: {change.why}"
                case Kind.RESTORED:
                    self.problems.pop(CLUSTER, None)

    # --- the rows ---------------------------------------------------------------------------------

    def _replace(self, place: str, backend: Backend, snapshots: Iterable[Snapshot]) -> None:
        self._keep(place, {self._put(place, backend, snapshot) for snapshot in snapshots})

    def _keep(self, place: str, keys: set[str]) -> None:
        with self._lock:
            for key in list(self._entries):
                if key.startswith(f"{place}:") and key not in keys:
                    del self._entries[key]

    def _put(self, place: str, backend: Backend, snapshot: Snapshot) -> str:
        key = key_of(place, snapshot.job)
        before = self._entries.get(key)
        if before and before.snapshot is snapshot:  # of hundreds, few have changed
            return key
        status = job_status(snapshot)
        row = {"key": key, "place": place, **clock(backend, snapshot), **state_document(status)}
        row |= {"kind": status.ref.kind, "counts": dict(status.counts)}
        labels = snapshot.job.labels.items()
        row["labels"] = [f"{name}={value}" for name, value in labels if name != MANAGED_BY]
        with self._lock:
            version = before.version if before and before.row == row else next(self._versions)
            self._entries[key] = JobEntry(key, backend, snapshot, row, version)
        return key

    @contextmanager
    def _problem(self, place: str) -> Iterator[None]:
        """What keeps a place from being read is kept for the page."""
        try:
            yield
        except (BackendError, OSError) as error:  # OSError: of a disk over the network
            self.problems[place] = str(error)
        else:
            self.problems.pop(place, None)


def key_of(place: str, job: Job | JobRef) -> str:
    """What the page calls a job."""
    return f"{place}:{job.uid}"


def clock(backend: Backend, snapshot: Snapshot) -> dict[str, Any]:
    """What the times of a job refer to.

    It has `at`, when its record was written, or null for now, and `skew`, the seconds by which
    the clock of the cluster is ahead.
    """
    at = snapshot.at.isoformat() if backend.recorded and snapshot.at else None
    return {"at": at, "skew": round(snapshot.skew)}

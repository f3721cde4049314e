"""The Protocol of a back end: what the rest of k8sjob needs of a laptop and of a cluster.

Every back end describes jobs by Kubernetes objects: the job with its status, Pods, Events, as an
apiserver would return them. So status, watch, logs and why are functions over these objects,
written once for all back ends.
"""

from __future__ import annotations

import shlex
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol, Self, TypedDict, Unpack

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from pathlib import Path
    from threading import Event

    from k8sjob.kube.objects import Json
    from k8sjob.spec import JobSpec
    from k8sjob.targets.api import Job

LOCAL: Final = "local"
"""The namespace of jobs on this machine."""
OUTPUT: Final = "ContainerOutput"
"""The kind of a related object with the last `lines` of a `container` of the Pod that it names."""
TOO_FEW_GPUS: Final = "TooFewGPUs"
"""The reason of the Event that a job on this machine runs on CPUs in place of its GPUs."""


@dataclass(frozen=True, slots=True)
class JobRef:
    """A reference to a job.

    Attributes:
        name: the job's name; KIND/NAME of an object that is no job, see Job.argument.
        namespace: its namespace; LOCAL on this machine.
        uid: distinguishes it from other jobs of the same name; empty if it is not known.
        kind: of the object, as "PyTorchJob"; empty if it is not known.
        job: as it was when a cluster was asked for it by its name; see ClusterBackend.snapshot_of.
    """

    name: str
    namespace: str
    uid: str = ""
    kind: str = field(default="", compare=False)
    job: Job | None = field(default=None, compare=False, repr=False)

    @classmethod
    def of(cls, job: Job) -> JobRef:
        """The reference to a job that was read."""
        return cls(job.argument, job.namespace, job.uid, job.raw.get("kind") or "")

    def __str__(self) -> str:
        """As a shell takes it: a selector may have spaces."""
        return shlex.quote(f"{self.namespace}/{self.name}")


@dataclass(frozen=True, slots=True)
class Plan:
    """A job before it is created: what a dry run shows.

    Attributes:
        spec: the validated spec.
        job: the rendered job, with the object that it needs beside it in a cluster.
        image: the image that the replicas run, with its digest where there is one.
        folder: the folder that relative paths of the spec (context, volumes[].local) start from.
        code: the folder with the job's code on this machine; None: the one that the spec names.
    """

    spec: JobSpec
    job: Job = field(repr=False)
    image: str
    folder: Path
    code: Path | None = None

    @property
    def manifest(self) -> Json:
        """The job's document; see k8sjob.targets.api.Job."""
        return self.job.document

    @property
    def context(self) -> Path:
        """The folder with the job's code."""
        return self.code or self.source

    @property
    def source(self) -> Path:
        """The folder that its user knows the code by, also where a copy of it runs."""
        return self.folder / self.spec.code_folder


class Launched(NamedTuple):
    """The spec, the folder and the code that a job on this machine was started from.

    Attributes:
        spec: the job, as YAML.
        folder: the folder that relative paths of the spec started from.
        code: the SHA-256 of each file of the code, by its name in the context; not of large ones.
        copy: the run's own copy of the code; None: it is not on this machine.
        commit: of the code, see checkout.commit_of().
    """

    spec: str
    folder: Path
    code: Mapping[str, str]
    copy: Path | None = None
    commit: str = ""


class Snapshot(NamedTuple):
    """A job and what belongs to it, at one moment.

    Attributes:
        job: the job with its status.
        pods: its Pods, by replica type (Master first) and index.
        events: the Events of the job and of its pods, oldest first.
        at: the moment, where it was not just now.
        record: the record that it was read from, as a shell takes its name; empty if from none.
        skew: seconds by which the clock of its stamps is ahead of this machine's.
        groups: its PodGroups, read while none of its Pods has a node: until a gang scheduler admits
            them there may be no Pods.
    """

    job: Job
    pods: Sequence[Json] = ()
    events: Sequence[Json] = ()
    at: datetime | None = None
    record: str = ""
    skew: float = 0.0
    groups: Sequence[Json] = ()

    @property
    def pods_by_replica(self) -> dict[str, Json]:
        """Its Pods by the name of the replica, "worker-2"."""
        return {self.job.replica_of(pod): pod for pod in self.pods}

    @property
    def now(self) -> datetime:
        """The moment to which its ages are counted, by the clock of its stamps."""
        return self.at or datetime.now(UTC) + timedelta(seconds=self.skew)


class LogLine(NamedTuple):
    """One whole line of a container's output; a tuple, as there are millions.

    Attributes:
        replica: "master-0", "worker-2".
        attempt: the container's restart count when it wrote the line, over all its pods.
        timestamp: RFC 3339 in UTC with nanoseconds, as the kubelet writes it.
        text: the line, without its newline; bytes that are not UTF-8 are replaced.
        gap: whether it is not of the container: it says what is missing in its place.
        raw: the bytes of the line where they differ from `text` and a newline: some are not UTF-8,
            or the output ended without a newline. Else empty.
    """

    replica: str
    attempt: int
    timestamp: str
    text: str
    gap: bool = False
    raw: bytes = b""

    @classmethod
    def of(cls, replica: str, attempt: int, timestamp: str, written: bytes) -> Self:
        """The line that a container wrote, with its newline where it has one."""
        try:
            text = written.decode()
        except UnicodeDecodeError:
            text = ""
        if text.endswith("\n"):
            return cls(replica, attempt, timestamp, text[:-1])
        text = written.removesuffix(b"\n").decode(errors="replace")
        return cls(replica, attempt, timestamp, text, raw=written)

    @property
    def written(self) -> bytes:
        """The line as the container wrote it, byte for byte, with its newline if it has one."""
        return self.raw or self.text.encode() + b"\n"

    @property
    def time(self) -> float:
        """Its timestamp as seconds since the epoch."""
        return datetime.fromisoformat(self.timestamp).timestamp()


class LogOptions(TypedDict, total=False):
    """Which of a replica's output is read; `tail` and `since` only save reading: more may come.

    Attributes:
        follow: wait for more until the job ends, also for a replica that has not started yet.
        previous: only the attempt before the last one.
        tail: how many of the last lines are wanted; not together with `follow`.
        since: what was written from this moment on is wanted (with a time zone).
        stop: set from another thread to end the iteration within a second.
        pods: the Pods by replica, where they were just read, which saves reading them again; not
            together with `follow`.
    """

    follow: bool
    previous: bool
    tail: int | None
    since: datetime | None
    stop: Event | None
    pods: Mapping[str, Json] | None


class Backend(Protocol):
    """A place where jobs run. Errors: JobNotFound, JobExists, BackendError."""

    recorded: bool
    """Whether its jobs are of records: as they were at one moment, with no more to wait for."""

    def create(self, plan: Plan) -> JobRef:
        """Start a job; JobExists if one of that name has not ended."""

    def find(self, name: str) -> JobRef:
        """The job of that name; JobNotFound if there is none."""

    def jobs(self) -> Sequence[Snapshot]:
        """All jobs, the newest first."""

    def snapshot(self, ref: JobRef) -> Snapshot:
        """The job now; JobNotFound if it is gone."""

    def watch(self, ref: JobRef, *, stop: Event | None = None) -> Iterator[Snapshot]:
        """The job now, and again after each change; ends when the job is gone, or `stop` is set."""

    def logs(self, ref: JobRef, replica: str, **how: Unpack[LogOptions]) -> Iterator[LogLine]:
        """The output of a replica ("worker-2") from its beginning, over all attempts."""

    def related(self, snapshot: Snapshot) -> Sequence[Json]:
        """Other objects than the job's own that show why it does not run; only for `why`.

        Nodes, claims with their Events, quotas, the Namespace, the operator's Deployment and Pods,
        a queue's Workload: those that exist, each with its kind; of Secrets and ConfigMaps only the
        metadata, and of an init container that fails an OUTPUT. For an object that the pods name
        and that does not exist a Status with the reason NotFound and details {kind: "secrets",
        name: ...}. What the user may not read is left out; on this machine there are none.
        """

    def suspend(
        self, ref: JobRef, *, value: bool, waiting: Callable[[float], object] | None = None
    ) -> None:
        """Suspend the job (its replicas are stopped, the job stays) or resume it.

        Args:
            ref: the job.
            value: whether it is to be suspended.
            waiting: called once where something has to end first, with the seconds that it may
                take.
        """

    def delete(self, ref: JobRef) -> None:
        """Stop the job and remove it with all that belongs to it."""

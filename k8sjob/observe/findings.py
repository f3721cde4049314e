"""What is wrong with a job, with what its records know of the time when more could be seen."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Final

from k8sjob.backends.api import LOCAL, JobRef
from k8sjob.backends.record import RecordBackend, Records
from k8sjob.errors import BackendError, JobNotFound
from k8sjob.findings import Finding, Severity
from k8sjob.kube.objects import stamp
from k8sjob.observe.diagnose import Cause, as_data, diagnose
from k8sjob.observe.logs import last_lines
from k8sjob.observe.status import job_status
from k8sjob.targets.api import JobState

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from k8sjob.backends.api import Backend, Snapshot
    from k8sjob.kube.objects import Json

_END_ALONE: Final = frozenset(
    {Cause.DEADLINE, Cause.DELETING, Cause.FAILED, Cause.LEFTOVER, Cause.RESTART_LIMIT}
)
"""Causes that say that a job ended, and not why."""
_PASSING: Final = _END_ALONE | {
    Cause.MASTER_AWAITED,
    Cause.NO_PROGRESS,
    Cause.OPERATOR_SILENT,
    Cause.QUEUED,
    Cause.STOPPED,
    Cause.SUSPENDED,
    Cause.WAITING,
}
"""Causes that explain no end that came later."""


def findings(backend: Backend, snapshot: Snapshot) -> list[Finding]:
    """The findings of `why` and `status`, from all that can be read of a job."""
    diagnoses = diagnose(snapshot, last_lines(backend, snapshot), backend.related(snapshot))

    def record(ref: JobRef) -> RecordBackend:
        return backend if isinstance(backend, RecordBackend) else Records().open(ref)

    return with_earlier(snapshot, diagnoses, record)


def findings_to_keep(
    backend: Backend,
    snapshot: Snapshot,
    related: Sequence[Json],
    earlier: Callable[[], Sequence[Json]],
) -> list[Json]:
    """The findings as a record keeps them; `earlier` reads those of the record before it."""
    diagnoses = diagnose(snapshot, last_lines(backend, snapshot), related)
    moment = f" (seen at {stamp(snapshot.now)})"
    if _explains_nothing(snapshot, diagnoses):
        return list(earlier())
    present = (finding for finding in diagnoses if finding.severity is Severity.ERROR)
    return [as_data(finding._replace(message=finding.message + moment)) for finding in present]


def keep_record_of(backend: Backend, ref: JobRef) -> str:
    """Keep a record of a job in a cluster that has ended; jobs on this machine have a folder.

    Returns:
        Why there is none, as a sentence; empty where it is kept, or the job is gone.
    """
    # Of what is no job there is none: nothing could start it again.
    if backend.recorded or "/" in ref.name:
        return ""
    if ref.namespace == LOCAL:  # a cluster may have a namespace of that name, too
        from k8sjob.backends.local import LocalBackend  # noqa: PLC0415 - of no use for a cluster

        if isinstance(backend, LocalBackend):
            return ""
    try:
        with suppress(JobNotFound):  # deleted by somebody, or after its ttl
            Records().keep(backend, ref, judge=findings_to_keep)
    except (BackendError, OSError) as error:
        return f"no record is kept of {ref}: {error}"
    return ""


def with_earlier(
    snapshot: Snapshot, diagnoses: list[Finding], record: Callable[[JobRef], RecordBackend]
) -> list[Finding]:
    """The findings after those of the job's record, where they alone do not explain the end."""
    if _explains_nothing(snapshot, diagnoses):
        with suppress(BackendError):  # there may be none
            recorded = record(JobRef.of(snapshot.job)).findings
            earlier = (_recorded(f) for f in recorded if f["cause"] not in _PASSING)
            return [*earlier, *diagnoses]
    return diagnoses


def _recorded(finding: Json) -> Finding:
    """A finding of a record, whose writer may have put any command into its next step."""
    step, replicas = f"its record says: {finding['next_step']}", tuple(finding["replicas"])
    return Finding(finding["cause"], finding["message"], step, replicas=replicas)


def _explains_nothing(snapshot: Snapshot, diagnoses: Sequence[Finding]) -> bool:
    """Whether a job ended and its findings do not say why: its Pods may be gone."""
    ended = job_status(snapshot).state in {JobState.FAILED, JobState.DELETING}
    return ended and all(finding.id in _END_ALONE for finding in diagnoses)

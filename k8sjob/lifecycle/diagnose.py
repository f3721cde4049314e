"""Why a job stands where it stands: objects and last lines of output in, findings out. Pure.

Each cause is a small function over a Case, and `_CAUSES` is their order: what explains the others
stands first.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from k8sjob.lifecycle.status import JobState, JobStatus, job_status

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from k8sjob.backends.api import Snapshot

__all__ = ["Finding", "diagnose"]


@dataclass(frozen=True, slots=True)
class Finding:
    """One cause and what to do about it.

    Attributes:
        cause: a stable short name, as "crash" or "suspended"; see docs/reference/states.md.
        message: what was seen, in one paragraph.
        next_step: what to do now.
        replica: "worker-2", or empty where it concerns the whole job.
    """

    cause: str
    message: str
    next_step: str
    replica: str = ""

    def as_dict(self) -> dict[str, str]:
        """The finding as the data of a FINDING event."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class _Case:
    snapshot: Snapshot
    status: JobStatus
    logs: Mapping[str, Sequence[str]]


def diagnose(snapshot: Snapshot, logs: Mapping[str, Sequence[str]]) -> list[Finding]:
    """The findings about a job, the first cause first.

    Args:
        snapshot: the job and its objects.
        logs: the last lines of each replica's output, by its name; replicas may be missing.
    """
    case = _Case(snapshot, job_status(snapshot), logs)
    return [finding for cause in _CAUSES for finding in cause(case)]


def _suspended(case: _Case) -> Iterator[Finding]:
    if case.status.state is JobState.SUSPENDED:
        yield Finding(
            "suspended",
            "the job is suspended: its replicas are stopped, its checkpoints are kept",
            f"k8sjob resume {case.status.ref.name}",
        )


_CAUSES: tuple[Callable[[_Case], Iterator[Finding]], ...] = (_suspended,)

"""The causes in their order: what explains the others stands first."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Final

from k8sjob.contract import ExitCode
from k8sjob.lifecycle.diagnose.account import of_libraries, since_training
from k8sjob.lifecycle.diagnose.case import Case
from k8sjob.lifecycle.diagnose.collectives import spoken_of
from k8sjob.lifecycle.diagnose.creation import cannot_be_made
from k8sjob.lifecycle.diagnose.ends import how_it_ended, is_consequence
from k8sjob.lifecycle.diagnose.finding import Cause, Finding, Seen, grouped, passed
from k8sjob.lifecycle.diagnose.job import (
    SUPERVISOR_GONE,
    deadline,
    deleting,
    ended_by_deadline,
    operator_silent,
    overdue,
    queued,
    restart_limit,
    stopped,
    supervisor_gone,
    suspended,
)
from k8sjob.lifecycle.diagnose.nodes import ended_with_its_place, left_their_place, lost_its_place
from k8sjob.lifecycle.diagnose.scheduling import unschedulable
from k8sjob.lifecycle.diagnose.starting import bad_container, bad_image, bad_init, bad_sandbox
from k8sjob.lifecycle.diagnose.training import left_early, nan_loss, no_group
from k8sjob.lifecycle.diagnose.volumes import not_mounted, unprovisioned
from k8sjob.lifecycle.diagnose.waiting import (
    kept_by_a_sidecar,
    left_over,
    master_awaited,
    pods_to_come,
    slow,
)
from k8sjob.lifecycle.evidence import End, ends, recreated
from k8sjob.lifecycle.status import JobState

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from k8sjob.backends.api import Json, Snapshot
    from k8sjob.lifecycle.diagnose.case import Pod

__all__ = ["diagnose"]

_ONE_FAILURE: Final = 900.0
"""Seconds within which the ranks of a group end after one failure: timeouts are ten minutes."""
_LAST_SECONDS: Final = 60.0
"""Of a Pod that is gone, an end so long before that of its job may have been got over."""


def diagnose(
    snapshot: Snapshot,
    logs: Mapping[str, Sequence[str]],
    related: Sequence[Json] = (),
    *,
    now: datetime | None = None,
) -> list[Finding]:
    """The findings about a job, the first cause first; none where nothing is wrong.

    Args:
        snapshot: the job and its objects.
        logs: the last lines of each replica's output, by its name; replicas may be missing.
        related: objects beside the job's own (see Backend.related), as far as they could be read.
        now: the moment that "for 40 s" is counted to, with a time zone; this one if not given.
    """
    case = Case(snapshot, logs, related, now or datetime.now(UTC))
    if case.status.state is JobState.DELETING:  # nobody works on it any more
        return [finding for cause in _STILL_THERE for finding in cause(case)]
    causes = _AFTER_SUCCESS if case.status.state is JobState.SUCCEEDED else _CAUSES
    found = [finding for cause in causes for finding in cause(case)]
    if not found and not case.status.state.finished:
        found = [*pods_to_come(case), *_at_pods(unprovisioned, slow)(case)]
    explained = any("master-0" in finding.replicas for finding in found)
    found += master_awaited(case, explained=explained)
    return sorted(found, key=lambda finding: finding.over)


def _kept_from_being_made(case: Case) -> Iterator[Finding]:
    yield from list(cannot_be_made(case)) or operator_silent(case)


def _at_pods(*looks: Callable[[Case, Pod], Seen | None]) -> Callable[[Case], Iterator[Finding]]:
    """A cause that looks at each Pod in turn; of several looks the first that sees something."""

    def cause(case: Case) -> Iterator[Finding]:
        seen = (next((s for look in looks if (s := look(case, pod))), None) for pod in case.pods)
        yield from grouped((one for one in seen if one), case.now)

    return cause


def _container_ended(case: Case) -> Iterator[Finding]:
    if case.status.reason in SUPERVISOR_GONE:
        return  # it took its containers along
    if case.status.state in (JobState.STOPPED, JobState.SUSPENDED):
        return
    left = left_their_place(case)
    bad = [end for end in ends(case.snapshot) if not ended_with_its_place(case, end, left)]
    if ended_by_deadline(case):
        bad = [end for end in bad if end.exit_code not in (ExitCode.STOPPED, 137)]
    bad = _of_the_last_failure(case, bad)
    # What keeps a replica down now comes before what it got over.
    first = min(
        bad,
        key=lambda end: (is_consequence(case, end), case.runs_again(end.replica), end.time),
        default=None,
    )
    if first:
        yield _with_others(case, how_it_ended(case, first), first, bad)


def _of_the_last_failure(case: Case, bad: list[End]) -> list[End]:
    """Without ends that others got over long ago."""
    newest = max((end.time for end in bad), default=0.0)
    return [
        end
        for end in bad
        if end.time >= newest - _ONE_FAILURE or not (end.time and case.runs_again(end.replica))
    ]


def _failed_unseen(case: Case) -> Iterator[Finding]:
    """A replica that failed in a job that succeeded, since another one decides that."""
    finished = case.status.finished.timestamp() if case.status.finished else 0.0
    done = {pod.replica for pod in case.done}
    down = {pod.replica for pod in case.pods if pod.trainer and not pod.dying} - done
    bad = [
        end
        for end in ends(case.snapshot)
        if end.replica not in done
        and end.exit_code not in (ExitCode.STOPPED, 137)  # so the operator's clean-up ends it
        and (end.replica in down or end.time >= finished - _LAST_SECONDS)
    ]
    if first := min(bad, key=lambda end: (is_consequence(case, end), end.time), default=None):
        found = how_it_ended(case, first)
        message = f"the job succeeded, but {found.message}"
        yield _with_others(case, replace(found, message=message), first, bad)


def _with_others(case: Case, finding: Finding, first: End, bad: list[End]) -> Finding:
    """The finding, with how often its container was started again, and who ended as it did."""
    message = finding.message
    status = next((one for one in case.status.replicas if one.name == first.replica), None)
    if status and status.situation == "CrashLoopBackOff":
        times = f"{status.restarts} time{'s' * (status.restarts != 1)}"
        message += f" (started again {times}; the next start is at most five minutes away)"
    same = [
        end
        for end in bad
        if end is not first and end.exit_code == first.exit_code and not is_consequence(case, end)
    ]
    if same:
        message += f"; {len(same)} more ended with the same exit code"
    over = case.runs_again(first.replica)
    if over:
        moment = datetime.fromtimestamp(first.time, UTC) if first.time else None
        message += passed(moment, case.now, again=True)
    concerned = finding.replicas or (finding.replica,)
    replicas = tuple(dict.fromkeys((*concerned, *(end.replica for end in same))))
    found = replace(finding, message=message, replicas=replicas, over=over)
    return _recreated(case, found, first)


def _recreated(case: Case, finding: Finding, end: End) -> Finding:
    """The finding, with how often the operator has recreated the Pod, which nothing limits."""
    times = recreated(case.snapshot, end.replica)
    if times < 2:
        return finding
    return replace(
        finding,
        message=f"{finding.message}; its pod was recreated {times} times",
        next_step=f"{finding.next_step}; the operator sets no limit to this under restart_policy"
        " ExitCode: OnFailure has one, policy.max_restarts",
    )


def _started_badly_or_ended(case: Case) -> Iterator[Finding]:
    """What keeps replicas from starting, and how others ended: the cause of the other one first.

    Ranks that wait in vain for one that does not start end at last: that is a consequence. A rank
    that fails by its own fault was there before.
    """
    starting, ended = list(_STARTING(case)), list(_container_ended(case))
    fault = any(finding.cause not in _WAITED_IN_VAIN for finding in ended)
    yield from (*ended, *starting) if fault else (*starting, *ended)


def _spoken_of(case: Case) -> Iterator[Finding]:
    """Trouble between ranks that run on: a collective may hang for long until it is given up."""
    if case.status.state.finished or any(ends(case.snapshot)):
        return
    # A rank that gets over it writes on.
    tails = ((replica, of_libraries(since_training(case.tail(replica)))) for replica in case.logs)
    told = ((replica, spoken_of(tail, local=case.local)) for replica, tail in tails)
    seen = (Seen(*trouble, replica) for replica, trouble in told if trouble)
    yield from grouped(seen, case.now)


_STARTING: Final = _at_pods(
    unschedulable, bad_image, bad_container, not_mounted, bad_sandbox, bad_init
)
_WAITED_IN_VAIN: Final = frozenset(
    {Cause.RENDEZVOUS, Cause.HUNG, Cause.CONNECTION, Cause.COLLECTIVE_TIMEOUT}
)
_CAUSES: Final[tuple[Callable[[Case], Iterator[Finding]], ...]] = (
    supervisor_gone,
    stopped,
    suspended,
    queued,
    _kept_from_being_made,
    lost_its_place,
    _started_badly_or_ended,
    deadline,
    overdue,
    restart_limit,
    left_early,
    _spoken_of,
    no_group,
    nan_loss,
    _at_pods(kept_by_a_sidecar),
    left_over,
    deleting,
)
_AFTER_SUCCESS: Final[tuple[Callable[[Case], Iterator[Finding]], ...]] = (
    no_group,
    _failed_unseen,
    nan_loss,
    left_over,
    deleting,
)
_STILL_THERE: Final[tuple[Callable[[Case], Iterator[Finding]], ...]] = (
    deleting,
    lost_its_place,
    _at_pods(slow),
)

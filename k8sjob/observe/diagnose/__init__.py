"""Why a job is in its state: objects and last lines of output in, findings out. Pure.

Here are the causes in their order: a cause that explains others comes before them.
"""

from __future__ import annotations

from datetime import UTC, datetime
from operator import attrgetter
from typing import TYPE_CHECKING, Final

from k8sjob.contract import ExitCode, counted
from k8sjob.findings import Finding, Severity
from k8sjob.kube.objects import is_ours, moment
from k8sjob.observe.diagnose import job
from k8sjob.observe.diagnose.containers import (
    bad_container,
    bad_image,
    bad_init,
    bad_sandbox,
    failed_beside,
    kept_by_sidecar,
    master_awaited,
    slow,
    started_again,
)
from k8sjob.observe.diagnose.exits import explain_end, is_consequence
from k8sjob.observe.diagnose.facts import SIGKILLED, Facts
from k8sjob.observe.diagnose.finding import Cause, Explanation, ago, as_data, grouped
from k8sjob.observe.diagnose.gang import gang_waits
from k8sjob.observe.diagnose.gone_pods import with_gone_pods
from k8sjob.observe.diagnose.next_steps import in_manifest
from k8sjob.observe.diagnose.nodes import (
    displaced,
    ended_by_displacement,
    lost_or_displaced,
)
from k8sjob.observe.diagnose.output import explain_lines, library_lines, since_training
from k8sjob.observe.diagnose.pod_creation import creation_refused
from k8sjob.observe.diagnose.queue import queued
from k8sjob.observe.diagnose.scheduling import unschedulable
from k8sjob.observe.diagnose.volumes import not_mounted, unprovisioned
from k8sjob.targets.api import JobState

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from k8sjob.backends.api import Snapshot
    from k8sjob.kube.objects import Json
    from k8sjob.observe.diagnose.facts import Failure, ReplicaPod

__all__ = ["Cause", "as_data", "diagnose"]

_ONE_FAILURE: Final = 900.0
"""Seconds within which the ranks of a group end after one failure: timeouts are ten minutes."""
_LAST_SECONDS: Final = 60.0
"""Seconds before its end: a job may have survived a Pod that was lost earlier than that."""
_KILLED: Final = frozenset({ExitCode.STOPPED, SIGKILLED})
"""Exit codes of containers that the operator ends."""


def diagnose(
    snapshot: Snapshot,
    logs: Mapping[str, Sequence[str]],
    related: Sequence[Json] = (),
    *,
    now: datetime | None = None,
) -> list[Finding]:
    """The findings about a job, the first cause first; none where nothing is wrong.

    One that is past, since the replicas run again, is a warning.

    For the parameters see Facts; `now` is by default the moment of the snapshot.
    """
    facts = Facts(snapshot, logs, related, now or snapshot.now)
    state = facts.status.state
    if state is JobState.DELETING or facts.namespace_deleted:  # no controller works on it any more
        return [finding for cause in _WHILE_DELETING for finding in cause(facts)]
    # The operator calls a job a success when rank 0 is one, whatever the others did.
    causes = _AFTER_SUCCESS if state is JobState.SUCCEEDED else _CAUSES
    findings = [finding for cause in causes for finding in cause(facts)]
    if not findings:
        findings = list(job.failed(facts))
    # A past failure does not explain why a replica does not run now.
    if all(finding.severity is Severity.WARNING for finding in findings) and not state.finished:
        findings += [*job.no_pods_yet(facts), *_for_each_pod(unprovisioned, slow)(facts)]
    explained = any("master-0" in finding.replicas for finding in findings)
    findings += master_awaited(facts, explained=explained)
    if not (facts.local or is_ours(snapshot.job.raw)):
        findings = [in_manifest(facts, finding) for finding in findings]
    return sorted(findings, key=lambda finding: finding.severity is Severity.WARNING)


def _not_created(facts: Facts) -> Iterator[Finding]:
    # An operator whose Pods are refused, or whose gang waits, writes no status: it is not silent.
    causes = (creation_refused, gang_waits, job.operator_silent)
    yield from next(filter(None, (list(cause(facts)) for cause in causes)), ())


def _for_each_pod(
    *checks: Callable[[Facts, ReplicaPod], Explanation | None],
) -> Callable[[Facts], Iterator[Finding]]:
    """A cause that examines each Pod in turn; of several checks the first that finds something."""

    def explained(facts: Facts) -> Iterator[Explanation]:
        for pod in facts.pods:
            explanations = (check(facts, pod) for check in checks)
            if explanation := next(filter(None, explanations), None):
                yield explanation._replace(replica=pod.replica, pod=pod.name)

    def cause(facts: Facts) -> Iterator[Finding]:
        yield from grouped(explained(facts), facts.now)

    return cause


def _container_failed(facts: Facts) -> Iterator[Finding]:
    if facts.status.reason in job.SUPERVISOR_GONE:
        return  # it took its containers along
    if facts.status.state is JobState.SUSPENDED:
        return  # the operator has ended the Pods
    displacements = displaced(facts)
    # What ended a job that was stopped is the stop.
    ends = [] if facts.status.state is JobState.STOPPED else facts.ends
    restarted = {end.replica for end in facts.restarts}
    failed = [
        end
        for end in ends
        if end.replica not in restarted and not ended_by_displacement(facts, end, displacements)
    ]
    # A rank that lost a peer says nothing new where the peer's end is known.
    has_cause = bool(failed or displacements)
    failed += [end for end in facts.restarts if not (has_cause and is_consequence(facts, end))]
    if facts.ended_by_deadline:
        # The operator, or a kubelet, stops what still runs at the deadline.
        failed = [end for end in failed if end.exit_code not in _KILLED]
    failed = _of_the_last_failure(facts, failed)
    if first := _first(facts, failed):
        first = _awaited(facts, first, failed)
        finding = _with_similar(facts, explain_end(facts, first), first, failed)
        yield finding
        yield from _independent(facts, finding, failed)


def _first(facts: Facts, failed: Iterable[Failure]) -> Failure | None:
    """The first failure that is no consequence; a present one comes before those survived."""
    return min(
        failed,
        key=lambda end: (is_consequence(facts, end), facts.runs_again(end.replica), end.time),
        default=None,
    )


def _independent(facts: Facts, finding: Finding, failed: Sequence[Failure]) -> Iterator[Finding]:
    """Other causes by which replicas failed, each once and in one line.

    A peer's end is followed by errors of all kinds; these no other replica can cause.
    """
    shown = {finding.id}
    for end in failed:
        second = explain_end(facts, end)
        fresh = second.id in _INDEPENDENT - shown and second.replica not in finding.replicas
        if fresh and not (is_consequence(facts, end) or facts.runs_again(end.replica)):
            shown.add(second.id)
            yield second._replace(message=second.message.partition("\n")[0])


def _awaited(facts: Facts, end: Failure, failed: Sequence[Failure]) -> Failure:
    """The failure that a rank waited for in vain, of a replica that may run again; or `end`."""
    culprits = {facts.replica_of(rank) for rank in end.reason.culprits} if end.reason else set()
    earlier = [
        failure
        for failure in sorted(failed, key=attrgetter("time"))
        if failure.time < end.time
        and failure.replica != end.replica
        and (not culprits or failure.replica in culprits)
    ]
    if not earlier or explain_end(facts, end).id not in _WAITED:
        return end
    # A rank that waits ends minutes later, by a timeout, while the one that failed runs again.
    causes = (failure for failure in earlier if not is_consequence(facts, failure))
    return next((cause for cause in causes if explain_end(facts, cause).id not in _WAITED), end)


def _of_the_last_failure(facts: Facts, failed: list[Failure]) -> list[Failure]:
    """Without ends that the job survived long ago."""
    newest = max((end.time for end in failed), default=0.0)
    return [
        end
        for end in failed
        if end.time >= newest - _ONE_FAILURE or not (end.time and facts.runs_again(end.replica))
    ]


def _failed_after_success(facts: Facts) -> Iterator[Finding]:
    """A replica that failed in a job that succeeded, since another one decides that."""
    finished = facts.status.finished.timestamp() if facts.status.finished else 0.0
    done = {pod.replica for pod in facts.done}
    down = {pod.replica for pod in facts.pods if not pod.deleting} - done
    # A replica whose Pod was replaced long before the success had got over its failure.
    failed = [
        end
        for end in facts.ends
        if end.replica not in done
        and end.exit_code not in _KILLED  # by the operator's clean-up
        and (end.replica in down or end.time >= finished - _LAST_SECONDS)
    ]
    if first := _first(facts, failed):
        finding = explain_end(facts, first)
        message = f"the job succeeded, but {finding.message}"
        yield _with_similar(facts, finding._replace(message=message), first, failed)


def _with_similar(facts: Facts, finding: Finding, first: Failure, failed: list[Failure]) -> Finding:
    """The finding with the restarts of its container, and the replicas that ended likewise."""
    message, step = finding.message, finding.next_step
    status = next((r for r in facts.status.replicas if r.name == first.replica), None)
    if status and status.situation == "CrashLoopBackOff":
        next_start = (
            "" if facts.status.state.finished else "; the next start is at most five minutes away"
        )
        message += f" (restarted {counted(status.restarts, 'time')}{next_start})"
    similar = [
        end
        for end in failed
        if end is not first and end.exit_code == first.exit_code and not is_consequence(facts, end)
    ]
    if similar:
        message += f"; {len(similar)} more ended with the same exit code"
    over = facts.runs_again(first.replica)
    if over or first in facts.restarts:
        failed_at = datetime.fromtimestamp(first.time, UTC) if first.time else None
        message += ago(failed_at, facts.now, again=over)
    times_recreated = facts.job.recreations(first.replica, facts.snapshot.events)
    if times_recreated > 1:
        message += f"; its pod was recreated {times_recreated} times"
        if not facts.target.pods.ended_stay:
            step += (
                "; the operator sets no limit to this under restart_policy ExitCode: OnFailure has"
                " one, policy.max_restarts"
            )
    replicas = tuple(dict.fromkeys((*finding.replicas, *(end.replica for end in similar))))
    severity = Severity.WARNING if over else Severity.ERROR
    return finding._replace(message=message, next_step=step, replicas=replicas, severity=severity)


def _did_not_start_or_failed(facts: Facts) -> Iterator[Finding]:
    """The causes that keep replicas from starting and made others fail, the root cause first.

    Ranks that wait in vain for one that does not start fail at last: that is a consequence. A rank
    that fails by its own fault was there before.
    """
    starting, failed = list(_STARTING(facts)), list(_container_failed(facts))
    own_fault = any(finding.id not in _WAITED for finding in failed)
    yield from (*failed, *starting) if own_fault else (*starting, *failed)


def _ended_or_did_not_start(facts: Facts) -> Iterator[Finding]:
    """Why replicas ended or did not start; that no restart was left is only the consequence."""
    findings = [*lost_or_displaced(facts), *_did_not_start_or_failed(facts)]
    if any(f.id is Cause.POD_DELETED for f in findings):  # its successor's problem comes first
        blocked = {name for finding in _STARTING(facts) for name in finding.replicas}
        findings.sort(
            key=lambda f: f.id is Cause.POD_DELETED and not blocked.isdisjoint(f.replicas)
        )
    # Ranks that lost another one, or waited for it, are no cause where that one's Pod is gone.
    no_root = facts.status.state is JobState.FAILED and all(f.id in _WAITED for f in findings)
    if no_root and (before_deletion := with_gone_pods(facts)):
        findings = [*_did_not_start_or_failed(before_deletion), *findings]
    yield from findings or job.restart_limit(facts)


def _failed_before_deletion(facts: Facts) -> Iterator[Finding]:
    """What had failed, or kept replicas from starting, when the job's deletion was requested."""
    deletion = moment(facts.job.metadata.get("deletionTimestamp"))
    if deletion is None:
        return
    with_gone = with_gone_pods(facts) or facts
    failed = [
        end
        for end in with_gone.ends
        if 0 < end.time < deletion.timestamp()
        and (end.exit_code not in _KILLED or end.why == "OOMKilled")
    ]
    if first := _first(with_gone, failed):
        yield _with_similar(with_gone, explain_end(with_gone, first), first, failed)
    else:
        yield from _STARTING(with_gone)


def _between_ranks(facts: Facts) -> Iterator[Finding]:
    """Trouble between running ranks: a collective may hang for long before it is given up."""
    if facts.status.state.finished or facts.ends:
        return
    # A rank that survives it writes on.
    explanations = []
    for replica in facts.logs:
        tail = library_lines(since_training(facts.tail(replica)))
        if explanation := explain_lines(tail, local=facts.local):
            explanations.append(explanation._replace(replica=replica))
    yield from grouped(explanations, facts.now)


_STARTING: Final = _for_each_pod(
    unschedulable, bad_image, bad_container, not_mounted, bad_sandbox, bad_init
)
_WAITED: Final = frozenset(
    {Cause.RENDEZVOUS, Cause.HUNG, Cause.CONNECTION, Cause.COLLECTIVE_TIMEOUT}
)
_INDEPENDENT: Final = frozenset(
    {
        Cause.CONFIGURATION,
        Cause.DISK,
        Cause.GPU_DRIVER,
        Cause.GPU_FAULT,
        Cause.GPU_MEMORY,
        Cause.IMAGE,
        Cause.MEMORY,
        Cause.MISSING_MODULE,
        Cause.SHARED_MEMORY,
        Cause.START,
    }
)
_CAUSES: Final[tuple[Callable[[Facts], Iterator[Finding]], ...]] = (
    job.state,
    queued,
    job.companion_gone,
    _not_created,
    _ended_or_did_not_start,
    job.limits,
    job.left_early,
    _between_ranks,
    job.no_progress,
    job.no_group,
    job.nan_loss,
    _for_each_pod(kept_by_sidecar, failed_beside, started_again),
    job.left_over,
    job.deleting,
)
_AFTER_SUCCESS: Final[tuple[Callable[[Facts], Iterator[Finding]], ...]] = (
    job.no_group,
    _failed_after_success,
    job.nan_loss,
    job.left_over,
    job.deleting,
)
_WHILE_DELETING: Final[tuple[Callable[[Facts], Iterator[Finding]], ...]] = (
    job.deleting,
    _failed_before_deletion,
    lost_or_displaced,
    _for_each_pod(slow),
)

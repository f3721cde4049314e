"""One start of a node's processes, until the last of them has gone, and the reason of its end.

The decisions are pure functions: `deadlines` and `stacks_due`, when to signal; `verdict`.
"""

from __future__ import annotations

import signal
import sys
import time
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Final

from k8sjob.contract import OWN_LAUNCHER, EventKind, ExitCode, Reason
from k8sjob.runtime.agent.worker_group import Exit, Member, WorkerGroup, kill_children
from k8sjob.runtime.base import hangs
from k8sjob.runtime.base.config import TIMEOUTS
from k8sjob.runtime.base.errors import EnvError, ranks_in_words
from k8sjob.runtime.base.event_lines import start_phase, write_event
from k8sjob.runtime.base.frames import fatal_place, users_threads
from k8sjob.runtime.base.hangs import Beat
from k8sjob.runtime.base.heartbeat import HeartbeatMonitor, Seen, read_seen
from k8sjob.runtime.base.long_waits import StepClock, step_missing, warn_of_wait
from k8sjob.runtime.base.termination import by_rank, read_reason, read_stacks, seen_file
from k8sjob.temporary import temporary_folder

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from k8sjob.contract import RuntimeConfig
    from k8sjob.runtime.agent.worker_group import Program
    from k8sjob.runtime.base.signals import Inbox

_NEVER: Final = float("inf")
_HINTS: Final[dict[int, str]] = {
    signal.SIGKILL: "; in a pod usually out of memory: raise resources.memory or use less",
    signal.SIGABRT: "; it called abort(), usually in a library: see its last lines for the cause",
    signal.SIGBUS: "; usually /dev/shm is full: raise resources.shm or use fewer loader workers",
}


@dataclass(slots=True)
class Attempt:
    """The record of one start, all times by time.monotonic(); infinite: not yet."""

    # by rank, for the processes that have ended
    exits: Mapping[int, Exit] = field(default_factory=dict)
    # by rank, as the processes wrote them
    reasons: Mapping[int, Reason] = field(default_factory=dict)
    stop_time: float = _NEVER  # a signal requested a stop
    orphan_time: float = _NEVER  # the parent was seen to be gone
    # the processes have to end, since they wait for nodes that will not come, or the group is to
    # start again with other nodes
    leave_time: float = _NEVER
    leave_grace: float = 0.0  # seconds that they have for that
    launcher_time: float = _NEVER  # when to look for a launcher in the ranks
    hang: Reason | None = None  # why the agent holds that the group hangs; None: it does not
    hang_time: float = _NEVER  # when the processes are to write their stacks for that
    signals: dict[int, float] = field(default_factory=dict)  # when which signal was sent to all
    # by rank, where in the script a fatal error was
    places: dict[int, str] = field(default_factory=dict)
    # by rank, the last state from its observer
    states: Mapping[int, Seen] = field(default_factory=dict)
    # by rank, the processes that SIGKILL does not end, in words
    unkillable: Mapping[int, str] = field(default_factory=dict)
    # ranks that had written a reason before the agent's first signal, and so failed by themselves;
    # their exit codes do not matter
    early: frozenset[int] = frozenset()

    @property
    def running(self) -> dict[int, Seen]:
        """The states of the ranks that have not ended."""
        return {rank: report for rank, report in self.states.items() if rank not in self.exits}

    @property
    def failures(self) -> dict[int, Exit]:
        """The exits that were failures, and not an answer to one of the agent's signals."""
        return {
            rank: end
            for rank, end in self.exits.items()
            if rank in self.early or (end.code and not self._requested(end))
        }

    def _requested(self, end: Exit) -> bool:
        """Ended by a signal of the agent's, or in good order after its SIGTERM."""
        number = signal.SIGTERM if end.code == ExitCode.STOPPED else end.signal
        return end.moment >= self.signals.get(number, _NEVER)


def run_attempt(
    program: Program,
    restart: int,
    config: RuntimeConfig,
    inbox: Inbox,
    *,
    leave: Callable[[Attempt], float | None] | None = None,
    hang: Callable[[Attempt], Reason | None] = lambda record: hangs.hang_of(record.running),
) -> Attempt:
    """Start the node's processes once and wait until all are gone, or cannot be killed.

    Of the config stop_grace and hang_timeout are used; the inbox is entered already. `leave` is
    called repeatedly, and gives the seconds that the processes have to stop as at a signal, or
    None: they continue. So is `hang`: why the group hangs, or None; by default the group is this
    node.

    Raises:
        EnvError: there is no folder to write in.
        OSError: a process could not be started.
    """
    with ExitStack() as stack:
        timeout = config.session_hang_timeout
        members, phase = _after_import(program(restart, _folder(stack)), inbox, timeout)
        group = WorkerGroup(members)
        files = [seen_file(member.error_file) for member in members]
        monitor = HeartbeatMonitor(files, timeout)
        steps = StepClock(timeout)
        observed = any(member.error_file for member in members)
        record = Attempt(launcher_time=time.monotonic() + TIMEOUTS.launcher)
        while True:
            # All decisions of this turn go by the same exits.
            group.poll()
            _take_exits(group, members, record)
            record.stop_time, record.orphan_time = inbox.stop_time, inbox.orphan_time
            if observed:
                record.states = _look(members, group)
                _warn_of_launcher(group, members, record)
            # `leave` is asked until it has answered once: from then on the processes are ending.
            grace = leave(record) if leave and record.leave_time == _NEVER else None
            if grace is not None:
                record.leave_time, record.leave_grace = time.monotonic(), grace
            if group.gone:
                break
            if time.monotonic() >= record.signals.get(signal.SIGKILL, _NEVER) + TIMEOUTS.unkillable:
                # A dead file server or a driver's error may hold it in the kernel for days.
                record.unkillable = {members[i].rank: group.describe(i) for i in group.alive}
                break
            # A line for each phase, not for each look: the log is the user's.
            if observed and (now := start_phase(record.states.values(), phase)) != phase:
                phase = now
                write_event(EventKind.STARTING, phase=phase, processes=len(members))
            # Processes that are to end make no progress, and a warning of that would hide why they
            # end.
            ends = record.signals or record.failures or record.hang
            if not ends and (wait := steps.look(record.running)):
                warn_of_wait(write_event, wait, partial(step_missing, wait, record.running))
            # The peers of a failed rank stand still too, but do not hang.
            if not (record.hang or record.failures or signal.SIGKILL in record.signals):
                still = monitor.stale(
                    index
                    for index in (group.alive if observed else ())
                    # A stopped process cannot report itself, whether its session expects progress
                    # or not.
                    if record.states[members[index].rank].watched or group.stopped(index)
                )
                silent = tuple(members[index].rank for index in still)
                record.hang = _silence(silent, record) if silent else hang(record)
                if record.hang:
                    # All nodes' agents see a hang in their ranks' reports, each a moment later. The
                    # first that ended its ranks would break the connections of the others, whose
                    # ranks would fail by that.
                    agree = 0 if silent or not leave else TIMEOUTS.agree
                    record.hang_time = time.monotonic() + agree
            due = _enforce(group, record, members, config.stop_grace)
            # SIGCHLD wakes the inbox at the end of a child, but not of what a child has left in its
            # group: a leftover is looked at often. A single program has no observer to look at.
            pause = TIMEOUTS.poll if group.lingering else TIMEOUTS.look if observed else _NEVER
            inbox.wait(min(due, pause))
        # What has left the processes' groups, such as a daemon, is a child of the agent's by now.
        kill_children({member.forks.pid for member in members if member.forks})
        # Read at the very end: a rank may write its reason after the last look.
        record.reasons, record.states = _read_reasons(members), _look(members)
        return record


def _after_import(
    members: Sequence[Member], inbox: Inbox, timeout: float
) -> tuple[Sequence[Member], str]:
    """The processes to start once they can be forked, and the phase; none where they are to end."""
    forks, phase = members[0].forks, ""
    if forks and forks.pid and not forks.ready:
        phase = "importing"
        write_event(EventKind.STARTING, phase=phase, processes=len(members))
        forks.await_ready(inbox, timeout)
    return [] if phase and inbox.stopping() else members, phase


def _warn_of_launcher(group: WorkerGroup, members: Sequence[Member], record: Attempt) -> None:
    """Say that the script has started a launcher, which would start all ranks in each of them."""
    if time.monotonic() < record.launcher_time:
        return
    record.launcher_time = _NEVER
    # A job of one process may start a launcher: that one starts all ranks once.
    alone = all(member.environ.get("WORLD_SIZE", "1") == "1" for member in members)
    if alone or any(report.ranks for report in record.states.values()):
        return
    if command := group.launcher():
        message = f"there is no process group, and a rank has started a launcher: {command}"
        write_event(EventKind.WARNING, message=message, reason=OWN_LAUNCHER, command=command)


def _folder(stack: ExitStack) -> Path:
    """A temporary folder; in /dev/shm where the root file system is read-only."""
    problem: OSError | None = None
    for parent in (None, "/dev/shm"):  # noqa: S108 - the pod's
        try:
            return stack.enter_context(temporary_folder("agent", parent))
        except OSError as error:
            problem = problem or error
    raise EnvError(f"no folder to write in: {problem}; mount an empty_dir at /tmp or set TMPDIR")


def deadlines(record: Attempt, stop_grace: float) -> tuple[float, float]:
    """When SIGTERM and when SIGKILL are due, by time.monotonic(); infinite: not at all."""
    # The peers of a failed rank get time to fail by their broken connections, with reasons.
    failed = min((end.moment for end in record.failures.values()), default=_NEVER)
    failed += TIMEOUTS.peer_grace
    term = min(record.stop_time, record.leave_time, record.orphan_time, failed)
    kill = min(
        record.stop_time + stop_grace,
        record.leave_time + record.leave_grace,
        record.orphan_time + TIMEOUTS.kill_grace,
        failed + TIMEOUTS.kill_grace,
        record.hang_time + TIMEOUTS.dump_grace,
    )
    return term, kill


def stacks_due(record: Attempt, stop_grace: float) -> float:
    """When the processes that hang, or that SIGTERM did not end, write their stacks.

    The process that made the others fail may be the one that cannot end: its stacks must not be
    lost. Infinite: not at all; an orphan's have no reader.
    """
    if record.orphan_time < _NEVER or signal.SIGABRT in record.signals:
        return _NEVER
    if record.hang:
        return record.hang_time
    term, kill = deadlines(record, stop_grace)
    # SIGABRT ends the process, so a rank that writes its last checkpoint keeps most of its grace,
    # and half of it where that is short.
    return max((term + kill) / 2, kill - TIMEOUTS.dump_grace)


def verdict(record: Attempt, stop: signal.Signals | None) -> Reason | None:
    """Why the start ended; None when all its processes ended with 0.

    The first failure counts, by the time that the process itself wrote, if it wrote one. A rank
    that only lost its peer counts last: its failure may be seen before the peer's.

    The record has the exits of all but unkillable processes; `stop` is the signal that requested a
    stop, where stop_time is finite.
    """
    reason = _cause(record, stop)
    if reason is None or not record.unkillable:
        return reason
    processes = ", ".join(f"rank {rank} ({text})" for rank, text in record.unkillable.items())
    message = (
        f"{reason.message}; SIGKILL has not ended {processes} within {TIMEOUTS.unkillable:g} s, so"
        " it waits in the kernel, for storage or for a device: if it stays, restart the node"
    )
    return reason._replace(message=message)


def _cause(record: Attempt, stop: signal.Signals | None) -> Reason | None:
    """The verdict without what is left behind."""
    if record.hang:
        return record.hang
    reasons = {rank: _reason(rank, end, record) for rank, end in record.failures.items()}
    cause = min(
        reasons.values(),
        key=lambda reason: (reason.means(ExitCode.PEER_LOST), reason.time),
        default=None,
    )
    ended = min(record.stop_time, record.orphan_time, record.leave_time)
    # A failure after the stop may be its consequence, unless the rank had reported it before.
    if cause and (cause.rank in record.early or record.failures[cause.rank].moment < ended):
        return cause
    if ended == _NEVER:
        return None
    # All ranks that ended with 0 had finished their work, in spite of the stop.
    failed = record.unkillable or any(end.code for end in record.exits.values())
    if record.exits and not failed:
        return None
    if stop:
        why = f"by {stop.name}"
    elif record.orphan_time < _NEVER:
        why = "because its parent was gone"
    else:
        why = "because the group starts again with other nodes"
    after = f"; rank {cause.rank}: {cause.type}: {cause.message}" if cause else ""
    return Reason(
        exit_code=128 + (stop or signal.SIGTERM),
        type="Stopped",
        message=f"stopped {why}{after}",
        time=time.time(),
    )


def stopped(inbox: Inbox) -> Reason | None:
    """The reason of a stop between two starts."""
    return verdict(Attempt(stop_time=inbox.stop_time, orphan_time=inbox.orphan_time), inbox.stop)


def retryable(exit_code: int) -> bool:
    """Whether another start may end better: the rule of the operator's ExitCode policy."""
    return exit_code >= 128


def backoff(failures: int, maximum: float) -> float:
    """Seconds before another start, doubled by each failure up to a maximum."""
    return min(maximum, 0.1 * 2.0 ** min(failures, 30))  # a job of weeks may have thousands of them


def _enforce(
    group: WorkerGroup, record: Attempt, members: Sequence[Member], stop_grace: float
) -> float:
    """Send what is due, and return the seconds until the next is."""
    term, kill = deadlines(record, stop_grace)
    # A program that is not run by k8sjob's rank_main would answer SIGABRT by a core dump.
    dump = stacks_due(record, stop_grace) if any(m.error_file for m in members) else _NEVER
    now = time.monotonic()
    # The last moment at which a reason cannot be an answer to a signal of the agent's.
    if now >= min(term, kill) and not record.signals:
        record.early = frozenset(_read_reasons(members))
    if now >= kill:
        killed = record.signals.setdefault(signal.SIGKILL, now)
        group.kill()
        return killed + TIMEOUTS.unkillable - now
    if now >= term and signal.SIGTERM not in record.signals:
        record.signals[signal.SIGTERM] = now
        group.send(signal.SIGTERM)
    elif now >= dump:
        record.signals[signal.SIGABRT] = now
        group.show_stacks()  # faulthandler answers SIGABRT even in C code
        dump = _NEVER
    # SIGTERM is not due any more, or does not matter to ranks that hang.
    requested = record.hang or signal.SIGTERM in record.signals
    return min([kill, dump] if requested else [term, kill]) - now


def _take_exits(group: WorkerGroup, members: Sequence[Member], record: Attempt) -> None:
    """Record the exits; copy the stacks of a fatal error to the log, one rank at a time."""
    before = record.exits
    record.exits = {members[index].rank: end for index, end in group.exits.items()}
    for index in group.exits:
        member = members[index]
        if member.rank not in before:
            stacks = read_stacks(member.error_file)
            record.places[member.rank] = fatal_place(stacks)
            with suppress(OSError, ValueError):
                sys.stderr.write(by_rank(member.rank, users_threads(stacks)))
                sys.stderr.flush()


def _silence(ranks: tuple[int, ...], record: Attempt) -> Reason:
    """The hang of ranks whose watchdogs cannot report it themselves."""
    who = ranks_in_words(ranks)
    message = f"{who}: no progress, not even of its watchdog; ended by the node's agent"
    last = Beat(record.states.get(ranks[0], Seen()).step, "", answered=False)
    return hangs.reason({ranks[0]: last}, ranks, message, rank=ranks[0])


def _reason(rank: int, end: Exit, record: Attempt) -> Reason:
    """The reason that the process wrote, if it wrote one; else what its exit code means."""
    reason = record.reasons.get(rank)
    if reason is not None:
        return reason._replace(rank=rank)
    if end.signal:
        try:
            # Most real-time signals have no name.
            name = signal.Signals(end.signal).name
        except ValueError:
            name = f"signal {end.signal}"
        kind, message = "Signal", f"killed by {name}{_HINTS.get(end.signal, '')}"
    else:
        kind, message = "Exit", f"exited with code {end.code}"
    step = record.states.get(rank, Seen()).step
    place = record.places.get(rank, "")
    return Reason(end.code, rank, kind, message, place, end.time, step=step)


def _look(members: Sequence[Member], group: WorkerGroup | None = None) -> dict[int, Seen]:
    """Read the ranks' own reports; in `group` one that is stopped now does not wait."""
    reports = {member.rank: read_seen(seen_file(member.error_file)) for member in members}
    for index, member in enumerate(members):
        report = reports[member.rank]
        # It was stopped while it waited: its report is old, and by now the others may wait for it.
        if group and report.waited and group.stopped(index):
            reports[member.rank] = replace(report, waited=0, stuck=False)
        elif group and index in group.busy():
            reports[member.rank] = replace(report, works=not report.waited)
    return reports


def _read_reasons(members: Sequence[Member]) -> dict[int, Reason]:
    return {member.rank: reason for member in members if (reason := read_reason(member.error_file))}

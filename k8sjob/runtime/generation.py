"""One start of a node's processes, until the last of them has gone, and whom to blame.

What is decided here is in pure functions: `deadlines` and `last_look`, when to signal; `verdict`.
"""

from __future__ import annotations

import signal
import sys
import time
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Final

from k8sjob.contract import ExitCode, Reason
from k8sjob.runtime import strays
from k8sjob.runtime.frames import users_threads
from k8sjob.runtime.group import Command, Exit, Group
from k8sjob.runtime.heartbeat import Pulse
from k8sjob.runtime.last_words import by_rank, read_reason, read_stacks, seen_file
from k8sjob.runtime.observer import Seen, read_seen
from k8sjob.runtime.stuck import hang_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from k8sjob.runtime.signals import Inbox

__all__ = ["Member", "Record", "deadlines", "last_look", "look", "run_generation", "verdict"]

PEER_GRACE: Final = 3.0
"""Seconds that the others have, after a first failure, to end by it and to write their reasons."""
KILL_GRACE: Final = 3.0
"""Seconds between SIGTERM and SIGKILL where nobody is to save anything: a failure, an orphan."""
DUMP_GRACE: Final = 2.0
"""Seconds that processes which do not end have to write their stacks."""
_AGREE_S: Final = 2.5
"""Seconds until the agents of other nodes see the same hang: the first end breaks connections."""
_LOOK: Final = 0.5
"""Seconds between two looks at whether the group is to meet again."""
_NEVER: Final = float("inf")
_HINTS: Final[dict[int, str]] = {
    signal.SIGKILL: "; in a pod mostly out of memory: raise resources.memory or use less",
    signal.SIGABRT: "; it called abort(), mostly in a library: its last lines say why",
    signal.SIGBUS: "; mostly /dev/shm is full: raise resources.shm or use fewer loader workers",
}


@dataclass(frozen=True, slots=True)
class Member:
    """One process of the node.

    Attributes:
        rank: its rank in the whole group.
        command: how to start it.
        error_file: where it leaves its Reason; None: it knows nothing of that.
        heartbeat_file: what it touches with each beat; likewise.
    """

    rank: int
    command: Command
    error_file: Path | None = None
    heartbeat_file: Path | None = None


@dataclass(slots=True)
class Record:
    """What happened in a generation, all times by time.monotonic(); infinite: not yet.

    Attributes:
        exits: by rank, for the processes that have ended.
        reasons: by rank, what the processes said themselves.
        stop_time: a signal asked for a stop.
        orphan_time: the parent was seen to be gone.
        leave_time: the group was told to end, since it is to meet again with other nodes.
        leave_grace: seconds that its processes have for that.
        hang: why the agent holds that the group hangs; None: it does not.
        hang_time: when the processes are to write their stacks for that.
        sent: when which signal was sent to all.
        seen: by rank, what its observer saw last.
        early: ranks that had written a reason before the first signal from here, and so failed by
            themselves, whatever their exit code became.
    """

    exits: Mapping[int, Exit] = field(default_factory=dict)
    reasons: Mapping[int, Reason] = field(default_factory=dict)
    stop_time: float = _NEVER
    orphan_time: float = _NEVER
    leave_time: float = _NEVER
    leave_grace: float = 0.0
    hang: Reason | None = None
    hang_time: float = _NEVER
    sent: dict[int, float] = field(default_factory=dict)
    seen: Mapping[int, Seen] = field(default_factory=dict)
    early: frozenset[int] = frozenset()

    @property
    def running(self) -> dict[int, Seen]:
        """What was seen of the ranks that have not ended."""
        return {rank: one for rank, one in self.seen.items() if rank not in self.exits}

    @property
    def failures(self) -> dict[int, Exit]:
        """The exits that were failures, and not an answer to a signal from here."""
        return {
            rank: end
            for rank, end in self.exits.items()
            if rank in self.early or (end.code and not self._ours(end))
        }

    def _ours(self, end: Exit) -> bool:
        """Ended by a signal from here, or in good order after a SIGTERM from here."""
        asked = signal.SIGTERM if end.code == ExitCode.STOPPED else end.signal
        return end.moment >= self.sent.get(asked, _NEVER)


def run_generation(
    members: Sequence[Member],
    inbox: Inbox,
    *,
    stop_grace: float,
    hang_timeout: float,
    leave: Callable[[Record], float | None] | None = None,
    watch: Callable[[Mapping[int, Seen]], object] | None = None,
    hang: Callable[[Record], Reason | None] = lambda record: hang_of(record.running),
) -> Record:
    """Start the processes and stay until all have gone.

    Args:
        members: the node's processes.
        inbox: entered already.
        stop_grace: seconds between a forwarded stop and SIGKILL.
        hang_timeout: see RuntimeConfig; 0: nobody is watched.
        leave: asked now and then with what is known; seconds that they have to stop as at a
            signal, or None: they go on.
        watch: called now and then with what the observers have seen, by rank.
        hang: likewise; why the group hangs, or None. By default the group is this node's processes.

    Raises:
        OSError: a process could not be started.
    """
    group = Group([member.command for member in members])
    files = [member.heartbeat_file for member in members]
    pulse = Pulse(files, hang_timeout, stopped=group.stopped)
    record = Record()
    watched = leave is not None or watch is not None or hang_timeout > 0
    while True:
        group.poll()
        _take_exits(group, members, record)
        record.stop_time, record.orphan_time = inbox.stop_time, inbox.orphan_time
        if watched:
            record.seen = look(members)
        grace = leave(record) if leave and record.leave_time == _NEVER else None
        if grace is not None:
            record.leave_time, record.leave_grace = _now(), grace
        if group.gone:
            break
        if watch is not None:
            watch(record.seen)
        if not (record.hang or record.failures or signal.SIGKILL in record.sent):
            silent = tuple(members[index].rank for index in pulse.stale(group.alive))
            record.hang = _silence(silent, record) if silent else hang(record)
            if record.hang:
                record.hang_time = _now() + (0 if silent or leave is None else _AGREE_S)
        due = _enforce(group, record, members, stop_grace)
        pause = 0.05 if group.lingering else _LOOK if watched else _NEVER
        inbox.wait(min(due, pulse.interval, pause))
    strays.end()
    record.reasons, record.seen = _read_reasons(members), look(members)
    return record


def look(members: Sequence[Member]) -> dict[int, Seen]:
    """What the observers of the processes saw last, by rank."""
    return {member.rank: read_seen(seen_file(member.error_file)) for member in members}


def deadlines(record: Record, stop_grace: float) -> tuple[float, float]:
    """When SIGTERM and when SIGKILL are due, by time.monotonic(); infinite: not at all."""
    failed = min((end.moment for end in record.failures.values()), default=_NEVER)
    term = min(record.stop_time, record.leave_time, record.orphan_time, failed + PEER_GRACE)
    kill = min(
        record.stop_time + stop_grace,
        record.leave_time + record.leave_grace,
        record.orphan_time + KILL_GRACE,
        failed + PEER_GRACE + KILL_GRACE,
        record.hang_time + DUMP_GRACE,
    )
    return term, kill


def last_look(record: Record, stop_grace: float) -> float:
    """When those that hang, or that SIGTERM did not end, write their stacks, by time.monotonic().

    Whoever made the others fail may be the one that cannot end: its stacks must not be lost.
    Infinite: not at all; an orphan has nobody to read them.
    """
    if record.orphan_time < _NEVER or signal.SIGABRT in record.sent:
        return _NEVER
    if record.hang:
        return record.hang_time
    term, kill = deadlines(record, stop_grace)
    return max((term + kill) / 2, kill - DUMP_GRACE)


def verdict(record: Record, stop: signal.Signals | None) -> Reason | None:
    """Why the generation ended; None when all its processes did what they were to do.

    The first failure counts, by the time that the process itself gave, if it gave one. A rank
    that only lost its peer is blamed last: it may well be seen before the peer itself.

    Args:
        record: with all exits.
        stop: the signal that asked for a stop, where stop_time is finite.
    """
    if record.hang:
        return record.hang
    reasons = {rank: _reason(rank, end, record) for rank, end in record.failures.items()}
    cause = min(
        reasons.values(),
        key=lambda reason: (reason.exit_code == ExitCode.PEER_LOST, reason.time),
        default=None,
    )
    ended = min(record.stop_time, record.orphan_time, record.leave_time)
    if ended == _NEVER or (cause and _before(cause.rank, ended, record)):
        return cause
    if not any(end.code for end in record.exits.values()) and record.exits:
        return None
    orphaned = record.orphan_time < _NEVER
    by = "because its parent was gone" if orphaned else "because the group meets again"
    by = f"by {stop.name}" if stop else by
    after = f"; rank {cause.rank}: {cause.type}: {cause.message}" if cause else ""
    return Reason(
        exit_code=128 + (stop or signal.SIGTERM),
        type="Stopped",
        message=f"stopped {by}{after}",
        time=time.time(),
    )


def _before(rank: int, moment: float, record: Record) -> bool:
    return rank in record.early or record.failures[rank].moment < moment


def _enforce(group: Group, record: Record, members: Sequence[Member], stop_grace: float) -> float:
    """Send what is due, and return the seconds until the next is."""
    term, kill = deadlines(record, stop_grace)
    # A program that knows nothing of k8sjob would answer SIGABRT by a core dump.
    look = last_look(record, stop_grace) if any(m.error_file for m in members) else _NEVER
    now = _now()
    if now >= min(term, kill) and not record.sent:
        record.early = frozenset(_read_reasons(members))
    if now >= kill:
        record.sent.setdefault(signal.SIGKILL, now)
        group.kill()
        return _NEVER
    if now >= term and signal.SIGTERM not in record.sent:
        record.sent[signal.SIGTERM] = now
        group.send(signal.SIGTERM)
    elif now >= look:
        _dump(group, record)
        look = _NEVER
    asked = record.hang or signal.SIGTERM in record.sent
    upcoming = [kill, look] if asked else [term, kill]
    return min(upcoming) - now


def _dump(group: Group, record: Record) -> None:
    """Have every process write its Python stacks: faulthandler answers SIGABRT even in C code."""
    record.sent[signal.SIGABRT] = _now()
    group.show_stacks()


def _take_exits(group: Group, members: Sequence[Member], record: Record) -> None:
    """Note who has ended; bring the stacks of a fatal error to the log, one rank at a time."""
    before = record.exits
    record.exits = {members[index].rank: end for index, end in group.exits.items()}
    for index in group.exits:
        member = members[index]
        if member.rank not in before:
            with suppress(OSError, ValueError):
                sys.stderr.write(
                    by_rank(member.rank, users_threads(read_stacks(member.error_file)))
                )
                sys.stderr.flush()


def _silence(ranks: tuple[int, ...], record: Record) -> Reason:
    """The hang of ranks whose watchdogs cannot tell it themselves."""
    names = ", ".join(map(str, ranks))
    return Reason(
        exit_code=ExitCode.HUNG,
        rank=ranks[0],
        type="Hang",
        message=f"rank {names}: no progress, not even a watchdog's; ended by the node's agent",
        time=time.time(),
        culprits=ranks,
        step=record.seen.get(ranks[0], Seen()).step,
    )


def _reason(rank: int, end: Exit, record: Record) -> Reason:
    """The process's own words, if it left any; else what its exit code says."""
    own = record.reasons.get(rank)
    if own is not None:
        return replace(own, rank=rank)
    if end.signal:
        name = _signal_name(end.signal)
        kind, message = "Signal", f"killed by {name}{_HINTS.get(end.signal, '')}"
    else:
        kind, message = "Exit", "it gave no reason"
    step = record.seen.get(rank, Seen()).step
    return Reason(end.code, rank=rank, type=kind, message=message, time=end.time, step=step)


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _read_reasons(members: Sequence[Member]) -> dict[int, Reason]:
    return {member.rank: reason for member in members if (reason := read_reason(member.error_file))}


def _now() -> float:
    return time.monotonic()

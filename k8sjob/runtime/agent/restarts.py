"""Groups of a fixed size: the restarts of a node's processes, and its end.

A failure that another start may cure (an exit code of 128 or more: a lost peer, a signal, a hang)
is answered by starting the node's processes again, in place; the agents of other nodes do the same.
Any other failure ends the node at once: restarting would not help. The agents share a roster
(`roster.py`). An elastic group has its rendezvous instead.
"""

from __future__ import annotations

import json
import signal
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Final

from k8sjob.contract import EventKind, ExitCode, Reason
from k8sjob.runtime.agent.attempt import backoff, retryable, run_attempt, stopped, verdict
from k8sjob.runtime.agent.roster import DONE, FAILED, RUNNING
from k8sjob.runtime.base.config import TIMEOUTS
from k8sjob.runtime.base.errors import ranks_in_words
from k8sjob.runtime.base.event_lines import log_line, write_event, write_restart
from k8sjob.runtime.base.hangs import decode_ranks, encode_ranks, hang_of
from k8sjob.runtime.base.network import is_connected, is_loopback
from k8sjob.runtime.base.termination import describe

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from k8sjob.contract import RuntimeConfig
    from k8sjob.runtime.agent.attempt import Attempt
    from k8sjob.runtime.agent.roster import Roster
    from k8sjob.runtime.agent.worker_group import Program
    from k8sjob.runtime.base.env import NodeEnv
    from k8sjob.runtime.base.signals import Inbox

_NEVER: Final = float("inf")
_OWN_SIGNALS: Final = frozenset(
    {signal.SIGSEGV, signal.SIGABRT, signal.SIGFPE, signal.SIGILL, signal.SIGBUS}
)
"""Signals that come from what a process does."""


def run_agent(
    program: Program, config: RuntimeConfig, inbox: Inbox, coordinator: Coordinator
) -> tuple[Reason | None, bool]:
    """Run a program to its end, over as many starts as it takes and max_restarts allows.

    The inbox is entered already, so that no stop is lost before the first start.

    Returns:
        Why the last start ended, None when all processes ended with 0; and whether another start
        would end the same way.

    Raises:
        EnvError: there is no folder to write in.
        OSError: a process could not be started.
    """
    restart = coordinator.count.restarts
    while not inbox.stopping():
        coordinator.begin(restart)
        record = run_attempt(
            program, restart, config, inbox, leave=coordinator.leave, hang=coordinator.hang
        )
        reason = verdict(record, inbox.stop)
        # The ranks may have reported more since the last look of this start.
        coordinator.note(record)
        # A process that cannot be killed keeps its GPU's memory and its ports from another start.
        if inbox.stopping() or record.unkillable:
            return reason, False
        # Asked before the exit code counts: it may know that a retryable failure will come again.
        last = coordinator.last(record, reason)
        if last is not None:
            return last, True
        if reason is None or not retryable(reason.exit_code):
            return reason, False
        restart = coordinator.next_restart(restart)
        if restart > config.max_restarts:
            return coordinator.explained(record, reason, inbox), False
        delay = backoff(restart, TIMEOUTS.restart_max)
        log_line(f"{describe(reason)}; restart {restart} of {config.max_restarts} in {delay:.1f} s")
        write_restart(restart, reason)
        inbox.sleep(delay)
    return stopped(inbox), False


class RestartCount:
    """How often a node has been started, over all containers of its pod.

    A container's restart is counted by the kubelet, which does not report it to the container. The
    count is in /dev/shm, which is the pod's: it outlives a container and ends with the pod.

    Attributes:
        restarts: how often the node's processes have been started again.
        refused: why they must not be started in this container, or None.
    """

    def __init__(self, file: Path | None, max_restarts: int) -> None:
        """Read config.restarts_file(); None: no other container came before, and none follows."""
        self._file = file
        self.restarts = 0
        self.refused: Reason | None = None
        try:
            body = json.loads(file.read_text()) if file else {}
            restarts, final = int(body["restarts"]), bool(body.get("final"))
            reason = Reason.decode(body["reason"]) if "reason" in body else None
        except (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError):
            return  # there is none, or the script has written there
        # The kubelet has started a new container, which is a restart too.
        self.restarts = restarts + 1
        # A container that was killed with its agent has left no reason: the kubelet has it.
        if reason and (final or self.restarts > max_restarts):
            self.refused, self.restarts = reason, restarts

    def begin(self, restarts: int) -> None:
        """Record that the processes start for the so-many-th time after the first."""
        self.restarts = restarts
        self._write()

    def end(self, reason: Reason | None, *, final: bool = False) -> None:
        """Record the end of the container; after None or a stop, the next one is no restart.

        `final`: another start would end the same way.
        """
        if reason is not None and reason.exit_code != ExitCode.STOPPED:
            self._write(reason=reason.encode(), final=final)
        elif self._file is not None:
            with suppress(OSError):
                self._file.unlink()

    def _write(self, **end: str | bool) -> None:
        if self._file is not None:
            draft = self._file.with_suffix(".new")
            with suppress(OSError):
                draft.write_text(json.dumps({"restarts": self.restarts, **end}))
                # The container may be killed at any moment, and the next one must find a whole
                # count.
                draft.replace(self._file)


def in_vain(before: Reason | None, now: Reason) -> Reason | None:
    """The reason to end with, where another start would end the same way; None: it may not.

    `before` is why the start before this one has ended.
    """
    if not repeats(before, now):
        return None
    message = f"{now.message}; twice at the same place, so there is no further restart"
    return now._replace(message=message)


def repeats(before: Reason | None, now: Reason) -> bool:
    """Whether a failure is the one before it again: the same ranks, the same place, the same step.

    Of ranks whose calls do not match, another one may abort each time: there the place decides.
    Only for failures whose cause is in the group itself: not for a lost peer, which another rank
    caused, and a connection may break twice in the line where all the time is spent. A signal may
    come from outside, so its step must be known, unless it is one that a process causes itself; a
    hang lasts too long to come by chance twice.
    """
    if before is None or now.means(ExitCode.PEER_LOST) or now.exit_code == ExitCode.STOPPED:
        return False
    by_itself = now.type == "Exit" or now.exit_code - 128 in _OWN_SIGNALS
    located = now.step >= 0 or now.means(ExitCode.HUNG) or (by_itself and now.where)
    aborted = now.exit_code - 128 == signal.SIGABRT and now.where
    # Which of the ranks reports a hang first is chance.
    first, second = (
        (reason.exit_code, aborted or reason.culprits or reason.rank, reason.where, reason.step)
        for reason in (before, now)
    )
    return bool(located) and first == second


class Coordinator:
    """One node's view of its group.

    Attributes:
        count: this node's restarts.
    """

    def __init__(self, node: NodeEnv, roster: Roster, count: RestartCount) -> None:
        self._node, self._roster, self.count = node, roster, count
        self._before: Reason | None = None
        self._depends = False
        self._stuck_since = _NEVER

    def begin(self, restart: int) -> None:
        """Report that the node's processes start for the so-many-th time after the first."""
        self.count.begin(restart)
        self._stuck_since = _NEVER
        self._roster.report(state=RUNNING, restarts=restart, ranks="")

    def next_restart(self, restarts: int) -> int:
        """The number of the group's next restart, or of the one that the others have begun.

        `restarts` are those of this node; a node that came late counts with the others.
        """
        return max(max(restarts, self._roster.joined) + 1, self._roster.restarts())

    @property
    def leave(self) -> Callable[[Attempt], float | None] | None:
        """See run_attempt(): ranks end when they wait for a node that will not come again."""
        return self._leave if self._node.nnodes > 1 else None

    def _leave(self, record: Attempt) -> float | None:
        self.note(record)
        # After a lost peer or a hang, ranks without a group wait in the rendezvous for all the
        # others, and a node that is done does not come to it.
        waits = self._depends and not self._spans(record)
        return TIMEOUTS.kill_grace if waits and self._roster.done() else None

    def hang(self, record: Attempt) -> Reason | None:
        """Why the group hangs; None: it does not.

        Once a rank is stuck, the nodes report to each other where their ranks are.
        """
        state = self._roster.own
        reports = [
            decode_ranks(node.ranks)
            for node in self._roster.others()
            # A report of another start is about ranks that have ended.
            if node.ranks and node.restarts == state.restarts
        ]
        by_node = (*reports, record.running)
        by_rank = {rank: report for ranks in by_node for rank, report in ranks.items()}
        if not any(report.stuck for report in by_rank.values()):
            self._stuck_since = _NEVER
            if state.ranks:
                self._roster.report(ranks="")
            return None
        self._stuck_since = min(self._stuck_since, time.monotonic())
        if (ranks := encode_ranks(record.running)) != state.ranks:
            self._roster.report(ranks=ranks)
        # The culprit may be a rank of a node that has not reported. A node out of reach is not
        # waited for without end.
        complete = len(reports) == self._node.nnodes - 1 or not self._roster.active
        if not complete and time.monotonic() - self._stuck_since < TIMEOUTS.answer:
            return None
        return hang_of(by_rank)

    def last(self, record: Attempt, reason: Reason | None) -> Reason | None:
        """The reason to end with, where another start cannot end better; None: it may.

        `reason` is why the start has ended; None: all processes ended with 0.
        """
        # The agent has ended ranks that waited in vain; the failure before that is why they did.
        if record.leave_time < _NEVER:
            reason = self._before
        if reason is None or reason.exit_code < 128:
            return None
        if end_reason := self._left(record, reason):
            return end_reason
        before, self._before = self._before, reason
        return in_vain(before, reason)

    def explained(self, record: Attempt, reason: Reason, inbox: Inbox) -> Reason:
        """The last reason, once the nodes whose end broke a connection can have reported it."""
        end = time.monotonic() + TIMEOUTS.reported
        while reason.means(ExitCode.PEER_LOST) and not inbox.stopping():
            if (end_reason := self._left(record, reason)) or time.monotonic() > end:
                return end_reason or reason
            inbox.wait(TIMEOUTS.poll)
        return reason

    def _left(self, record: Attempt, reason: Reason) -> Reason | None:
        """The reason to end with where ranks have ended with 0, and would be missing in a start.

        Processes that never formed a group do not need each other.
        """
        done = [rank for node in self._roster.done() for rank in self._node.ranks(node)]
        if reason.means(ExitCode.PEER_LOST) or reason.means(ExitCode.HUNG):
            self._depends = True
            # A rank that ended with 0 after a signal of the agent's had not finished by itself.
            first_signal = min(record.signals.values(), default=_NEVER)
            done += [
                r for r, end in record.exits.items() if not end.code and end.moment < first_signal
            ]
            if not done:
                return None
            return _waited_for(tuple(sorted(done)), reason)
        if not done or not self._roster.own.grouped:
            return None
        ended = f"{ranks_in_words(done)} had ended with exit code 0"
        return reason._replace(message=f"{reason.message}; {ended}, so there is no restart")

    def give_up(self, reason: Reason) -> None:
        """Report to the others that this node does not start again."""
        self._roster.give_up(reason)
        self._roster.flush(TIMEOUTS.flush)

    # --- the end --------------------------------------------------------------------------------

    def finish(self, inbox: Inbox) -> Reason | None:
        """Leave after all ranks of this node have ended with 0, node 0 last.

        Returns:
            Another node's failure, which is then the group's, or a remark with exit code 0.
        """
        self._roster.report(state=DONE)
        if self._node.node_rank:
            self._roster.flush(TIMEOUTS.flush)
            return None
        if self._roster.active:
            self._await_others(inbox)
        failure = self._roster.failure()
        if failure is not None:
            done = tuple(self._node.ranks(0))
            waited = failure.means(ExitCode.PEER_LOST) or failure.means(ExitCode.HUNG)
            if waited and not failure.culprits:
                return _waited_for(done, failure)
            message = f"after {ranks_in_words(done)} had ended with exit code 0: {failure.message}"
            return failure._replace(message=message)
        return self._unmet()

    def _await_others(self, inbox: Inbox) -> None:
        began = time.monotonic()
        announced = False
        while not inbox.stopping() and not self._roster.failure():
            waited = time.monotonic() - began
            late = self._late()
            reporting = {state.node for state in self._roster.others()}
            # A node that never reported may be out of reach, and have ended long ago.
            patience = TIMEOUTS.others if reporting & set(late) else TIMEOUTS.unknown
            if not late or waited > patience:
                break
            if not announced and waited > TIMEOUTS.reported:
                announced = True
                nodes = ranks_in_words(late).replace("rank", "node")
                log_line(f"waiting up to {TIMEOUTS.others:g} s for {nodes} to end")
            inbox.wait(TIMEOUTS.poll)
        if self._late() and not inbox.stopping() and not self._roster.failure():
            who = ranks_in_words(r for node in self._late() for r in self._node.ranks(node))
            message = (
                f"{who} had not ended {time.monotonic() - began:.0f} s after rank 0; the end"
                " of the Master ends the job and, with clean_pod_policy Running, their pods"
            )
            write_event(EventKind.WARNING, message=message)
            log_line(message)
        elif not is_loopback(self._node.master_addr):
            inbox.sleep(TIMEOUTS.reported)

    def _late(self) -> list[int]:
        ended = {node.node for node in self._roster.others() if node.state in {DONE, FAILED}}
        return [node for node in range(1, self._node.nnodes) if node not in ended]

    def _unmet(self) -> Reason | None:
        nodes = [self._roster.own, *self._roster.others()]
        world = self._node.world_size
        # Whether processes that a rank started (mp.spawn) formed a group is not known.
        if any(state.grouped or state.started for state in nodes):
            return None
        if world == 1 or not any(state.torch for state in nodes):
            return None
        replicas = self._node.nnodes
        message = (
            f"no process group was created by the {world} processes of {replicas}"
            f" replica{'s' * (replicas > 1)}: each trained separately; to train one model, call"
            " session() or torch.distributed.init_process_group in the script"
        )
        write_event(EventKind.UNMET, world_size=world, replicas=replicas, message=message)
        log_line(message)
        return Reason(exit_code=0, type="Unmet", message=message, time=time.time())

    # --- whether the ranks have formed a group --------------------------------------------------

    def note(self, record: Attempt) -> None:
        """Report whether the ranks have used torch and formed a group."""
        state = self._roster.own
        grouped = state.grouped or self._spans(record) or self._connected()
        torch = state.torch or any(report.torch for report in record.states.values())
        started = state.started or any(report.started for report in record.states.values())
        if (grouped, torch, started) != (state.grouped, state.torch, state.started):
            self._roster.report(grouped=grouped, torch=torch, started=started)

    def _spans(self, record: Attempt) -> bool:
        """Whether a group, or RPC, spans several nodes; where there is one node, several ranks."""
        alone = self._node.processes if self._node.nnodes > 1 else 1
        return any(max(report.ranks, report.called) > alone for report in record.states.values())

    def _connected(self) -> bool:
        """Whether processes of two nodes are connected, such as a launcher's in a script."""
        # What a rank has started has no observer. On loopback all nodes have the same connections.
        apart = self._node.nnodes > 1 and not is_loopback(self._node.master_addr)
        return apart and is_connected(self._node.master_port)


def _waited_for(done: tuple[int, ...], reason: Reason) -> Reason:
    """The reason of ranks that waited for some which had ended with 0."""
    waited = f"it waited for {ranks_in_words(done)}, which had ended with exit code 0"
    return reason._replace(type="Left", message=f"{waited}: {reason.message}", culprits=done)

"""What a node does for its group of a fixed size: when not to start again, and how to leave.

The agents share a roster; see k8sjob.runtime.roster. An elastic group has its own rendezvous.
"""

from __future__ import annotations

import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

from k8sjob.contract import EventKind, ExitCode, Reason
from k8sjob.runtime.attempts import repeats
from k8sjob.runtime.observer import decode_ranks, encode_ranks
from k8sjob.runtime.port import is_loopback
from k8sjob.runtime.roster import DONE, FAILED, RUNNING
from k8sjob.runtime.starting import emit
from k8sjob.runtime.stuck import hang_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from k8sjob.runtime.attempts import Attempts
    from k8sjob.runtime.env import NodeEnv
    from k8sjob.runtime.generation import Record
    from k8sjob.runtime.roster import Roster
    from k8sjob.runtime.signals import Inbox

__all__ = ["Together"]

_LEAVE_GRACE_S: Final = 3.0
_ANSWERED_S: Final = 5.0
"""How long nodes that can be reached take at most to say where their ranks are."""
_TOLD_S: Final = 3.0
"""How long a node tries to tell node 0 of its end."""
_OTHERS_S: Final = 30.0
"""How long the Master stays for nodes that still work: its end takes their pods away."""
_STRANGERS_S: Final = 10.0
"""The same for nodes of which nothing was ever heard."""
_REPORTED_S: Final = 3.0
"""Until the kubelets have reported the other pods' ends, and the operator leaves these pods be."""
_PROC_NET: Final = ("/proc/net/tcp", "/proc/net/tcp6")


class Together:
    """One node among those of its group."""

    def __init__(
        self, node: NodeEnv, roster: Roster, attempts: Attempts, say: Callable[[str], None]
    ) -> None:
        self._node, self._roster, self._say = node, roster, say
        self.attempts = attempts
        self._before: Reason | None = None
        self._depends = False
        self._stuck_since = float("inf")
        self._out_of_reach = not roster.active or is_loopback(node.master_addr)

    def begin(self, restart: int) -> None:
        """The node's processes are started for the so-many-th time after the first."""
        self.attempts.begin(restart)
        self._stuck_since = float("inf")
        self._roster.report(state=RUNNING, restarts=restart, ranks="")

    def next_restart(self, own: int) -> int:
        """The number of the group's next restart, or of the one that the others have begun.

        Args:
            own: the restarts of this node; one that came late counts with the others.
        """
        return max(max(own, self._roster.joined) + 1, self._roster.restarts())

    @property
    def leave(self) -> Callable[[Record], float | None] | None:
        """Asked now and then while the ranks run: the seconds that they have to end in.

        They are to end when they wait for a node that will not come again. None: one node alone.
        """
        return self._leave if self._node.nnodes > 1 else None

    def _leave(self, record: Record) -> float | None:
        self.note(record)
        waits = self._depends and not self._spans(record)
        return _LEAVE_GRACE_S if waits and self._roster.done() else None

    def hang(self, record: Record) -> Reason | None:
        """Why the group hangs; None: it does not.

        Once a rank is stuck, the nodes tell each other where their ranks are.

        Args:
            record: with what was seen of this node's ranks a moment ago.
        """
        told = [
            decode_ranks(other.ranks)
            for other in self._roster.others()
            # What a node tells of another start is about ranks that have ended.
            if other.ranks and other.restarts == self._roster.own.restarts
        ]
        seen = {rank: one for ranks in (*told, record.running) for rank, one in ranks.items()}
        if not any(one.stuck for one in seen.values()):
            self._stuck_since = float("inf")
            if self._roster.own.ranks:
                self._roster.report(ranks="")
            return None
        self._stuck_since = min(self._stuck_since, time.monotonic())
        if not self._roster.own.ranks:
            self._roster.report(ranks=encode_ranks(record.running))
        complete = len(told) == self._node.nnodes - 1 or not self._roster.active
        if not complete and time.monotonic() - self._stuck_since < _ANSWERED_S:
            return None
        return hang_of(seen)

    def last(self, record: Record, reason: Reason | None) -> Reason | None:
        """The reason to end with, where another start cannot end better; None: it may.

        Args:
            record: the start that has ended.
            reason: why it did; None: well.
        """
        if record.leave_time < float("inf"):
            reason = self._before
        if reason is None or reason.exit_code < 128:
            return None
        if left := self._left(record, reason):
            return left
        before, self._before = self._before, reason
        if not repeats(before, reason):
            return None
        message = f"{reason.message}; twice at the same step, so it is not tried again"
        return replace(reason, message=message)

    def _left(self, record: Record, reason: Reason) -> Reason | None:
        """The reason to end with where ranks have ended with 0, and would be missing in a start.

        Processes that never met do not need each other.
        """
        done = [rank for node in self._roster.done() for rank in self._node.ranks(node)]
        if reason.exit_code in {ExitCode.PEER_LOST, ExitCode.HUNG}:
            self._depends = True
            sent = min(record.sent.values(), default=float("inf"))
            done += [r for r, end in record.exits.items() if not end.code and end.moment < sent]
            if not done:
                return None
            waited = f"it waited for {_named(sorted(done))}, which had ended with exit code 0"
            return replace(
                reason,
                type="Left",
                message=f"{waited}: {reason.message}",
                culprits=tuple(sorted(done)),
            )
        if not done or not self._roster.own.met:
            return None
        ended = f"{_named(sorted(done))} had ended with exit code 0"
        return replace(reason, message=f"{reason.message}; {ended}, so it is not tried again")

    def give_up(self, reason: Reason) -> None:
        """Tell the others that this node does not start again."""
        self._roster.give_up(reason)
        self._roster.flush(_TOLD_S)

    def farewell(self, inbox: Inbox) -> Reason | None:
        """All ranks of this node have ended with 0: leave, node 0 last.

        Returns:
            Another node's failure, which is then the group's, or a remark with exit code 0.
        """
        self._roster.report(state=DONE)
        if self._node.node_rank:
            self._roster.flush(_TOLD_S)
            return None
        if self._roster.active:
            self._await_others(inbox)
        failure = self._roster.failure()
        if failure is not None:
            ended = _named(list(self._node.ranks(0)))
            message = f"after {ended} had ended with exit code 0: {failure.message}"
            return replace(failure, message=message)
        return self._unmet()

    # --- the end --------------------------------------------------------------------------------

    def _await_others(self, inbox: Inbox) -> None:
        began = time.monotonic()
        told = False
        while not inbox.stopping() and not self._roster.failure():
            waited = time.monotonic() - began
            late = self._late()
            known = {state.node for state in self._roster.others()}
            if not late or waited > (_OTHERS_S if known & set(late) else _STRANGERS_S):
                break
            if not told and waited > _REPORTED_S:
                told = True
                self._say(f"waiting up to {_OTHERS_S:g} s for node {_list(late)} to end")
            inbox.wait(0.1)
        if self._late() and not inbox.stopping() and not self._roster.failure():
            self._warn(
                f"{_named([r for node in self._late() for r in self._node.ranks(node)])} had not"
                f" ended {time.monotonic() - began:.0f} s after rank 0; the Master's end ends the"
                " job, and with clean_pod_policy Running their pods"
            )
        elif not is_loopback(self._node.master_addr):
            end = time.monotonic() + _REPORTED_S
            while not inbox.stopping() and time.monotonic() < end:
                inbox.wait(end - time.monotonic())

    def _late(self) -> list[int]:
        ended = {one.node for one in self._roster.others() if one.state in {DONE, FAILED}}
        return [node for node in range(1, self._node.nnodes) if node not in ended]

    def _unmet(self) -> Reason | None:
        nodes = [self._roster.own, *self._roster.others()]
        world = self._node.world_size
        if world == 1 or any(one.met for one in nodes) or not any(one.torch for one in nodes):
            return None
        replicas = self._node.nnodes
        message = (
            f"no process group was made by the {world} processes of {replicas}"
            f" replica{'s' * (replicas > 1)}: each worked alone; if they were to train one model,"
            " call session() or torch.distributed.init_process_group in the script"
        )
        emit(EventKind.UNMET, world_size=world, replicas=replicas, message=message)
        self._say(message)
        return Reason(exit_code=0, type="Unmet", message=message, time=time.time())

    def _warn(self, message: str) -> None:
        emit(EventKind.WARNING, message=message)
        self._say(message)

    # --- whether the ranks have met -------------------------------------------------------------

    def _spans(self, record: Record) -> bool:
        """Whether a process group spans several nodes; where there is one, several ranks."""
        least = self._node.processes if self._node.nnodes > 1 else 1
        return any(seen.ranks > least for seen in record.seen.values())

    def note(self, record: Record) -> None:
        """Take in what was seen of the ranks."""
        own = self._roster.own
        met = own.met or self._spans(record) or self._connected()
        torch = own.torch or any(seen.torch for seen in record.seen.values())
        if (met, torch) != (own.met, own.torch):
            self._roster.report(met=met, torch=torch)

    def _connected(self) -> bool:
        """Whether a process of this pod has a connection through the rendezvous' port.

        So it has in each framework that meets there, whichever process of the pod did.
        """
        if self._out_of_reach:
            return False
        return any(
            self._node.master_port in (here[1], there[1]) and here[0] != there[0]
            for here, there in _connections()
        )


_Address = tuple[str, int]


def _connections() -> Iterator[tuple[_Address, _Address]]:
    """Both ends of the TCP connections of this network namespace, as the kernel writes them."""
    for name in _PROC_NET:
        with suppress(OSError):
            for line in Path(name).read_text().splitlines()[1:]:
                here, there, state = line.split()[1:4]
                if state == "01":
                    yield _address(here), _address(there)


def _address(text: str) -> _Address:
    host, _, port = text.partition(":")
    return host, int(port, 16)


def _named(ranks: Sequence[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {_list(ranks)}"


def _list(numbers: Sequence[int]) -> str:
    shown = ", ".join(map(str, numbers[:8]))
    return f"{shown}, ..." if len(numbers) > 8 else shown

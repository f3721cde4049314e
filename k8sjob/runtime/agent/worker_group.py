"""The processes of one node: started, signaled and reaped, with the orphans that they leave.

A process is reaped last of all: as long as it is a zombie its number, which is its group's number
too, is not given to another process that a signal could hit by mistake.
"""

from __future__ import annotations

import ctypes
import os
import re
import signal
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeAlias

from k8sjob import contract
from k8sjob.contract import ExitCode
from k8sjob.runtime.agent.fork_server import start_process
from k8sjob.runtime.base.config import TIMEOUTS

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

    from k8sjob.runtime.agent.fork_server import ForkServer
    from k8sjob.runtime.base.env import NodeEnv

_PROGRAM_WORDS: Final = 4
"""Words of a command that name its program: python -u -m MODULE."""
_BUSY: Final = 0.02
"""Part of a core that a process uses which works: its observer uses less than a thousandth."""


@dataclass(frozen=True, slots=True)
class Member:
    """One process of the node."""

    rank: int  # its rank in the whole group; -1: it has none
    argv: Sequence[str]  # the arguments of its program
    environ: Mapping[str, str]  # its whole environment
    # where it writes its Reason, beside which its observer writes; None: neither
    error_file: Path | None = None
    forks: ForkServer | None = None  # what starts it, where it can


@dataclass(frozen=True, slots=True)
class Exit:
    """The end of one process."""

    code: int  # as a container shows it: 128 + N for a signal N
    signal: int  # N, or 0 where the process ended by itself
    moment: float  # time.monotonic() at which it was seen
    time: float  # seconds since the epoch at which it was seen


Program: TypeAlias = "Callable[[int, Path], Sequence[Member]]"
"""The node's processes from the number of restarts so far and an empty folder of this start."""


class WorkerGroup:
    """The processes of one node, each the leader of its session and process group.

    Attributes:
        exits: by index of the member, for those that have ended.
    """

    def __init__(self, members: Sequence[Member]) -> None:
        """Start the processes; those already started are killed when one cannot be.

        Raises:
            OSError: there is no such program, or it cannot be started.
        """
        self.exits: dict[int, Exit] = {}
        self._held: dict[int, int] = {}
        self._cpu, self._busy, self._looked = Counter[int](), frozenset[int](), 0.0
        try:
            for index, member in enumerate(members):
                start = member.forks.start if member.forks else start_process
                self._held[index] = start(member.argv, member.environ)
        except OSError:
            self.kill()
            kill_children()
            raise

    @property
    def alive(self) -> tuple[int, ...]:
        """The indices of the processes that have not ended."""
        return tuple(index for index in self._held if index not in self.exits)

    @property
    def gone(self) -> bool:
        """Whether all have ended, with all that they left in their groups."""
        return not self._held

    @property
    def lingering(self) -> bool:
        """Whether a process has ended and left others behind in its group."""
        return any(index in self.exits for index in self._held)

    def poll(self) -> None:
        """Record the processes that have ended, and reap them and any orphan."""
        for index, pid in list(self._held.items()):
            if index not in self.exits:
                status = _peek(pid)
                if status is None:
                    continue
                self.exits[index] = _exit(status)
                # What the process has left in its group gets leftover_grace to end.
                _signal_group(pid, signal.SIGTERM)
            self._release(index, pid)
        # waitid(P_ALL) would find the zombie that is kept first, each time.
        if not self.lingering:
            _reap(own_children=self._held.values())

    def stopped(self, index: int) -> bool:
        """Whether a process is stopped, as by SIGSTOP (Linux; elsewhere: not known)."""
        pid = self._held.get(index)
        return any(fields[0] == b"T" for _, fields in _stats(str(pid)))

    @property
    def works(self) -> bool:
        """Whether the main thread of a process, or of a child, runs or reads a disk (Linux)."""
        sessions = set(self._held.values())
        # Threads of a backend wake up now and then while the main thread waits.
        return any(fields[0] in b"RD" and int(fields[3]) in sessions for _, fields in _stats())

    def busy(self) -> frozenset[int]:
        """The processes that, with their children, have used CPU time lately (Linux)."""
        passed = time.monotonic() - self._looked
        if passed >= TIMEOUTS.busy:
            before, self._cpu, self._looked = self._cpu, Counter(), self._looked + passed
            for _, fields in _stats():  # with the children that have ended, in ticks
                # By session, of which each rank is the leader: its children stay in it.
                self._cpu[int(fields[3])] += sum(map(int, fields[11:15]))
            enough = _BUSY * passed * os.sysconf("SC_CLK_TCK")
            self._busy = frozenset(
                index
                for index, pid in self._held.items()
                if pid in before and self._cpu[pid] - before[pid] > enough
            )
        return self._busy

    def launcher(self) -> str:
        """The command of a launcher that runs in a session of the processes; empty for none."""
        ranks = set(self._held.values())
        for pid, fields in _stats():
            if pid not in ranks and int(fields[3]) in ranks:
                with suppress(OSError):  # it has ended meanwhile
                    argv = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace")
                    command = " ".join(argv.split("\0")[:_PROGRAM_WORDS]).strip()
                    if re.search(contract.LAUNCHES, command):
                        return command
        return ""

    def describe(self, index: int) -> str:
        """A living process's number and state, and the function of the kernel in which it waits."""
        pid = self._held[index]
        threads = [(thread, fields[0].decode()) for thread, fields in _stats(f"{pid}/task/*")]
        place = ""
        # SIGKILL waits for a thread in state D, which sleeps in the kernel without interruption.
        for thread, state in sorted(threads, key=lambda pair: pair[1] != "D")[:1]:
            place = f" in state {state}"
            with suppress(OSError):
                place += f", {Path(f'/proc/{pid}/task/{thread}/wchan').read_text()}"
        return f"process {pid}{place.removesuffix(', 0')}"

    def send(self, number: int) -> None:
        """Signal each living process, without its children.

        A data loader's worker that died of a forwarded SIGTERM would make its parent fail in the
        middle of its last checkpoint.
        """
        for index in self.alive:
            os.kill(self._held[index], number)

    def show_stacks(self) -> None:
        """SIGABRT to each living process's main thread, and SIGCONT in case it is stopped.

        A stopped process that gets SIGABRT as a whole takes it, after the SIGCONT, in whichever
        thread comes first, while the main thread leaves the line where it hung.
        """
        for index in self.alive:
            _signal_main_thread(self._held[index], signal.SIGABRT)
            os.kill(self._held[index], signal.SIGCONT)

    def kill(self) -> None:
        """SIGKILL to all processes and everything in their groups."""
        for pid in self._held.values():
            _signal_group(pid, signal.SIGKILL)

    def _release(self, index: int, pid: int) -> None:
        """Reap an ended process once its group is empty; after the grace, empty it."""
        group = str(pid).encode()
        # The leader itself is a zombie in its group.
        if any(stat[2] == group and stat[0] not in {b"Z", b"X"} for _, stat in _stats()):
            if time.monotonic() < self.exits[index].moment + TIMEOUTS.leftover_grace:
                return
            _signal_group(pid, signal.SIGKILL)
        with suppress(ChildProcessError):
            os.waitpid(pid, 0)
        del self._held[index]


def shared_environ(environ: Mapping[str, str], lifeline: int) -> dict[str, str]:
    """What a node's ranks share; `lifeline` is the read end of the agent's pipe, inheritable."""
    return {
        "PYTHONUNBUFFERED": "1",
        # Else a set of strings has another order in each process, and ranks that register
        # parameters in that order mix them up. No job's own number: its successor resumes them.
        "PYTHONHASHSEED": "0",
        **environ,
        contract.LIFELINE_ENV: str(lifeline),
    }


def training_program(
    argv: Sequence[str],
    node: NodeEnv,
    environ: Mapping[str, str],
    local_rank_arg: str | None,
    forks: ForkServer | None,
) -> Program:
    """One process for each local rank of a node, with its variables beside `environ`.

    `argv` would follow `python`: SCRIPT or -m MODULE, and arguments.
    """

    def member(local: int, restart: int, folder: Path) -> Member:
        error = folder / f"error-{local}.json"
        assigned = node.process(local, restart)
        variables = {**environ, **assigned, contract.ERROR_FILE_ENV: str(error)}
        extra = [f"{local_rank_arg}={local}"] if local_rank_arg else []
        return Member(int(assigned["RANK"]), [*argv, *extra], variables, error, forks)

    return lambda restart, folder: [
        member(local, restart, folder) for local in range(node.processes)
    ]


def single_program(argv: Sequence[str], environ: Mapping[str, str], lifeline: int) -> Program:
    """One command, searched on PATH, its environment untouched: no rank and no reason."""
    variables = {**environ, contract.LIFELINE_ENV: str(lifeline)}
    return lambda _restart, _folder: [Member(-1, ["--exec", *argv], variables)]


def kill_children(spared: Collection[int | None] = ()) -> None:
    """SIGKILL to all children but some, and to their children, which this process then adopts.

    A child is signaled before it is reaped, so that its number is still its own.
    """
    limit = time.monotonic() + TIMEOUTS.kernel
    me = str(os.getpid()).encode()
    while time.monotonic() < limit:
        children = [pid for pid, fields in _stats() if fields[1] == me and pid not in spared]
        if not children:
            return
        for pid in children:
            with suppress(PermissionError):  # another user's, by a setuid program
                os.kill(pid, signal.SIGKILL)
        _reap(own_children=())
        time.sleep(0.005)


def _reap(own_children: Collection[int]) -> None:
    """Reap the adopted children that have ended; stops at the first one of `own_children`."""
    if not hasattr(os, "waitid"):
        return
    with suppress(ChildProcessError):
        while True:
            ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if ended is None or ended.si_pid in own_children:
                return
            os.waitpid(ended.si_pid, 0)


def _stats(pid: str = "[0-9]*") -> Iterator[tuple[int, list[bytes]]]:
    """The processes' state, parent, group and so on, from /proc; nothing outside Linux."""
    for entry in Path("/proc").glob(pid):  # "*/stat" fails if a process ends meanwhile
        with suppress(OSError):  # it has ended meanwhile
            # The name in parentheses may hold anything, spaces and parentheses included.
            yield int(entry.name), (entry / "stat").read_bytes().rpartition(b")")[2].split()


def _signal_group(pid: int, number: int) -> None:
    # EPERM: macOS' answer for a group that has only zombies.
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, number)


def _signal_main_thread(pid: int, number: int) -> None:
    # Linux: a process's main thread has the process's number. Elsewhere there is no tgkill.
    tgkill = getattr(ctypes.CDLL(None), "tgkill", None)
    if tgkill is None or tgkill(pid, pid, number):
        os.kill(pid, number)


def _exit(status: int) -> Exit:
    number = -status if status < 0 else 0
    return Exit(ExitCode.of_status(status), number, time.monotonic(), time.time())


def _peek(pid: int) -> int | None:
    """The return code of an ended child, which stays a zombie; None while it runs."""
    if not hasattr(os, "waitid"):  # macOS before Python 3.13: reaped at once
        done, status = os.waitpid(pid, os.WNOHANG)
        return os.waitstatus_to_exitcode(status) if done else None
    ended = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    if ended is None:
        return None
    return ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status

"""Keeps the processes of one node: one design for one process and for many, without torch.

A failure that another start may cure (an exit code of 128 or more: a lost peer, a signal, a hang)
is answered by starting the node's processes anew, in place; the peers on other nodes do the same.
Any other failure ends the node at once: the same start would fail again.
"""

from __future__ import annotations

import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final, Protocol

from k8sjob.runtime.env import EnvError
from k8sjob.runtime.generation import Member, Record, run_generation, verdict
from k8sjob.runtime.starting import Starting
from k8sjob.runtime.stuck import hang_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from k8sjob.contract import Reason, RuntimeConfig
    from k8sjob.runtime.signals import Inbox
    from k8sjob.runtime.together import Together

__all__ = ["End", "Program", "describe", "keep", "pause", "rest", "retryable", "say", "start"]

_LONGEST_PAUSE_S: Final = 2.0


class Program(Protocol):
    """What runs on the node."""

    def members(self, restart: int, folder: Path) -> Sequence[Member]:
        """The processes of one start; `folder` is empty and theirs alone."""


@dataclass(frozen=True, slots=True)
class End:
    """How a node has ended.

    Attributes:
        reason: why its last start ended; None when all processes ended with 0.
        final: whether another start would end the same way.
    """

    reason: Reason | None
    final: bool = False


def keep(program: Program, config: RuntimeConfig, inbox: Inbox, group: Together) -> End:
    """Run a program to its end, over as many starts as it takes and max_restarts allows.

    Args:
        program: what to run.
        config: max_restarts, stop_grace and hang_timeout are used.
        inbox: entered already, so that no stop is lost before the first start.
        group: the nodes that run it.

    Raises:
        EnvError: there is no folder to write in.
        OSError: a process could not be started.
    """
    restart = group.attempts.restarts
    while not inbox.stopping():
        group.begin(restart)
        record = start(program, restart, config, inbox, leave=group.leave, hang=group.hang)
        reason = verdict(record, inbox.stop)
        group.note(record)
        if inbox.stopping():
            return End(reason)
        last = group.last(record, reason)
        if last is not None:
            return End(last, final=True)
        if reason is None or not retryable(reason.exit_code):
            return End(reason)
        restart = group.next_restart(restart)
        if restart > config.max_restarts:
            return End(reason)
        delay = pause(restart, _LONGEST_PAUSE_S)
        say(f"{describe(reason)}; restart {restart} of {config.max_restarts} in {delay:.1f} s")
        rest(delay, inbox)
    stopped = Record(stop_time=inbox.stop_time, orphan_time=inbox.orphan_time)
    return End(verdict(stopped, inbox.stop))


def retryable(exit_code: int) -> bool:
    """Whether another start may end better: the rule of the operator's ExitCode policy."""
    return exit_code >= 128


def describe(reason: Reason) -> str:
    """A reason as one line for people."""
    who = f"rank {reason.rank}: " if reason.rank >= 0 else ""
    message = " ".join(reason.message.split())
    where = f" ({reason.where})" if reason.where and reason.where not in message else ""
    return f"{who}{reason.type}: {message}{where}, exit code {reason.exit_code}"


def say(line: str) -> None:
    """One line to the container's log."""
    with suppress(OSError, ValueError):
        sys.stderr.write(f"k8sjob: {line}\n")
        sys.stderr.flush()


def start(
    program: Program,
    restart: int,
    config: RuntimeConfig,
    inbox: Inbox,
    *,
    leave: Callable[[Record], float | None] | None = None,
    hang: Callable[[Record], Reason | None] = lambda record: hang_of(record.running),
) -> Record:
    """One start of a program, to its end.

    Args:
        program: what to run.
        restart: how often it was started before.
        config: see keep().
        inbox: entered already.
        leave: see run_generation().
        hang: likewise.
    """
    with _folder() as folder:
        members = program.members(restart, Path(folder))
        observed = any(member.error_file for member in members)
        return run_generation(
            members,
            inbox,
            stop_grace=config.stop_grace,
            hang_timeout=config.hang_timeout,
            leave=leave,
            watch=Starting(len(members)).note if observed else None,
            hang=hang,
        )


def _folder() -> tempfile.TemporaryDirectory[str]:
    """A folder of our own; /dev/shm where the root file system is read-only."""
    try:
        return tempfile.TemporaryDirectory(prefix="k8sjob-", ignore_cleanup_errors=True)
    except OSError as error:
        with suppress(OSError):
            return tempfile.TemporaryDirectory(
                prefix="k8sjob-",
                dir="/dev/shm",
                ignore_cleanup_errors=True,
            )
        raise EnvError(
            f"no folder to write in: {error}; mount an empty_dir at /tmp or set TMPDIR"
        ) from None


def pause(failures: int, longest: float) -> float:
    """Seconds before another start, doubled by each failure up to the longest."""
    return min(longest, 0.1 * 2.0 ** min(failures, 30))  # a job of weeks may have thousands of them


def rest(seconds: float, inbox: Inbox) -> None:
    """Do nothing for so long, or until a stop is asked for."""
    end = time.monotonic() + seconds
    while not inbox.stopping() and time.monotonic() < end:
        inbox.wait(end - time.monotonic())

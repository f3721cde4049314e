"""The agent: keeps a node's processes running, over as many starts as it takes, without torch.

A failure that another start may cure (an exit code of 128 or more: a lost peer, a signal, a hang)
is answered by starting the node's processes again, in place; the agents of other nodes do the same.
Any other failure ends the node at once: restarting would not help.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Final

from k8sjob import contract
from k8sjob.runtime.agent.attempt import Record, run_attempt, verdict
from k8sjob.runtime.agent.worker_group import Member
from k8sjob.runtime.base.report import log_line
from k8sjob.runtime.base.termination import describe
from k8sjob.runtime.base.timeouts import TIMEOUTS

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from k8sjob.contract import Reason, RuntimeConfig
    from k8sjob.runtime.agent.attempt import Program
    from k8sjob.runtime.agent.coordination import Coordinator
    from k8sjob.runtime.base.env import NodeEnv
    from k8sjob.runtime.base.signals import Inbox

__all__ = [
    "backoff",
    "retryable",
    "run_agent",
    "single_program",
    "stopped",
    "training_program",
]

_RANK_MAIN: Final = (sys.executable, "-P", "-m", "k8sjob.runtime.agent.rank_main")


def run_agent(
    program: Program, config: RuntimeConfig, inbox: Inbox, coordinator: Coordinator
) -> tuple[Reason | None, bool]:
    """Run a program to its end, over as many starts as it takes and max_restarts allows.

    Args:
        program: what to run.
        config: max_restarts, stop_grace and hang_timeout are used.
        inbox: entered already, so that no stop is lost before the first start.
        coordinator: this node among the nodes of its group.

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
        coordinator.note(record)
        if inbox.stopping():
            return reason, False
        last = coordinator.last(record, reason)
        if last is not None:
            return last, True
        if reason is None or not retryable(reason.exit_code):
            return reason, False
        restart = coordinator.next_restart(restart)
        if restart > config.max_restarts:
            return reason, False
        delay = backoff(restart, TIMEOUTS.restart_max)
        log_line(f"{describe(reason)}; restart {restart} of {config.max_restarts} in {delay:.1f} s")
        inbox.sleep(delay)
    return stopped(inbox), False


def stopped(inbox: Inbox) -> Reason | None:
    """The reason of a stop between two starts."""
    return verdict(Record(stop_time=inbox.stop_time, orphan_time=inbox.orphan_time), inbox.stop)


def retryable(exit_code: int) -> bool:
    """Whether another start may end better: the rule of the operator's ExitCode policy."""
    return exit_code >= 128


def backoff(failures: int, maximum: float) -> float:
    """Seconds before another start, doubled by each failure up to a maximum."""
    return min(maximum, 0.1 * 2.0 ** min(failures, 30))  # a job of weeks may have thousands of them


def training_program(
    argv: Sequence[str],
    node: NodeEnv,
    environ: Mapping[str, str],
    local_rank_arg: str | None,
    lifeline: int,
) -> Program:
    """One process for each local rank of a node.

    Args:
        argv: what would follow `python`: SCRIPT or -m MODULE, and arguments.
        node: this node's place in the group.
        environ: the environment to which each process's variables are added.
        local_rank_arg: see RuntimeConfig.
        lifeline: read end of the agent's pipe, inheritable.
    """

    def member(local: int, restart: int, folder: Path) -> Member:
        error = folder / f"error-{local}.json"
        own = node.process(local, restart)
        variables = {
            "PYTHONUNBUFFERED": "1",
            **environ,
            **own,
            contract.ERROR_FILE_ENV: str(error),
            contract.LIFELINE_ENV: str(lifeline),
        }
        extra = [f"{local_rank_arg}={local}"] if local_rank_arg else []
        return Member(int(own["RANK"]), [*_RANK_MAIN, *argv, *extra], variables, error)

    return lambda restart, folder: [
        member(local, restart, folder) for local in range(node.processes)
    ]


def single_program(argv: Sequence[str], environ: Mapping[str, str], lifeline: int) -> Program:
    """One command, searched on PATH, its environment untouched: no rank and no reason."""
    variables = {**environ, contract.LIFELINE_ENV: str(lifeline)}
    return lambda _restart, _folder: [Member(-1, [*_RANK_MAIN, "--exec", *argv], variables)]

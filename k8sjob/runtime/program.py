"""What runs on a node, as the agent starts it: the ranks of a training, or one command as it is."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

from k8sjob import contract
from k8sjob.runtime.config import HEARTBEAT_ENV
from k8sjob.runtime.generation import Member
from k8sjob.runtime.group import Command

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from k8sjob.runtime.env import NodeEnv

__all__ = ["Ranks", "Single"]

_BOOT = (sys.executable, "-P", "-m", "k8sjob.runtime.boot")


@dataclass(frozen=True, slots=True)
class Ranks:
    """The processes of one node of a training.

    Attributes:
        argv: what would follow `python`: SCRIPT or -m MODULE, and arguments.
        node: where in the group this node is.
        environ: the environment that each process adds its own variables to.
        local_rank_arg: see RuntimeConfig.
        lifeline: read end of the agent's pipe, inheritable.
    """

    argv: Sequence[str]
    node: NodeEnv
    environ: Mapping[str, str]
    local_rank_arg: str | None
    lifeline: int

    def members(self, restart: int, folder: Path) -> list[Member]:
        """One process for each local rank."""
        return [self._member(local, restart, folder) for local in range(self.node.processes)]

    def _member(self, local: int, restart: int, folder: Path) -> Member:
        error, heartbeat = folder / f"error-{local}.json", folder / f"heartbeat-{local}"
        own = self.node.process(local, restart)
        environ = {
            "PYTHONUNBUFFERED": "1",
            **self.environ,
            **own,
            contract.ERROR_FILE_ENV: str(error),
            HEARTBEAT_ENV: str(heartbeat),
            contract.LIFELINE_ENV: str(self.lifeline),
        }
        extra = [f"{self.local_rank_arg}={local}"] if self.local_rank_arg else []
        command = Command([*_BOOT, *self.argv, *extra], environ)
        return Member(int(own["RANK"]), command, error, heartbeat)


@dataclass(frozen=True, slots=True)
class Single:
    """One command, its environment untouched: no rank, no heartbeat, no reason of its own.

    Attributes:
        argv: the command, searched on PATH.
        environ: its environment.
        lifeline: read end of the agent's pipe, inheritable.
    """

    argv: Sequence[str]
    environ: Mapping[str, str]
    lifeline: int

    def members(self, restart: int, folder: Path) -> list[Member]:  # noqa: ARG002 - Program
        """The one process."""
        environ = {**self.environ, contract.LIFELINE_ENV: str(self.lifeline)}
        return [Member(-1, Command([*_BOOT, "--exec", *self.argv], environ))]

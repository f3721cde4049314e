"""How often a node has been started, over all containers of its pod, and when to stop trying.

A container's restart is counted by the kubelet alone, which does not tell the container. The count
lies in /dev/shm: it is the pod's, so it outlives a container and goes with the pod.
"""

from __future__ import annotations

import json
import os
import socket
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from k8sjob import contract
from k8sjob.contract import ExitCode, Reason

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["Attempts", "attempts_file", "repeats"]

_SHARED: Final = Path("/dev/shm")  # noqa: S108 - the pod's own


@dataclass(frozen=True, slots=True)
class _Earlier:
    """What the last container of this pod left: its restarts, and why its agent ended."""

    restarts: int
    reason: Reason | None
    final: bool


class Attempts:
    """The restarts of this node.

    Attributes:
        restarts: how often its processes have been started anew.
        refused: why they must not be started in this container, or None.
    """

    def __init__(self, file: Path | None, most: int) -> None:
        """Read what an earlier container of this pod has left.

        Args:
            file: see attempts_file(); None: there was none, and none will follow.
            most: max_restarts.
        """
        self._file = file
        earlier = _read(file)
        self.restarts = earlier.restarts + 1 if earlier else 0
        self.refused: Reason | None = None
        # A container that was killed with its agent has left no reason: the kubelet has it.
        if earlier and earlier.reason and (earlier.final or self.restarts > most):
            self.refused, self.restarts = earlier.reason, earlier.restarts

    def begin(self, restarts: int) -> None:
        """The processes are started for the so-many-th time after the first."""
        self.restarts = restarts
        self._write(None, final=False)

    def end(self, reason: Reason | None, *, final: bool = False) -> None:
        """The container is about to end.

        Args:
            reason: why; None or a stop: what comes after it is no restart.
            final: another start would end the same way.
        """
        if reason is None or reason.exit_code == ExitCode.STOPPED:
            if self._file is not None:
                with suppress(OSError):
                    self._file.unlink()
            return
        self._write(reason, final=final)

    def _write(self, reason: Reason | None, *, final: bool) -> None:
        if self._file is None:
            return
        body: dict[str, object] = {"restarts": self.restarts, "final": final}
        if reason is not None:
            body["reason"] = reason.encode()
        draft = self._file.with_suffix(".new")
        with suppress(OSError):
            draft.write_text(json.dumps(body))
            draft.replace(self._file)


def attempts_file(environ: Mapping[str, str]) -> Path | None:
    """Where the count lies: in the pod's shared memory, or beside a local replica's messages.

    Args:
        environ: the whole environment of the container.

    Returns:
        None outside a container: nobody starts the agent again there.
    """
    named = environ.get(contract.TERMINATION_LOG_ENV)
    if named:
        return Path(f"{named}.restarts")
    if not Path(contract.TERMINATION_LOG).exists() or not os.access(_SHARED, os.W_OK):
        return None
    return _SHARED / f"k8sjob-restarts-{socket.gethostname()}.json"


def repeats(before: Reason | None, now: Reason) -> bool:
    """Whether a failure is the one before it again: the same ranks, the same place, the same step.

    Only of failures whose cause is in the group itself. A lost peer fails for what became of
    another one, and a connection may break twice in the line where all the time is spent. A signal
    may come from outside, so its step must be known; a hang lasts too long to come by chance twice.
    """
    if before is None or now.exit_code in {ExitCode.PEER_LOST, ExitCode.STOPPED}:
        return False
    known = now.step >= 0 or now.exit_code == ExitCode.HUNG
    return known and _identity(before) == _identity(now)


def _identity(reason: Reason) -> tuple[object, ...]:
    # Which of the ranks reports a hang first is chance.
    who = reason.culprits or (reason.rank,)
    return reason.exit_code, who, reason.where, reason.step


def _read(file: Path | None) -> _Earlier | None:
    try:
        body = json.loads(file.read_text()) if file else None
        if body is None:
            return None
        reason = Reason.decode(body["reason"]) if "reason" in body else None
        return _Earlier(int(body["restarts"]), reason, bool(body.get("final")))
    except (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return None  # the script can write there too

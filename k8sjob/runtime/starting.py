"""What a node's agent tells of its processes until they run the user's code."""

from __future__ import annotations

import sys
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Literal

from k8sjob.contract import Event, EventKind

if TYPE_CHECKING:
    from collections.abc import Mapping

    from k8sjob.runtime.observer import Seen

__all__ = ["Starting", "emit"]

_Phase = Literal["", "python", "importing", "running"]


class Starting:
    """The phase of one start of a node's processes: that of the one that is furthest behind."""

    def __init__(self, processes: int) -> None:
        self._processes = processes
        self._phase: _Phase = ""

    def note(self, seen: Mapping[int, Seen]) -> None:
        """Tell the phase where it has changed.

        Args:
            seen: what the observers of the processes saw last, by rank.
        """
        phase = _phase(seen)
        if phase != self._phase:
            self._phase = phase
            emit(EventKind.STARTING, phase=phase, processes=self._processes)


def _phase(seen: Mapping[int, Seen]) -> _Phase:
    if not all(one.runs for one in seen.values()):
        return "python"
    return "importing" if any(one.importing for one in seen.values()) else "running"


def emit(kind: EventKind, **data: object) -> None:
    """One event of the agent's own to the container's log."""
    with suppress(OSError, ValueError):
        sys.stdout.write(Event(kind, data, time.time()).encode() + "\n")
        sys.stdout.flush()

"""Warnings of waits for progress, long before a hang is certain and ends the processes."""

from __future__ import annotations

import math
import threading
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final

from k8sjob.contract import NO_PROGRESS, EventKind
from k8sjob.runtime.base.hangs import places

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from k8sjob.runtime.base.heartbeat import Seen

WARN_AFTER: Final = 0.1
"""The part of hang_timeout after which there is a warning of a wait."""
_WRITING: Final = threading.Lock()
"""Keeps the end of a wait behind its beginning."""


class LongWaits:
    """The waits for progress that are worth a warning: a hang begins like them.

    They last a tenth of hang_timeout, and twice as long as one that was reported before: an
    evaluation in each epoch is reported once.
    """

    def __init__(self, hang_timeout: float) -> None:
        """hang_timeout 0: there are none."""
        self._minimum = WARN_AFTER * hang_timeout or math.inf
        self._begun = 0.0  # the moment at which the wait began that was reported last

    @property
    def reported(self) -> bool:
        """Whether a wait was reported that is not over."""
        return self._begun > 0

    def look(self, since: float) -> dict[str, Any] | None:
        """What is to be reported now of the time since the last progress, by time.monotonic().

        Returns:
            seconds, and over: whether a wait that was reported is over. None: nothing.
        """
        seconds = time.monotonic() - since
        if self._begun and since > self._begun:
            seconds, self._begun = since - self._begun, 0.0
            # A wait that returns in each epoch is part of the script.
            self._minimum = max(self._minimum, 2 * seconds)
            return {"seconds": round(seconds), "over": True}
        if self._begun or seconds < self._minimum:
            return None
        self._begun = since
        return {"seconds": round(seconds), "over": False}


class StepClock:
    """The time since the last optimizer step of ranks that have no session, among them rank 0."""

    def __init__(self, hang_timeout: float) -> None:
        """A clock that knows no step yet."""
        self._waits = LongWaits(hang_timeout)
        self._steps: dict[int, int] = {}
        self._since = 0.0

    def look(self, ranks: Mapping[int, Seen]) -> dict[str, Any] | None:
        """A wait that is to be reported, see LongWaits.

        A rank that ends, or leaves the script by an exception, makes no progress by that.
        """
        stepped = False
        for rank, state in ranks.items():
            before = self._steps.get(rank, state.step)
            stepped = stepped or state.step > before
            self._steps[rank] = max(state.step, before)
        begun = max(self._steps.values(), default=-1) >= 0 or any(r.waited for r in ranks.values())
        # Only the agent of rank 0 reports: those of other nodes would report the same wait.
        located = begun and 0 in ranks and ranks[0].where
        if stepped or not (located or self._waits.reported):
            self._since = time.monotonic()
        return self._waits.look(self._since) if located or stepped else None


def step_missing(wait: Mapping[str, Any], ranks: Mapping[int, Seen]) -> dict[str, Any]:
    """The warning of such a wait; on GPUs it is not seen which ranks wait, so all have a place."""
    return {"message": f"no optimizer step for {wait['seconds']} s: {places(ranks, tuple(ranks))}"}


def warn_of_wait(
    emit: Callable[..., None], wait: Mapping[str, Any], describe: Callable[[], Mapping[str, Any]]
) -> None:
    """Write a warning of a wait, see LongWaits, with more that describes it.

    From a thread of its own: a log that is full, or a disk that is away, may be what waits.
    """

    def write() -> None:
        with _WRITING, suppress(Exception):
            again = {"message": f"progress again after {wait['seconds']} s"}
            more = again if wait["over"] else describe()
            emit(EventKind.WARNING, reason=NO_PROGRESS, **wait, **more)

    with suppress(RuntimeError):  # there may be too many threads
        threading.Thread(target=write, daemon=True, name="k8sjob-warning").start()

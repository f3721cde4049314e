"""Ranks of a script without a session that wait in a collective, and those that they wait for.

A loop is often seen at the same line, so the frames of a thread do not prove a long wait. The
thread's CPU clock does: it stands still only while the thread is blocked. NCCL polls while it
waits, so its waits are not seen; torch itself ends a process at the timeout of an NCCL collective.
"""

from __future__ import annotations

import math
import os
import sys
import threading
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final

from k8sjob.contract import ExitCode, Reason
from k8sjob.runtime.frames import caller, where_is

if TYPE_CHECKING:
    from collections.abc import Mapping

    from k8sjob.runtime.observer import Seen

__all__ = ["Waiting", "hang_of"]

_LONGEST_LOOK_S: Final = 1.0
"""The most that one look adds: a process that was frozen did not wait meanwhile."""
_TORCH: Final = f"{os.sep}torch{os.sep}"
_WITHOUT_PEERS: Final = (
    f"{_TORCH}distributed{os.sep}checkpoint{os.sep}",  # waits for threads that write
    f"{_TORCH}distributed{os.sep}rpc{os.sep}",  # waits for work, as a server does
    f"{_TORCH}futures{os.sep}",
)
_SHOWN: Final = 8


class Waiting:
    """How long the main thread of this process has been blocked in a collective.

    Attributes:
        where: the main thread's place in the user's code, as file:line in function.
    """

    def __init__(self, hang_timeout: float) -> None:
        """Nothing is known before the second look().

        Args:
            hang_timeout: seconds after which a wait is a hang; 0: nothing is looked at.
        """
        self._limit, self._thread = hang_timeout, threading.main_thread().ident or 0
        self._clock = _cpu_clock(self._thread) if hang_timeout else None
        self._ran, self._looked, self._waited = -1, time.monotonic(), 0.0
        self._steps, self._idle = 0, 0.0
        self.where = ""

    @property
    def seconds(self) -> int:
        """How long it has been blocked in a collective, rounded up; 0: it is not."""
        return math.ceil(self._waited)

    @property
    def too_long(self) -> bool:
        """Whether both the job and the script itself allow no wait as long as this one."""
        return bool(self._limit) and self._waited >= self._limit and self._waited >= _own_timeout()

    @property
    def steps_on(self) -> bool:
        """Whether this rank has done an optimizer step within hang_timeout: the group works."""
        return self._steps > 0 and self._idle < self._limit

    def look(self, steps: int) -> None:
        """See where the main thread is, and whether it has run since the last look.

        Args:
            steps: the optimizer steps that it has done.
        """
        now = time.monotonic()
        passed, self._looked = min(now - self._looked, _LONGEST_LOOK_S), now
        self._idle = self._idle + passed if steps == self._steps else 0.0
        self._steps = steps
        blocked = False
        if self._clock is not None and _is_watched():
            before, self._ran = self._ran, time.clock_gettime_ns(self._clock)
            spot = where_is(self._thread)
            self.where = spot.where
            blocked = self._ran == before and spot.waits and _needs_others(self._thread)
        self._waited = self._waited + passed if blocked else 0.0


def hang_of(seen: Mapping[int, Seen]) -> Reason | None:
    """Why a group hangs, and by whom; None: no rank has waited too long.

    Args:
        seen: what the observers saw, by rank, of all ranks that still run.
    """
    late = min((rank for rank, one in seen.items() if one.stuck), default=None)
    if late is None or any(one.steps_on for one in seen.values()):
        return None
    guilty = tuple(sorted(rank for rank, one in seen.items() if one.ranks > 1 and not one.waited))
    message = f"rank {late} has waited {seen[late].waited} s in a collective, {seen[late].where}"
    if guilty:
        message = f"{_places(seen, guilty)}; {message}"
    elif len({one.where for one in seen.values()}) > 1:
        message += f"; so have all others, in different lines: {_places(seen, tuple(seen))}"
    else:
        message += "; no rank is known that does not wait"
    first = seen[guilty[0] if guilty else late]
    return Reason(
        exit_code=ExitCode.HUNG,
        rank=guilty[0] if guilty else late,
        type="Hang",
        message=message,
        where=first.where.partition(" ")[0],
        time=time.time(),
        culprits=guilty,
        step=first.step,
    )


def _places(seen: Mapping[int, Seen], ranks: tuple[int, ...]) -> str:
    known = [(rank, seen[rank].where or "in no line of the script") for rank in ranks[:_SHOWN]]
    return ", ".join(f"rank {rank} is at {where}" for rank, where in known)


def _is_watched() -> bool:
    """Whether this process is one of several in a group, and no session's watchdog sees to it."""
    if "k8sjob.runtime.watchdog" in sys.modules:
        return False
    c10d: Any = sys.modules.get("torch.distributed.distributed_c10d")
    with suppress(Exception):  # torch may be half imported, or the group be destroyed just now
        return bool(c10d.is_initialized() and c10d.get_world_size() > 1)
    return False


def _needs_others(thread: int) -> bool:
    """Whether a blocked thread, which is in a collective or in backward, waits for other ranks.

    In backward it may wait for a thread of autograd's that compiles a graph or runs a hook: one
    that Python did not start.
    """
    frames = sys._current_frames()  # noqa: SLF001 - documented, in spite of its name
    innermost = frames[thread].f_code.co_filename if thread in frames else ""
    if _TORCH not in innermost:
        return caller(frames.get(thread))[0] == innermost
    known = {one.ident for one in threading.enumerate() if type(one) is not threading._DummyThread}  # noqa: SLF001 - there is no public form
    return frames.keys() <= known and not any(place in innermost for place in _WITHOUT_PEERS)


def _own_timeout() -> float:
    """The longest timeout in seconds that the script gave a group instead of torch's default."""
    c10d: Any = sys.modules.get("torch.distributed.distributed_c10d")
    given = [0.0]
    with suppress(Exception):  # torch's internals: another version may not have them
        for group in list(c10d._world.pg_map):  # noqa: SLF001 - there is no public form
            for device in group._device_types:  # noqa: SLF001 - likewise
                backend = group._get_backend(device)  # noqa: SLF001 - likewise
                timeout = backend.options._timeout  # noqa: SLF001 - likewise
                if timeout > c10d._get_default_timeout(backend.name()):  # noqa: SLF001 - likewise
                    given.append(timeout.total_seconds())
    return max(given)


def _cpu_clock(thread: int) -> int | None:
    with suppress(AttributeError, OSError):  # macOS has none
        return time.pthread_getcpuclockid(thread)
    return None

"""The heartbeat of a rank's process for its node's agent, with a session or without one.

A thread looks four times a second whether a process group was made, and whether the main thread is
blocked in a collective. Torch's own hook counts optimizer steps. The script is not changed, and
torch is not imported for it. The thread renews a file each time, and the agent watches the file's
age: a stopped process, or a C call that holds the interpreter's lock, cannot report itself.

A loop is often seen at the same line, so the frames of a thread do not prove a long wait. The
thread's CPU clock does: it stands still only while the thread is blocked. NCCL polls while it
waits, so its waits are not seen; torch itself ends a process at the timeout of an NCCL collective.
"""

from __future__ import annotations

import json
import math
import os
import sys
import threading
import time
import traceback
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Final

from k8sjob.runtime.base.config import TIMEOUTS
from k8sjob.runtime.base.env import world_size_or
from k8sjob.runtime.base.frames import caller, place_of_thread

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

_TORCH: Final = f"{os.sep}torch{os.sep}"
_WITHOUT_PEERS: Final = (
    f"{_TORCH}distributed{os.sep}checkpoint{os.sep}",  # waits for threads that write
    f"{_TORCH}distributed{os.sep}rpc{os.sep}",  # waits for work, as a server does
    f"{_TORCH}futures{os.sep}",
)
_RPC: Final = "torch.distributed.rpc.api"
_LOADER: Final = f"{_TORCH}utils{os.sep}data{os.sep}dataloader.py"
_MAY_GROUP: Final = {
    "multiprocessing.popen_spawn_posix",
    "multiprocessing.popen_forkserver",
    "jax",
    "horovod",
}
"""Modules that start processes, imported when they first do so, or connect those of the job."""
_SETTLES: Final = 5
"""Settling times that the agent waits: the rank's watchdog knows more and acts first."""


@dataclass(frozen=True, slots=True)
class Seen:
    """The state of a rank, as its observer saw it."""

    runs: bool = False  # whether the observer runs
    torch: bool = False  # whether it has imported torch, or begun to
    importing: bool = False  # whether it is importing torch now
    ranks: int = 0  # size of the largest process group that it was in; 0 before the first
    called: int = 0  # processes that RPC connects, itself included; 0: it has not used RPC
    started: bool = False  # whether processes may train together that have no group to be seen
    # optimizer steps done, also those of a checkpoint that a session resumed; -1 before the first
    # of this process
    step: int = -1
    where: str = ""  # its place in the user's code; empty where hangs are not watched for
    waited: int = 0  # whole seconds that it has been blocked in a collective; 0: it is not
    stuck: bool = False  # whether that is too long
    steps_on: bool = False  # whether it has done a step within hang_timeout
    watched: bool = False  # see Observer
    works: bool = False  # as its agent sees it: it uses the CPU, and does not wait in a collective


class Observer:
    """Looks at the process that it runs in, and writes what it sees to a file.

    Attributes:
        resumed: steps of the checkpoint that this process resumed.
        in_session: whether a session's watchdog watches this process, so that no other has to.
        watched: whether that expects progress, so that a process that stands still hangs.
        shared_import_s: seconds of the imports that were done before this process was forked.
    """

    shared_import_s: ClassVar[float] = 0.0
    resumed: ClassVar[int] = 0
    in_session: ClassVar[bool] = False
    watched: ClassVar[bool] = False
    _running: ClassVar[Observer | None] = None

    def __init__(self, file: Path | None, world_size: int, hang_timeout: float | None) -> None:
        """An observer, for an agent that reads the file; None: there is no agent.

        `world_size` is that of a group which was made and destroyed between two looks, unless the
        script has set another one.
        """
        self._stall = StallClock(hang_timeout)
        self._file, self._world_size = file, world_size
        self._written, self._writing = Seen(), threading.Lock()
        self._largest, self._steps, self._counting, self._forked = 0, 0, False, False

    @classmethod
    def expect(cls, *, progress: bool) -> None:
        """Set `watched`, and tell the agent at once: a C call may hold Python's lock next."""
        cls.watched = progress
        if cls._running is not None:
            cls._running.write()

    def start(self) -> None:
        """Look until the process ends."""
        if self._file is not None:
            Observer._running = self
            os.register_at_fork(after_in_child=self._forget, after_in_parent=self._note_fork)
            threading.Thread(target=self._watch, daemon=True, name="k8sjob-observer").start()

    def write(self) -> None:
        """Look, renew the file's time, and write the state if it has changed."""
        if self._file is None:
            return
        with self._writing:
            state = self.look()
            with suppress(OSError):
                os.utime(self._file)  # also on a full disk: the agent takes an old file for a hang
                if state == self._written:
                    return
            with suppress(OSError):
                draft = self._file.with_suffix(".new")
                draft.write_text(json.dumps(asdict(state)))
                draft.replace(self._file)
                self._written = state

    @classmethod
    def _forget(cls) -> None:
        cls._running = None  # its thread is not in the child, and may have held the lock

    def _note_fork(self) -> None:
        frames = traceback.walk_stack(sys._getframe())  # noqa: SLF001 - documented
        loads = any(frame.f_code.co_filename.endswith(_LOADER) for frame, _ in frames)
        self._forked = self._forked or not loads  # a loader's workers load data only

    def _watch(self) -> None:
        tick = threading.Event()
        while True:
            self.write()
            tick.wait(TIMEOUTS.observe)

    def look(self) -> Seen:
        """The state now."""
        torch = sys.modules.get("torch")
        # importlib's own mark of a module that is not complete yet; it has no public form.
        importing = bool(getattr(getattr(torch, "__spec__", None), "_initializing", False))
        # The hook is global, for optimizers that are made later too.
        if torch and not self._counting:
            self._count_steps()
        waited, stuck = self._stall.look(self._steps)
        # A script may destroy its group before its end: it had formed one all the same.
        self._largest = max(self._largest, self._ranks())
        return Seen(
            runs=True,
            torch=torch is not None,
            importing=importing,
            ranks=self._largest,
            # torch leaves these names in place after rpc.shutdown().
            called=len(getattr(sys.modules.get(_RPC), "_ALL_WORKER_NAMES", ())),
            started=self._forked or not _MAY_GROUP.isdisjoint(sys.modules),
            step=self.resumed + self._steps - 1 if self._steps else -1,
            where=self._stall.where,
            waited=waited,
            stuck=stuck,
            steps_on=self._stall.steps_on,
            watched=self.watched,
        )

    def _ranks(self) -> int:
        # While another thread imports torch these modules are there and not yet complete.
        c10d: Any = sys.modules.get("torch.distributed.distributed_c10d")
        initialized = getattr(c10d, "is_initialized", None)
        if initialized is None:
            return 0
        with suppress(Exception):  # the group may be destroyed at this moment
            if initialized():
                return int(c10d.get_world_size())
        # torch sets this when it makes a group, except with a store of the script's own, and does
        # not reset it when the group is destroyed.
        if getattr(c10d, "_default_pg_init_method", None) is None:
            return 0
        return self._largest or world_size_or(self._world_size)

    def _count_steps(self) -> None:
        optimizer = sys.modules.get("torch.optim.optimizer")
        register = getattr(optimizer, "register_optimizer_step_post_hook", None)
        if register is not None:
            register(self._count)
            self._counting = True

    def _count(self, *_: Any) -> None:
        self._steps += 1


class StallClock:
    """The time for which this process's main thread has been blocked in a collective.

    Attributes:
        where: its place in the user's code, as file:line in function.
    """

    def __init__(self, hang_timeout: float | None) -> None:
        """A clock that knows nothing before the second look(); hang_timeout 0: it never runs."""
        self._limit = TIMEOUTS.patience if hang_timeout is None else hang_timeout
        self._thread = threading.main_thread().ident or 0
        self._clock = _cpu_clock(self._thread) if self._limit else None
        self._ran, self._looked, self._waited = -1, time.monotonic(), 0.0
        self._steps, self._idle = 0, 0.0
        self.where = ""

    @property
    def steps_on(self) -> bool:
        """Whether this rank has done an optimizer step within hang_timeout: the group works."""
        return self._steps > 0 and self._idle < self._limit

    def look(self, steps: int) -> tuple[int, bool]:
        """See where the main thread is after `steps` steps, and whether it has run meanwhile.

        Returns:
            Seconds of the wait, rounded up; 0: it is not blocked. And whether they exceed both
            hang_timeout and the script's longest timeout.
        """
        now = time.monotonic()
        passed, self._looked = min(now - self._looked, TIMEOUTS.observe_max), now
        self._idle = self._idle + passed if steps == self._steps else 0.0
        self._steps = steps
        blocked, self.where = False, ""
        if self._clock is not None and _is_watched():
            before, self._ran = self._ran, time.clock_gettime_ns(self._clock)
            place = place_of_thread(self._thread)
            self.where = place.where
            # Three signs: no CPU time since the last look, a frame of a collective, and nothing of
            # this process's own that it waits for.
            blocked = self._ran == before and place.waits and _needs_others(self._thread)
        self._waited = self._waited + passed if blocked else 0.0
        over = bool(self._limit) and self._waited >= self._limit
        return math.ceil(self._waited), over and self._waited >= _own_timeout()


def settle(timeout: float) -> float:
    """Seconds that a group takes to see an alarm, and again to write about it."""
    return max(0.2, min(2.0, timeout / 5))


class HeartbeatMonitor:
    """The node's processes that make no progress, by the age of their observers' files.

    Ages count from the moment at which a change was seen, on this process's monotonic clock, so
    that a step of the wall clock ends no job. One without a file counts from the first look.
    """

    def __init__(self, files: Sequence[Path | None], timeout: float) -> None:
        """A monitor; `timeout` is in seconds after which the rank itself acts, 0: never."""
        self._files = files
        self._limit = timeout + _SETTLES * settle(timeout) if timeout else float("inf")
        self._seen: dict[int, tuple[int, float]] = {}

    def stale(self, watched: Iterable[int]) -> tuple[int, ...]:
        """The indices of those of the watched processes whose file has not changed for too long."""
        now, before, self._seen = time.monotonic(), self._seen, {}
        for index in watched:
            file, mtime = self._files[index], 0
            with suppress(OSError):
                mtime = file.stat().st_mtime_ns if file else 0
            # Only a change counts, not the time that the file system gives it.
            mark = before.get(index, (-1, now))
            self._seen[index] = mark if mark[0] == mtime else (mtime, now)
        return tuple(i for i, (_, since) in self._seen.items() if now - since > self._limit)


def read_seen(file: Path | None) -> Seen:
    """The state that an observer wrote; the default where it wrote none."""
    try:
        return Seen(**json.loads(file.read_text())) if file else Seen()
    except (OSError, ValueError, TypeError):
        return Seen()


def _is_watched() -> bool:
    """Whether this process is one of several in a group, without a session's watchdog."""
    if Observer.in_session:
        return False
    c10d: Any = sys.modules.get("torch.distributed.distributed_c10d")
    with suppress(Exception):  # torch may be half imported, or the group be destroyed just now
        return bool(c10d.is_initialized() and c10d.get_world_size() > 1)
    return False


def _needs_others(thread: int) -> bool:
    """Whether a blocked thread, which is in a collective or in backward, waits for other ranks.

    In backward it may wait for a thread that autograd started, which compiles a graph or runs a
    hook.
    """
    frames = sys._current_frames()  # noqa: SLF001 - documented, in spite of its name
    innermost = frames[thread].f_code.co_filename if thread in frames else ""
    if _TORCH not in innermost:
        return caller(frames.get(thread))[0] == innermost
    dummy = threading._DummyThread  # noqa: SLF001 - there is no public form
    started = {live.ident for live in threading.enumerate() if type(live) is not dummy}
    return frames.keys() <= started and not any(place in innermost for place in _WITHOUT_PEERS)


def _own_timeout() -> float:
    """The longest timeout in seconds that the script gave a group in place of torch's default."""
    c10d: Any = sys.modules.get("torch.distributed.distributed_c10d")
    timeouts = [0.0]
    with suppress(Exception):  # torch's internals: another version may not have them
        for group in list(c10d._world.pg_map):  # noqa: SLF001 - there is no public form
            for device in group._device_types:  # noqa: SLF001 - likewise
                backend = group._get_backend(device)  # noqa: SLF001 - likewise
                timeout = backend.options._timeout  # noqa: SLF001 - likewise
                # A longer timeout was chosen for a wait that the script knows; torch's own says
                # nothing.
                if timeout > c10d._get_default_timeout(backend.name()):  # noqa: SLF001 - likewise
                    timeouts.append(timeout.total_seconds())
    return max(timeouts)


def _cpu_clock(thread: int) -> int | None:
    with suppress(AttributeError, OSError):  # macOS has none
        return time.pthread_getcpuclockid(thread)
    return None

"""The watchdog of a session: ends a group that makes no progress, and names the culprits.

Each rank beats: `beat(step, "compute")` before a collective, `beat(step, "sync")` in it, any other
phase (checkpoint, evaluate) where time passes otherwise. A rank whose last beat is too old raises
the alarm in the store; every rank then writes its Python stacks to the log, reads all beats, names
the culprits and ends with ExitCode.HUNG. Before and after the training a rank may take its time,
and only a wait for the others is too long; a collective that fails because a rank did not join it
raises the alarm at any time.

Three failures need three observers. A rank asleep in Python is noticed by its own thread. One in a
C call that holds the interpreter's lock, or one that is stopped, is named by its peers and ended by
the agent of its node, which sees its observer stand still. And a store that does not respond must
not keep a rank from noticing: the thread that watches the clock never uses the store.

A collective that the script calls directly makes no beat: the rank's stack shows it.

Long before the alarm, after a tenth of the timeout, the first rank warns of the wait and names the
culprits as far as their beats show them: an evaluation or a compilation may take that long, too.
"""

from __future__ import annotations

import math
import os
import sys
import threading
import time
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from k8sjob.contract import ExitCode
from k8sjob.runtime.base import frames, hangs
from k8sjob.runtime.base.config import TIMEOUTS
from k8sjob.runtime.base.hangs import END, START, SYNC, Beat, culprits, explain
from k8sjob.runtime.base.heartbeat import Observer, settle
from k8sjob.runtime.base.long_waits import WARN_AFTER, LongWaits, warn_of_wait
from k8sjob.runtime.base.termination import by_rank, write_reason

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path
    from typing import NoReturn

    from torch._C._distributed_c10d import Store

    from k8sjob.runtime.base.env import DistEnv
    from k8sjob.runtime.base.event_lines import Reporter

_ALARM: Final = "watchdog/alarm"


class Hung(RuntimeError):  # noqa: N818 - a condition: this rank itself is fine
    """Ranks did not join a collective, and the others have waited long enough.

    Attributes:
        culprits: those ranks; empty if they are not known.
    """

    exit_code: Final = ExitCode.HUNG

    def __init__(self, message: str, culprits: tuple[int, ...]) -> None:
        self.culprits = culprits
        super().__init__(message)


class Watchdog:
    """Watches one rank's progress, and the others' alarm. A beat costs 0.2 microseconds."""

    def __init__(
        self,
        store: Store | None,
        env: DistEnv,
        *,
        timeout: float,
        patience: float = math.inf,
        ranks: range | None = None,
        error_file: Path | None = None,
        publish: Callable[[Any], None] = lambda _store: None,
        reporter: Reporter | None = None,
    ) -> None:
        """Watch for the others' alarm; begin() starts the watch over this rank's progress.

        Args:
            store: a connection only for the watchdog: a TCPStore's client serves one thread at a
                time. None with one process.
            env: this rank.
            timeout: seconds without a beat after which the group is ended; it must cover the
                longest step, checkpoint or evaluation. 0: nothing is watched.
            patience: seconds for which a rank that is not watched waits in one phase SYNC.
            ranks: those that train together; None: all.
            error_file: config.error_file(), for the agent of the node.
            publish: called with the store whenever this rank's beat is published there.
            reporter: writes the first rank's warning before an alarm; None: there is none.
        """
        self._ranks = range(env.world_size) if ranks is None else ranks
        self._store = store if len(self._ranks) > 1 else None
        self._rank, self._timeout, self._error_file = env.rank, timeout, error_file
        self._patience, self._thread = patience, threading.get_ident()
        self._publish_more = publish
        self._reporter = reporter if env.rank == self._ranks[0] else None
        self._long_waits = LongWaits(timeout)
        self._idle = START
        # Replaced as a whole, so that the threads read it without a lock.
        self._last = (START, 0, time.monotonic())
        self._waits = (self._last[2], self._last[2])  # the ends of the last two
        self._watching = False
        self._closed = threading.Event()
        self._alarm = threading.Event()
        self._wake = threading.Event()
        self._informed = threading.Event()
        self._claim = threading.Lock()
        self._message, self._by_main, self._waited = "", False, ""
        self._beats: dict[int, Beat | None] = {}
        self._period = max(0.02, min(1.0, timeout / 20))
        self._settle_seconds = settle(timeout)
        self._threads = [
            threading.Thread(target=target, daemon=True, name="k8sjob-watchdog")
            for target in [self._watch_clock, *([self._watch_store] if self._store else [])]
        ]
        if timeout > 0:
            Observer.in_session = True
            for thread in self._threads:
                thread.start()

    def begin(self) -> None:
        """Watch this rank's progress; the first beat is due within the timeout."""
        if not self._watching:
            self._watching = True
            self.beat(self._last[1])
            Observer.expect(progress=True)

    def pause(self) -> None:
        """Do not watch this rank's progress until the next begin()."""
        if self._watching:
            self._watching, self._idle = False, END
            self.beat(self._last[1])
            Observer.expect(progress=False)

    def beat(self, step: int, phase: str = "compute") -> None:
        """Record that this rank makes progress.

        Args:
            step: the optimizer step, the same number on all ranks for the same step.
            phase: the next activity: SYNC before a collective, else any text.
        """
        now = time.monotonic()
        if self._last[0] == SYNC:
            self._waits = (self._waits[1], now)
        # What a script does before and after its training is its own affair.
        if not self._watching and phase != SYNC:
            phase = self._idle
        self._last = (phase, step, now)

    def close(self) -> None:
        """End the watch by this rank's threads and by the agent; the other ranks' continues."""
        self.pause()
        Observer.in_session = False
        self._closed.set()
        self._wake.set()
        for thread in self._threads:
            if thread.is_alive():
                thread.join(TIMEOUTS.join)  # the store is not used while its host leaves

    def find_hang(self, message: str, error: BaseException, *, late: bool) -> Hung | None:
        """The ranks that did not join a collective that has failed for that; all ranks end.

        Called by the main thread, which raises the result. The message is that of the collective's
        error. It is `late` if it failed by a timeout; else a connection broke: a rank died, or it
        ended because it had waited too long.

        Returns:
            None: a rank died, or there is no watch.
        """
        if self._timeout <= 0 or self._store is None or self._closed.is_set():
            return None
        self._waited = frames.failed_at(error)
        # A connection broke, and no rank has raised an alarm: the peer died.
        if not late and not self._has_alarm():
            return None
        if not self._raise_alarm(message, by_main=True):
            self._threads[0].join()  # the alarm is older, and that thread ends this process
            return None
        guilty, text = self._find_culprits()
        self._await_others()
        return Hung(f"{text}; {message}", guilty)

    def _has_alarm(self) -> bool:
        # A rank that has waited too long breaks its connections before its alarm is seen here. It
        # began to wait when all had last arrived, or later; this rank's last wait may be the
        # one that has failed. So only if the one before it ended as long ago, wait for a moment.
        now = time.monotonic()
        if now - self._waits[0] > 0.9 * self._patience:
            until = now + self._settle_seconds
            while self._threads[-1].is_alive() and time.monotonic() < until:
                if self._alarm.wait(TIMEOUTS.poll):
                    break
        return self._alarm.is_set()

    # --- the thread that watches the clock, and never waits for the store ------------------------

    def _watch_clock(self) -> None:
        while not self._closed.is_set():
            phase, _, since = self._last
            age = time.monotonic() - since
            if self._watching and age > self._timeout:
                self._raise_alarm("")
            # Outside of the training only waits for other ranks are watched.
            elif self._store and not self._watching and phase == SYNC and age > self._patience:
                self._raise_alarm(f"the others have waited {age:.0f} s")
            elif self._store is None:
                self._warn()
            if self._wake.wait(self._period):
                break
        while self._by_main and not self._closed.wait(self._period):
            if (
                time.monotonic() - self._last[2]
                > self._timeout + 5 * self._settle_seconds + TIMEOUTS.exit
            ):
                break  # the main thread was to end this process, and hangs on its way
        if self._alarm.is_set() and not self._closed.is_set():
            self._end_process()

    def _raise_alarm(self, message: str, *, by_main: bool = False) -> bool:
        """Raise the alarm; whether this call was the first, which gives the message."""
        with self._claim:
            if self._alarm.is_set():
                return False
            self._message, self._by_main = message, by_main
            self._alarm.set()
        self._wake.set()
        return True

    def _end_process(self) -> NoReturn:
        # The log, or the disk with the script, may be what the main thread waits for.
        limit = threading.Timer(TIMEOUTS.exit, os._exit, [ExitCode.HUNG])
        limit.name, limit.daemon = "k8sjob-limit", True
        limit.start()
        age = time.monotonic() - self._last[2]
        guilty, text = self._find_culprits()
        if self._message:
            message = f"{text}; {self._message}"
        else:
            message = f"no progress for {age:.0f} s: {text}"
        kind = Hung.__name__ if self._message else "Hang"
        hang = hangs.reason(self._beats, guilty, message, rank=self._rank, kind=kind)
        # Before the stacks: the log may be full or closed, and not take them.
        write_reason(hang, self._error_file)
        # One piece, with the rank on each line.
        sys.stderr.write(by_rank(self._rank, f"k8sjob: {message}\n{frames.stacks()}"))
        sys.stderr.flush()
        self._await_others()
        os._exit(ExitCode.HUNG)

    def _await_others(self) -> None:
        """Let all write before this rank breaks their connections; rank 0, with the store, last."""
        time.sleep(self._settle_seconds * (2 if self._rank == 0 else 1))

    def _find_culprits(self) -> tuple[tuple[int, ...], str]:
        """The culprits, and an explanation."""
        if self._store is None:
            self._beats = {self._rank: self._own_beat()}
            return (self._rank,), explain(self._beats, (self._rank,))
        # The other thread reads the beats, since the store may never answer.
        if not self._informed.wait(2 * self._settle_seconds):
            return (0,), "the store does not respond; rank 0, its host, is stopped or unreachable"
        guilty = culprits(self._beats)
        return guilty, explain(self._beats, guilty)

    # --- the thread that uses the store ----------------------------------------------------------

    def _watch_store(self) -> None:
        store = self._store
        if store is None:
            return
        try:
            self._publish(store)
            while not self._wake.wait(self._period):
                self._publish(store)
                if store.check([_ALARM]):
                    self._raise_alarm(store.get(_ALARM).decode())
                else:
                    self._warn()
            if self._alarm.is_set():
                self._answer_alarm(store)
        except RuntimeError:
            return  # the store is gone, and rank 0 with it: the main thread notices by itself

    def _answer_alarm(self, store: Store) -> None:
        store.set(_ALARM, self._message)
        self._publish(store)
        time.sleep(self._settle_seconds)
        self._beats = self._read_beats(store)
        self._informed.set()

    def _read_beats(self, store: Store) -> dict[int, Beat | None]:
        keys = {rank: f"watchdog/{rank}" for rank in self._ranks}
        return {
            rank: Beat.decode(store.get(key)) if store.check([key]) else None
            for rank, key in keys.items()
        }

    def _publish(self, store: Store) -> None:
        store.set(f"watchdog/{self._rank}", self._own_beat().encode())
        self._publish_more(store)

    def _own_beat(self) -> Beat:
        """This rank's last beat; with its place if that is late, or after an alarm."""
        phase, step, since = self._last
        alarm = self._alarm.is_set()
        late = self._watching and time.monotonic() - since > WARN_AFTER / 2 * self._timeout
        if not (alarm or late):
            return Beat(step, phase, answered=False)
        failed = frames.CodePlace(self._waited, waits=True)
        place = failed if self._waited else frames.place_of_thread(self._thread)
        return Beat(step, SYNC if place.waits else phase, answered=alarm, where=place.where)

    # --- the thread that uses the store; without one, that of the clock --------------------------

    def _warn(self) -> None:
        """Warn of a wait long before the alarm, and report when it is over."""
        if self._reporter is None:
            return
        wait = self._long_waits.look(self._last[2] if self._watching else time.monotonic())
        if wait is not None:
            beats = self._read_beats(self._store) if self._store and not wait["over"] else {}
            warn_of_wait(self._reporter.emit, wait, partial(self._described, wait, beats))

    def _described(
        self, wait: Mapping[str, Any], beats: Mapping[int, Beat | None]
    ) -> dict[str, Any]:
        """The warning of a wait, from beats that are no answers to an alarm."""
        mine = replace(self._own_beat(), answered=True)
        current = {rank: b and replace(b, answered=True) for rank, b in beats.items()}
        guilty = culprits(current) if current else (self._rank,)
        text = explain({self._rank: mine, **current}, guilty)
        if not guilty:
            where = f"; rank {self._rank} is at {mine.where}" if mine.where else ""
            text = f"all ranks seem to wait in a collective{where}"
        warning = {"message": f"no progress for {wait['seconds']} s: {text}"}
        return warning | ({"rank": guilty[0]} if len(guilty) == 1 else {})

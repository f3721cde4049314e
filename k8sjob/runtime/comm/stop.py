"""Coordinated stop of all ranks, and the thread that learns of a stop or a lost peer.

A stop must come at the same point on all ranks, or some would wait for the others forever. A
flag reduced every step would make GPUs wait; instead the ranks agree once, through the store:
each publishes how many points of the program it has passed and holds at the next; all stop before
the point after the largest number. A rank that is behind continues to that point, so no collective
is left half done. Before a stop is requested, a point costs less than a microsecond.
"""

from __future__ import annotations

import os
import threading
import time
from typing import TYPE_CHECKING, Final

from k8sjob.contract import ExitCode, Reason
from k8sjob.runtime.base import config
from k8sjob.runtime.base.config import TIMEOUTS
from k8sjob.runtime.base.errors import PeerLost, ranks_in_words
from k8sjob.runtime.base.termination import write_reason
from k8sjob.runtime.comm.rendezvous import NOTE

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch._C._distributed_c10d import Store

    from k8sjob.runtime.comm.rendezvous import Rendezvous

_STOP: Final = "stop"


class StopCoordinator:
    """One rank's part in a common stop; with a single rank there is no thread.

    Attributes:
        reason: why all stop, usually "SIGTERM"; empty before a stop is requested.
        closed: set when the watch has ended.
    """

    def __init__(self, rank: int, world_size: int) -> None:
        self._rank, self._world = rank, world_size
        self._store: Store | None = None
        self.reason = ""
        self._requested = ""
        self._passed = 0
        self._held = False
        self._last: int | None = None
        self._lock = threading.Lock()
        self._agreed = threading.Event()
        self.closed = threading.Event()
        self._lost: PeerLost | None = None
        self._thread: threading.Thread | None = None

    def start(self, joined: Rendezvous) -> None:
        """Start watching the ranks of a rendezvous; a single rank needs no watch."""
        self._store = joined.store
        # Another client: a store's client serves one thread at a time.
        self._thread = threading.Thread(
            target=self._watch, args=(joined.again(),), name="k8sjob-stop", daemon=True
        )
        self._thread.start()

    def request(self, reason: str) -> None:
        """Request that all ranks stop at a common point; a signal handler may call this."""
        # Nothing but a name is set: a handler must not use the store's client, nor take a lock.
        self._requested = self._requested or reason

    def passes(self) -> bool:
        """Pass the next point of the program; False: all ranks stop here, before it.

        Every rank must call this equally often.

        Raises:
            PeerLost: the ranks could not agree.
        """
        # _hold takes it too: a point is passed before the number is published, or waits.
        with self._lock:
            if self._world == 1:
                self.reason = self._requested
                return not self.reason
            if not self._held:
                self._passed += 1
                return True
        if not self._agreed.wait(TIMEOUTS.stop):
            raise PeerLost(
                f"the ranks were asked to stop, and some did not respond within {TIMEOUTS.stop:g} s"
            )
        if self._last is None or self._passed >= self._last:
            return False
        self._passed += 1
        return True

    def finish(self, timeout: float, all_here: Callable[[], object] = lambda: None) -> None:
        """Wait until all ranks have come to their end, then end the watch; rank 0 leaves last.

        `all_here` is called when they have come, before any of them leaves.

        Raises:
            PeerLost: one went away, or did not come to its end in time.
        """
        if self._store is None:
            all_here()
            return
        # Ranks that stop from now on need not wait for this rank's number.
        self._store.set(f"at/{self._rank}", str(self._passed))
        self._store.set(f"end/{self._rank}", "")
        if not self._wait([f"end/{rank}" for rank in range(self._world)], timeout):
            late = tuple(rank for rank in range(self._world) if not self._there(f"end/{rank}"))
            message = f"{ranks_in_words(late)} did not reach the end of the session within"
            raise PeerLost(f"{message} {timeout:g} s", late, late=True)
        all_here()
        self.close()
        self._store.set(f"left/{self._rank}", "")
        if self._rank == 0:
            self._wait([f"left/{rank}" for rank in range(self._world)], seconds=TIMEOUTS.connect)

    def alert(self) -> None:
        """Raise a peer's loss that the watch has found."""
        if self._lost is not None:
            raise self._lost

    def warn_others(self, message: str) -> None:
        """Report to the others that this rank fails, so that none waits for it."""
        if self._store is not None:
            try:
                self._store.set(NOTE, message)
            except RuntimeError:
                return  # the store is gone, and with it rank 0: the others see that

    def close(self) -> None:
        """End the watch."""
        self.closed.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(TIMEOUTS.connect)

    def _wait(self, keys: list[str], seconds: float) -> bool:
        until = time.monotonic() + seconds
        while not (done := self._there(*keys)) and time.monotonic() < until:
            self.alert()
            time.sleep(TIMEOUTS.poll / 2)
        return done

    def _there(self, *keys: str) -> bool:
        return bool(self._store is not None and self._store.check(list(keys)))

    # --- the thread -----------------------------------------------------------------------------

    def _watch(self, store: Store) -> None:
        try:
            self._look_until_closed(store)
        except RuntimeError as error:
            if not self.closed.is_set():
                message = str(error).splitlines()[0]
                self._lose(PeerLost(f"rank 0 is gone, and the store with it: {message}", (0,)))

    def _look_until_closed(self, store: Store) -> None:
        published = False
        next_look = 0.0
        while not self.closed.wait(TIMEOUTS.poll):
            if self._requested and not published:
                published, next_look = True, 0.0
                store.set(_STOP, self._requested)
            if time.monotonic() < next_look:
                continue
            # A request needs no hurry, and each look is a request to the store from every rank.
            next_look = time.monotonic() + TIMEOUTS.look
            if store.check([NOTE]):
                self._lose(PeerLost(store.get(NOTE).decode()))
                return
            if not self._held and store.check([_STOP]):
                self._hold(store)
            if self._held and self._last is None:
                next_look = 0.0
                # All ranks stand still until they agree, so the next look comes at once.
                self._agree(store)

    def _lose(self, lost: PeerLost) -> None:
        """A peer is gone for good: end the process, unless the main thread notices it by itself."""
        self._lost = lost  # the main thread raises it where it waits in this class
        # The main thread's own error has a traceback, and ends the session by itself.
        if self.closed.wait(TIMEOUTS.loss_grace):
            return
        reason = Reason(
            exit_code=ExitCode.PEER_LOST,
            rank=self._rank,
            type=type(lost).__name__,
            message=str(lost),
            time=time.time(),
            culprits=lost.culprits,
        )
        write_reason(reason, config.error_file())
        os._exit(ExitCode.PEER_LOST)

    def _hold(self, store: Store) -> None:
        """Let this rank pass no further point without an agreement."""
        self.reason = store.get(_STOP).decode()
        # From here on _passed changes by the agreement alone, so the number that follows is final.
        with self._lock:
            self._held = True
        store.set(f"at/{self._rank}", str(self._passed))

    def _agree(self, store: Store) -> None:
        keys = [f"at/{rank}" for rank in range(self._world)]
        if store.check(keys):
            # The rank that is furthest ahead cannot go back, so the others come up to it.
            self._last = max(int(store.get(key)) for key in keys)
            self._agreed.set()

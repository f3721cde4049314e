"""The inbox of a main thread: signals, the parent's lifeline, and calls from other threads."""

from __future__ import annotations

import os
import select
import signal
import threading
import time
from concurrent.futures import Future
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Self, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType

_T = TypeVar("_T")


def in_thread(call: Callable[[], _T], name: str) -> Future[_T]:
    """The result of a call in a daemon thread, so that signals are handled meanwhile.

    Not a pool's thread: one that waits for a frozen host must not keep the process alive.
    """
    result: Future[_T] = Future()

    def run() -> None:
        try:
            result.set_result(call())
        except BaseException as error:  # noqa: BLE001 - raised where the result is used
            result.set_exception(error)

    threading.Thread(target=run, daemon=True, name=name).start()
    return result


class Inbox:
    """A wait for a child's end, for a stop by signal, and for the parent's end.

    Must be entered by the main thread; restores the old handlers when left. As PID 1 a process
    without handlers would not be stopped by SIGTERM at all.

    Attributes:
        stop: the signal that first requested a stop, SIGTERM or SIGINT; None before.
        stop_time: time.monotonic() of it; infinite before.
        orphan_time: time.monotonic() at which the parent was seen to be gone; infinite before.
    """

    def __init__(self, lifeline: int | None = None) -> None:
        """An inbox; `lifeline` is the read end of a pipe that the parent holds open."""
        self.stop: signal.Signals | None = None
        self.stop_time = float("inf")
        self.orphan_time = float("inf")
        self._lifeline = lifeline
        self._handlers: dict[signal.Signals, Any] = {}
        self._pipe = (-1, -1)
        self._wakeup = -1

    def __enter__(self) -> Self:
        self._pipe = os.pipe()
        for end in self._pipe:
            os.set_blocking(end, False)
        # A handler alone would not end select(): Python calls it again after a signal (PEP 475).
        self._wakeup = signal.set_wakeup_fd(self._pipe[1], warn_on_full_buffer=False)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD):
            self._handlers[number] = signal.signal(number, self._on_signal)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._wakeup)
        for end in self._pipe:
            os.close(end)

    def stopping(self) -> bool:
        """Whether the processes are to end: by a signal, or since the parent is gone."""
        return min(self.stop_time, self.orphan_time) < float("inf")

    def wait(self, seconds: float, *others: int) -> None:
        """Return at the next signal, at the lifeline's end, or after this many seconds.

        Also when another descriptor can be read.
        """
        ends = [self._pipe[0], *others]
        if self._lifeline is not None:
            ends.append(self._lifeline)
        limit = None if seconds == float("inf") else max(0.0, seconds)
        ready, _, _ = select.select(ends, [], [], limit)
        with suppress(BlockingIOError):
            # Each signal has put a byte there.
            while os.read(self._pipe[0], 4096):
                pass
        if self._lifeline in ready:
            self._read_lifeline(self._lifeline)

    def sleep(self, seconds: float) -> None:
        """Sleep for this long, or until a stop is requested."""
        end = time.monotonic() + seconds
        while not self.stopping() and time.monotonic() < end:
            self.wait(end - time.monotonic())

    def _read_lifeline(self, end: int) -> None:
        """Bytes mean nothing; at the end of the file nothing holds the other end any more."""
        try:
            data = os.read(end, 4096)
        except OSError:
            # A descriptor that cannot be read shows no living parent: it counts as its end.
            data = b""
        if not data:
            self.orphan_time = time.monotonic()
            self._lifeline = None

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        # The first signal counts: a second SIGTERM does not prolong the grace.
        if number != signal.SIGCHLD and self.stop is None:
            self.stop, self.stop_time = signal.Signals(number), time.monotonic()

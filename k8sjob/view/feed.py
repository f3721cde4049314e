"""Events from a blocking source in batches, while Ctrl-C stays in our hands.

A source (a watch, a log) blocks for as long as nothing happens, and an exception thrown into it
would end it. So it runs in a thread of its own; the main thread draws, ten times a second, and
counts the interrupts instead of being interrupted.
"""

from __future__ import annotations

import queue
import signal
import threading
import time
from typing import TYPE_CHECKING, Final, Generic, Self, TypeVar

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from types import FrameType, TracebackType

__all__ = ["Feed", "Interrupts"]

T = TypeVar("T")

TICK: Final = 0.1
"""Seconds between two batches."""
_BATCH: Final = 1000
_BACKLOG: Final = 10_000
"""Events that wait for a slow terminal before the source has to wait as well."""


class Interrupts:
    """Counts SIGINT, SIGTERM and SIGHUP instead of ending by them, inside a `with`.

    SIGHUP, which a terminal sends when it is closed, is left alone where it is ignored (nohup).

    Attributes:
        count: how often an end was asked for.
        exit_code: what a process ends with after it, 128 + the first signal; 0 before.
    """

    def __init__(self) -> None:
        self.count = 0
        self.exit_code = 0
        self._before: dict[signal.Signals, signal._HANDLER] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():  # others may not set handlers
            ends = [signal.SIGINT, signal.SIGTERM]
            if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
                ends.append(signal.SIGHUP)
            for number in ends:
                self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, _frame: FrameType | None) -> None:
        self.count += 1
        self.exit_code = self.exit_code or 128 + number


class _End:
    """The last thing in a feed's queue: how its source ended."""

    def __init__(self, error: BaseException | None = None) -> None:
        self.error = error


class Feed(Generic[T]):
    """The items of a blocking source, in batches, at least one batch each TICK.

    The thread is a daemon: whoever stops iterating leaves it behind, and it ends with the process.
    """

    def __init__(self, source: Iterable[T]) -> None:
        self._queue: queue.Queue[T | _End] = queue.Queue(_BACKLOG)
        thread = threading.Thread(target=self._read, args=(source,), name="feed", daemon=True)
        thread.start()

    def __iter__(self) -> Iterator[list[T]]:
        """Batches until the source ends, empty where nothing came; the source's error is raised."""
        while True:
            started = time.monotonic()
            batch, end = self._take()
            yield batch
            if end is not None:
                if end.error is not None:
                    raise end.error
                return
            rest = TICK - (time.monotonic() - started)
            if 0 < len(batch) < _BATCH and rest > 0:  # let more come together for one drawing
                time.sleep(rest)

    def _take(self) -> tuple[list[T], _End | None]:
        batch: list[T] = []
        wait = TICK
        while len(batch) < _BATCH:
            try:
                item = self._queue.get(timeout=wait) if wait else self._queue.get_nowait()
            except queue.Empty:
                break
            if isinstance(item, _End):
                return batch, item
            batch.append(item)
            wait = 0.0
        return batch, None

    def _read(self, source: Iterable[T]) -> None:
        try:
            for item in source:
                self._queue.put(item)
        except BaseException as error:  # noqa: BLE001 - raised again where the feed is read
            self._queue.put(_End(error))
        else:
            self._queue.put(_End())

"""Several blocking iterators read at once: each in a thread of its own, all into one queue."""

from __future__ import annotations

import queue
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import TracebackType

__all__ = ["Ended", "Funnel"]

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Ended:
    """A source has nothing more to give.

    Attributes:
        source: the name it was added by.
        error: the exception that ended it; None where it simply ended.
    """

    source: str
    error: Exception | None = None


class Funnel(Generic[T]):
    """What all sources give, in the order of arrival; leaving the context ends the sources.

    A source is a function that takes an Event and returns an iterator, and that ends the iteration
    soon after the Event was set.
    """

    def __init__(self, size: int = 10_000) -> None:
        self._stop = threading.Event()
        # Bounded, so that a reader slower than the replicas holds them back instead of the memory.
        self._queue: queue.Queue[T | Ended] = queue.Queue(size)
        self.open: set[str] = set()

    def __enter__(self) -> Funnel[T]:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        self._stop.set()

    def add(self, name: str, source: Callable[[threading.Event], Iterator[T]]) -> None:
        """Start to read a source; `name` is in `open` until its Ended was taken."""
        self.open.add(name)
        # A daemon: a source that is slow to notice the stop must not hold up the interpreter.
        threading.Thread(
            target=self._read, args=(name, source), name=f"funnel-{name}", daemon=True
        ).start()

    def get(self, timeout: float | None = None) -> T | Ended | None:
        """The next item, or None when none came within `timeout` seconds."""
        try:
            item = self._queue.get(timeout=timeout)
        except queue.Empty:
            return None
        if isinstance(item, Ended):
            self.open.discard(item.source)
        return item

    def _read(self, name: str, source: Callable[[threading.Event], Iterator[T]]) -> None:
        error = None
        try:
            for item in source(self._stop):
                self._put(item)
                if self._stop.is_set():
                    return
        except Exception as failure:  # noqa: BLE001 - it belongs to the reader of the funnel
            error = failure
        self._put(Ended(name, error))

    def _put(self, item: T | Ended) -> None:
        while not self._stop.is_set():
            try:
                self._queue.put(item, timeout=0.5)
            except queue.Full:
                continue
            return

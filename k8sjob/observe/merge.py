"""Several blocking iterators read at once: each in a thread of its own, all into one queue."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Generic, Self, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

T = TypeVar("T")
_POLL_SECONDS = 0.5
_MOST_ITEMS = 10_000
"""A reader slower than the replicas holds them back, instead of filling the memory."""
_FULL_SECONDS = 0.05
"""A pause of a source while the reader is slow; to read what waits takes it longer."""


@dataclass(frozen=True, slots=True)
class Ended:
    """The end of a source, by its name, and the exception that ended it, if one did."""

    source: str
    error: Exception | None = None


class Merge(Generic[T]):
    """The items of all sources, in the order of arrival; leaving the context ends the sources.

    A source is a function that takes an Event and returns an iterator, and that ends the iteration
    soon after the Event was set.
    """

    def __init__(self) -> None:
        self._stop = threading.Event()
        # One with a limit takes longer for an item than a line does.
        self._items: SimpleQueue[tuple[T | Ended, threading.Semaphore | None]] = SimpleQueue()
        self.open: set[str] = set()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()

    def add(
        self,
        name: str,
        source: Callable[[threading.Event], Iterator[T]],
        *,
        ahead: int | None = None,
    ) -> None:
        """Start to read a source; `name` is in `open` until its Ended was taken.

        So many items of it as `ahead` says may wait to be taken; then it is held back, which is for
        sources whose next item says all that the ones before it do.
        """
        self.open.add(name)
        room = threading.Semaphore(ahead) if ahead else None
        # A daemon: a source that is slow to notice the stop must not hold up the interpreter.
        threading.Thread(
            target=self._read, args=(name, source, room), name=f"merge-{name}", daemon=True
        ).start()

    def get(self, timeout: float | None = None) -> T | Ended | None:
        """The next item, or None when none came within `timeout` seconds."""
        try:
            item, room = self._items.get(timeout=timeout)
        except Empty:
            return None
        if room:
            room.release()  # its thread may put the next item
        if isinstance(item, Ended):
            self.open.discard(item.source)
        return item

    def _read(
        self,
        name: str,
        source: Callable[[threading.Event], Iterator[T]],
        room: threading.Semaphore | None,
    ) -> None:
        error = None
        try:
            for item in source(self._stop):
                self._put(item, room)
                if self._stop.is_set():
                    return
        except Exception as failure:  # noqa: BLE001 - it is for the reader
            error = failure
        self._put(Ended(name, error), None)

    def _put(self, item: T | Ended, room: threading.Semaphore | None) -> None:
        # Both waits end now and then, to notice that the reader has left.
        while room and not room.acquire(timeout=_POLL_SECONDS):
            if self._stop.is_set():
                return
        while self._items.qsize() >= _MOST_ITEMS and not self._stop.wait(_FULL_SECONDS):
            pass
        self._items.put((item, room))

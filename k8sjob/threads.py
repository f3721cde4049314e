"""Requests at the same time, in threads that are daemons.

Those of concurrent.futures' executors would keep the interpreter from exiting, as after Ctrl-C,
while a registry or an apiserver does not respond.
"""

from __future__ import annotations

import threading
from collections import deque
from contextlib import suppress
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


_T = TypeVar("_T")


class Call(Generic[_T]):
    """A call that another thread makes; a Future of concurrent.futures takes long to import."""

    def __init__(self, function: Callable[[], _T]) -> None:
        self._function, self._ended = function, threading.Event()
        self._error: BaseException | None = None

    def run(self) -> None:
        """Make the call."""
        try:
            self._result = self._function()
        except BaseException as error:  # noqa: BLE001 - raised where the result is waited for
            self._error = error
        self._ended.set()

    def result(self, seconds: float | None = None) -> _T:
        """What the call returns, once it has; raises what the call raises.

        Raises:
            TimeoutError: it takes longer; its thread is left running.
        """
        if not self._ended.wait(seconds):
            raise TimeoutError
        if self._error is not None:
            raise self._error
        return self._result


def start(function: Callable[[], _T]) -> Call[_T]:
    """Run a function in another thread."""
    call = Call(function)
    threading.Thread(target=call.run, daemon=True).start()
    return call


class Ahead:
    """Calls in other threads that are begun before their results are needed."""

    def __init__(self) -> None:
        self._begun: dict[object, Call[Any]] = {}

    def begin(self, key: object, function: Callable[[], object]) -> None:
        """Begin a call, unless one of this key has been begun."""
        if key not in self._begun:
            self._begun[key] = start(function)

    def result(self, key: object, function: Callable[[], _T]) -> _T:
        """The result of the call that was begun, the first time that it is needed; else of one now.

        Raises:
            What the call raises.
        """
        begun: Call[_T] | None = self._begun.pop(key, None)
        return begun.result() if begun else function()


def run_parallel(functions: Sequence[Callable[[], Any]], width: int) -> list[Any]:
    """Call functions in at most `width` threads, the first ones first; their results, in order.

    Raises:
        The first failure; functions that have not started by then never do.
    """
    calls = [Call(function) for function in functions]
    waiting, ended = deque(calls), SimpleQueue[Call[Any]]()

    def work() -> None:
        with suppress(IndexError):
            while True:
                call = waiting.popleft()
                call.run()
                ended.put(call)

    for _ in range(min(width, len(calls))):
        threading.Thread(target=work, daemon=True).start()
    try:
        for _ in calls:
            ended.get().result()  # raises the failure
    finally:
        waiting.clear()
    return [call.result() for call in calls]

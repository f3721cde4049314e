"""Requests at the same time, in threads that are daemons.

Those of concurrent.futures' executors would keep the interpreter from exiting, as after Ctrl-C,
while a registry or an apiserver does not respond.
"""

from __future__ import annotations

import threading
from collections import deque
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


_T = TypeVar("_T")


def start(function: Callable[[], _T]) -> Future[_T]:
    """Run a function in another thread."""
    future: Future[_T] = Future()
    threading.Thread(target=_run, args=(future, function), daemon=True).start()
    return future


def _run(future: Future[Any], function: Callable[[], Any]) -> None:
    if future.set_running_or_notify_cancel():
        try:
            future.set_result(function())
        except BaseException as error:  # noqa: BLE001 - raised where the result is waited for
            future.set_exception(error)


class Ahead:
    """Calls in other threads that are begun before their results are needed."""

    def __init__(self) -> None:
        self._begun: dict[object, Future[Any]] = {}

    def begin(self, key: object, function: Callable[[], object]) -> None:
        """Begin a call, unless one of this key has been begun."""
        if key not in self._begun:
            self._begun[key] = start(function)

    def result(self, key: object, function: Callable[[], _T]) -> _T:
        """The result of the call that was begun, the first time that it is needed; else of one now.

        Raises:
            What the call raises.
        """
        begun: Future[_T] | None = self._begun.pop(key, None)
        return begun.result() if begun else function()


def run_parallel(functions: Sequence[Callable[[], Any]], width: int) -> list[Any]:
    """Call functions in at most `width` threads, the first ones first; their results, in order.

    Raises:
        The first failure; functions that have not started by then never do.
    """
    tasks = [(Future[Any](), function) for function in functions]
    waiting = deque(tasks)

    def work() -> None:
        with suppress(IndexError):
            while True:
                _run(*waiting.popleft())

    for _ in range(min(width, len(tasks))):
        threading.Thread(target=work, daemon=True).start()
    done, pending = wait([future for future, _ in tasks], return_when=FIRST_EXCEPTION)
    for future in pending:
        future.cancel()
    for future in done:
        future.result()  # raises the failure
    return [future.result() for future, _ in tasks]

"""Several things at once, whose first failure ends all, and which Ctrl-C does not wait for.

concurrent.futures would wait at the end of the interpreter for a registry that does not answer.
"""

from __future__ import annotations

import queue
import threading
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = ["at_once", "begin"]


def begin(function: Callable[[], Any]) -> Callable[[], Any]:
    """Start a function in another thread.

    Returns:
        A function that waits for its result, or raises what it raised.
    """
    done: queue.SimpleQueue[tuple[Any, BaseException | None]] = queue.SimpleQueue()

    def work() -> None:
        try:
            done.put((function(), None))
        except BaseException as error:  # noqa: BLE001 - it is raised where the result is waited for
            done.put((None, error))

    def result() -> Any:
        value, error = done.get()
        if error is not None:
            raise error
        return value

    threading.Thread(target=work, daemon=True).start()
    return result


def at_once(functions: Sequence[Callable[[], Any]], width: int) -> list[Any]:
    """Call functions in several threads.

    Args:
        functions: the first ones are begun first.
        width: how many may run at the same time.

    Returns:
        Their results, in order.

    Raises:
        The first failure; those that have not been begun are not begun any more.
    """
    waiting: queue.SimpleQueue[int] = queue.SimpleQueue()
    done: queue.SimpleQueue[tuple[int, Any, BaseException | None]] = queue.SimpleQueue()
    for number in range(len(functions)):
        waiting.put(number)
    failed = threading.Event()

    def work() -> None:
        while not failed.is_set():
            try:
                number = waiting.get_nowait()
            except queue.Empty:
                return
            try:
                done.put((number, functions[number](), None))
            except BaseException as error:  # noqa: BLE001 - it is raised below
                done.put((number, None, error))

    for _ in range(min(width, len(functions))):
        threading.Thread(target=work, daemon=True).start()
    results: dict[int, Any] = {}
    while len(results) < len(functions):
        number, result, error = done.get()
        if error is not None:
            failed.set()
            raise error
        results[number] = result
    return [results[number] for number in range(len(functions))]

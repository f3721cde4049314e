"""One piece of work beside the training, in a thread; the next one waits for it."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Background"]

_LOOK_S: Final = 0.1


class Background:
    """Runs a function in a thread and hands what came of it to another one on the main thread."""

    def __init__(self) -> None:
        self._done = threading.Event()
        self._thread: threading.Thread | None = None
        self._then: Callable[[Any], None] | None = None
        self._outcome: Any = None

    @property
    def busy(self) -> bool:
        """Whether there is work whose outcome nobody has taken."""
        return self._then is not None

    def begin(self, work: Callable[[], Any], then: Callable[[Any], None]) -> None:
        """Begin a piece of work, when there is none.

        Args:
            work: runs in a thread that does not keep the process alive.
            then: is given what it returned, or the exception that it ended with, by take().
        """
        if self.busy:
            raise RuntimeError("the piece of work before this one is not done")
        self._done.clear()
        self._then = then

        def run() -> None:
            try:
                self._outcome = work()
            except Exception as error:  # noqa: BLE001 - it is told on the main thread
                self._outcome = error
            self._done.set()

        self._thread = threading.Thread(target=run, daemon=True, name="k8sjob-save")
        self._thread.start()

    def take(self) -> None:
        """Hand over the outcome, if there is one; costs nothing where there is none."""
        if self._then is not None and self._thread is not None and self._done.is_set():
            # To its very end: what it still frees of torch's would abort a process that exits.
            self._thread.join()
            then, outcome = self._then, self._outcome
            self._then = self._outcome = None
            then(outcome)

    def finish(
        self,
        progress: Callable[[], int],
        beat: Callable[[], None],
        patience: float | None = None,
    ) -> bool:
        """Wait until the work is done, and hand over its outcome.

        Args:
            progress: a number that changes while the work goes on.
            beat: called when it has changed.
            patience: seconds without a change after which the work is left alone; None: never.

        Returns:
            Whether it is done.
        """
        seen, since = -1, time.monotonic()
        while self._then is not None and not self._done.wait(_LOOK_S):
            if (now := progress()) != seen:
                seen, since = now, time.monotonic()
                beat()
            elif patience is not None and time.monotonic() > since + patience:
                return False
        self.take()
        return True

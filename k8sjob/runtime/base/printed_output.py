"""The output of a script that does not report: its metrics become events, as those of a session.

Rank 0 alone reads what it prints, as it prints it. The lines of the other ranks share the
container's log, and those of a progress bar would come there only when it ends.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from contextlib import suppress
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from k8sjob.contract import EVENT_MARK
from k8sjob.printed_metrics import MAX_LINE, PrintedMetrics
from k8sjob.runtime.base.event_lines import Reporter

if TYPE_CHECKING:
    from collections.abc import Sequence

    from k8sjob.printed_metrics import Report

_MAX_PART, _MIN_SECONDS = 0.01, 0.5
"""Reading may take this part of the script's time, and some seconds in any case."""


class PrintedOutput:
    """Reads stdout and stderr of this process, and writes events about it to stdout.

    It ends when the script reports by itself, through a session, and never raises.

    Args:
        templates: see PrintedMetrics.
    """

    def __init__(self, templates: Sequence[str] | None) -> None:
        self._metrics = PrintedMetrics(templates)
        self._began, self._spent = time.monotonic(), 0.0
        # A fork, as a loader's worker, and other threads write to the same streams. Without a lock
        # nothing waits for this reader, not even a fork that was made while it reads.
        self._reader: tuple[int, int] | None = _thread()
        # A script may put another stream in the place of stdout, for a file of its own.
        out: Any = SimpleNamespace(write=sys.stdout.write, flush=sys.stdout.flush)
        self._reporter = Reporter(active=True, events=True, out=out, printed=True)

    def start(self) -> None:
        """Read from now on what this thread writes."""
        for stream in (sys.stdout, sys.stderr):
            self._hook(stream)

    def stop(self) -> None:
        """Write what was held back, and read no more."""
        is_reader, self._reader = self._reader == _thread(), None
        if is_reader:
            with suppress(Exception):  # a stream that is closed
                self._emit(self._metrics.held_back(time.monotonic()))

    def _hook(self, stream: Any) -> None:
        write, begin = stream.write, ""

        def write_and_read(text: str) -> int:
            nonlocal begin
            count: int = write(text)
            if self._reader == _thread():
                try:
                    begin = self._read(begin + text)
                except Exception:  # noqa: BLE001 - the script's own print must not fail
                    self.stop()
            return count

        # Not another stream: loggers hold this one already, and it has attributes of its own. It
        # stays for good, since a script may have put a method of its own before this one.
        stream.write = write_and_read

    def _read(self, text: str) -> str:
        """Read the lines of a text; the result is the beginning of the one that has not ended."""
        began = now = time.monotonic()
        limit = _MIN_SECONDS + _MAX_PART * (began - self._began) - self._spent
        if limit < 0 and EVENT_MARK not in text:
            return ""
        *lines, begin = text.replace("\r", "\n").split("\n")
        for line in filter(None, lines):
            if line.startswith(EVENT_MARK):
                self.stop()
                break
            if now - began < limit:
                self._emit(self._metrics.read(line, now))
                now = time.monotonic()
        self._spent += time.monotonic() - began
        return begin[:MAX_LINE]

    def _emit(self, reports: Sequence[Report]) -> None:
        for kind, data in reports:
            self._reporter.emit(kind, **data)


def _thread() -> tuple[int, int]:
    return os.getpid(), threading.get_ident()

"""The output of a script that does not report: its metrics become events, as those of a session.

Rank 0 alone reads what it prints, as it prints it. The lines of the other ranks share the
container's log, and those of a progress bar would come there only when it ends.
"""

from __future__ import annotations

import os
import re
import sys
import time
from contextlib import suppress
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Final

from k8sjob.contract import EVENT_MARK
from k8sjob.printed_metrics import MAX_LINE, PrintedMetrics
from k8sjob.runtime.base.event_lines import Reporter

if TYPE_CHECKING:
    from collections.abc import Sequence

    from k8sjob.printed_metrics import Report

_LINE_END: Final = re.compile("[\r\n]")
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
        self._began, self._spent, self._process = time.monotonic(), 0.0, os.getpid()
        self._hooked: list[Any] = []
        # A script may put another stream in the place of stdout, for a file of its own.
        out: Any = SimpleNamespace(write=sys.stdout.write, flush=sys.stdout.flush)
        self._reporter = Reporter(active=True, events=True, out=out, printed=True)

    def start(self) -> None:
        """Read from now on."""
        for stream in (sys.stdout, sys.stderr):
            self._hook(stream)
            self._hooked.append(stream)

    def stop(self) -> None:
        """Write what was held back, and read no more."""
        if not self._hooked:
            return
        while self._hooked:
            # The stream's own method is seen again.
            self._hooked.pop().__dict__.pop("write", None)
        with suppress(Exception):  # a stream that is closed
            if os.getpid() == self._process:
                self._emit(self._metrics.rest(time.monotonic()))

    def _hook(self, stream: Any) -> None:
        write, line = stream.write, ""

        def read_and_write(text: str) -> int:
            nonlocal line
            count: int = write(text)
            try:
                *lines, line = _LINE_END.split(line + text)
                line = line[:MAX_LINE]
                for complete in filter(None, lines):
                    self._read(complete)
            except Exception:  # noqa: BLE001 - the script's own print must not fail
                self.stop()
            return count

        # Not another stream: loggers hold this one already, and it has attributes of its own.
        stream.write = read_and_write

    def _read(self, line: str) -> None:
        # A fork of the rank's process, as a loader's worker, has the same stdout.
        if line.startswith(EVENT_MARK) or os.getpid() != self._process:
            self.stop()
            return
        now = time.monotonic()
        if self._spent > _MIN_SECONDS + _MAX_PART * (now - self._began):
            return
        reports = self._metrics.read(line, now)
        self._spent += time.monotonic() - now
        self._emit(reports)

    def _emit(self, reports: Sequence[Report]) -> None:
        for kind, data in reports:
            self._reporter.emit(kind, **data)

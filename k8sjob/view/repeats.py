"""Tracebacks and closing lines that replicas have in common are shown once.

A script that fails on all ranks fails in the same way on each: a traceback is held back until it is
complete, and given out as it came unless another replica has written the same one.
"""

from __future__ import annotations

import re
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from k8sjob.contract import Event, EventKind
from k8sjob.view.sanitize import text

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

__all__ = ["Repeats"]

_BY_RANK: Final = re.compile(r"\[rank (\d{1,9})\] (.*)", re.DOTALL)
"""A line of the runtime about one rank; its traceback is one run of such lines."""
_HEAD: Final = "Traceback (most recent call last):"
_CLOSING: Final = re.compile(r"k8sjob: rank \d{1,9}: (.*)", re.DOTALL)
_PATIENCE_S: Final = 1.0
"""Seconds after which a traceback counts as complete."""
_MOST_LINES: Final = 300
_LONGEST_LINE: Final = 4000
_NAMED: Final = 5


@dataclass(eq=False, slots=True)
class _Block:
    """A traceback of one rank that is being written."""

    rank: str
    began: float
    lines: list[str] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)


class Repeats:
    """Takes out of a job's events what another replica has written in the same words.

    Args:
        clock: seconds of a monotonic clock.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._open: dict[str, _Block] = {}
        self._first: dict[str, str] = {}
        self._named = set[str]()
        self._out: list[Event] = []
        self._alike: dict[str, list[str]] = {}

    def without(self, events: Iterable[Event]) -> Sequence[Event]:
        """The events to show now; to be called several times a second, with none too."""
        for event in events:
            self._take(event)
        late = self._clock() - _PATIENCE_S
        return self._given([name for name, block in self._open.items() if block.began <= late])

    def rest(self) -> Sequence[Event]:
        """What is still held back, at the end."""
        return self._given(list(self._open))

    def _given(self, complete: Iterable[str]) -> list[Event]:
        for replica in complete:
            self._close(replica)
        notes = [_alike(names, first) for first, names in self._alike.items()]
        given, self._out, self._alike = self._out + notes, [], {}
        return given

    def _take(self, event: Event) -> None:
        replica = event.replica
        line = str(event.data.get("text") or "") if event.kind == EventKind.LOG else ""
        found, block = _BY_RANK.fullmatch(line), self._open.get(replica)
        fits = block and len(block.lines) < _MOST_LINES and len(line) <= _LONGEST_LINE
        if block and not (fits and found and found[1] == block.rank):
            self._close(replica)
        elif not block and event.kind == EventKind.JOB:
            for other in list(self._open):
                self._close(other)
        if found and found[2] == _HEAD and replica not in self._open:
            self._open[replica] = _Block(found[1], self._clock())
        if found and replica in self._open:
            self._open[replica].lines.append(found[2])
            self._open[replica].events.append(event)
        elif not self._has_closed_alike(replica, line):
            self._out.append(event)

    def _close(self, replica: str) -> None:
        block = self._open.pop(replica)
        first = self._first_of("\n".join(block.lines), replica)
        if first == replica:
            self._out += block.events
        else:
            self._named.add(replica)
            self._alike.setdefault(first, []).append(replica)

    def _first_of(self, words: str, replica: str) -> str:
        """The replica that wrote these words first: this one, if none has."""
        if len(self._first) >= _MOST_LINES:
            self._first.clear()
        return self._first.setdefault(words, replica)

    def _has_closed_alike(self, replica: str, line: str) -> bool:
        """Whether it is an agent's line about an end that another agent has written already."""
        found = _CLOSING.fullmatch(line)
        if not found or len(line) > _LONGEST_LINE:
            return False
        first = self._first_of(found[1], replica)
        named = replica in self._named
        self._named.discard(replica)
        if first == replica:
            return False
        if not named:
            self._alike.setdefault(first, []).append(replica)
        return True


def _alike(replicas: Sequence[str], first: str) -> Event:
    names = ", ".join(map(text, replicas[:_NAMED]))
    more = f" and {len(replicas) - _NAMED} more" if len(replicas) > _NAMED else ""
    return Event(EventKind.LOG, {"text": f"{names}{more}: the same error as {text(first)}"})

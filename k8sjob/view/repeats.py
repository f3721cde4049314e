"""Tracebacks and closing lines that replicas have in common are shown once.

A script that fails on all ranks fails in the same way on each: what the second replica writes is
held back for a moment, and given out as it came if it turns out to differ.
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
_MOST_BLOCKS: Final = 32
_MOST_LINES: Final = 300
_LONGEST_LINE: Final = 4000
_NAMED: Final = 5


@dataclass(eq=False, slots=True)
class _Block:
    """A traceback of one rank: its lines, and the events of those that are held back."""

    replica: str
    rank: str
    began: float
    lines: list[str] = field(default_factory=list)
    held: list[Event] = field(default_factory=list)
    open: bool = True


class Repeats:
    """Takes out of a job's events what another replica has written in the same words.

    Args:
        clock: seconds of a monotonic clock.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._blocks: list[_Block] = []
        self._open: dict[str, _Block] = {}
        self._closed_by: dict[str, str] = {}
        self._named = set[str]()
        self._out: list[Event] = []
        self._alike: dict[str, list[str]] = {}

    def without(self, events: Iterable[Event]) -> Sequence[Event]:
        """The events to show now; to be called several times a second, with none too."""
        for event in events:
            self._take(event)
        late = self._clock() - _PATIENCE_S
        for block in list(self._open.values()):
            if block.began <= late:
                self._close(block)
        return self._given()

    def rest(self) -> Sequence[Event]:
        """What is still held back, at the end."""
        for block in list(self._open.values()):
            self._close(block)
        return self._given()

    def _given(self) -> list[Event]:
        notes = [_alike(names, first) for first, names in self._alike.items()]
        given, self._out, self._alike = self._out + notes, [], {}
        return given

    def _take(self, event: Event) -> None:
        line = str(event.data.get("text") or "") if event.kind == EventKind.LOG else ""
        found, block = _BY_RANK.fullmatch(line), self._open.get(event.replica)
        fits = block and len(block.lines) < _MOST_LINES and len(line) <= _LONGEST_LINE
        if block and fits and found and found[1] == block.rank:
            self._add(block, event, found[2])
            return
        if block:
            self._close(block)
        elif event.kind == EventKind.JOB:
            for other in list(self._open.values()):
                self._close(other)
        if found and found[2] == _HEAD:
            block = _Block(event.replica, found[1], self._clock())
            self._open[event.replica] = block
            self._add(block, event, found[2])
        elif not self._has_closed_alike(event.replica, line):
            self._out.append(event)

    def _add(self, block: _Block, event: Event, line: str) -> None:
        block.lines.append(line)
        shown = block in self._blocks
        if not shown and any(_may_equal(block, other) for other in self._blocks):
            block.held.append(event)
            return
        self._show(block)
        self._out.append(event)

    def _show(self, block: _Block) -> None:
        """Give out what was held back of a traceback, and compare others with it from now on."""
        self._out += block.held
        block.held = []
        if block not in self._blocks:
            self._blocks = [*self._blocks[1 - _MOST_BLOCKS :], block]

    def _close(self, block: _Block) -> None:
        block.open = False
        del self._open[block.replica]
        if not block.held:
            return
        same = next((one for one in self._blocks if _equal(block, one)), None)
        if same is None:
            self._show(block)
            return
        self._named.add(block.replica)
        self._alike.setdefault(same.replica, []).append(block.replica)

    def _has_closed_alike(self, replica: str, line: str) -> bool:
        """Whether it is an agent's line about an end that another agent has written already."""
        found = _CLOSING.fullmatch(line)
        if not found or len(line) > _LONGEST_LINE:
            return False
        if len(self._closed_by) >= _MOST_LINES:
            self._closed_by.clear()
        first = self._closed_by.setdefault(found[1], replica)
        named = replica in self._named
        self._named.discard(replica)
        if first == replica:
            return False
        if not named:
            self._alike.setdefault(first, []).append(replica)
        return True


def _may_equal(block: _Block, other: _Block) -> bool:
    """Whether a traceback that is still being written may become the same as another replica's."""
    if other.replica == block.replica:
        return False
    count = min(len(block.lines), len(other.lines))
    enough = other.open or count == len(block.lines)
    return enough and block.lines[:count] == other.lines[:count]


def _equal(block: _Block, other: _Block) -> bool:
    return other.replica != block.replica and other.lines == block.lines


def _alike(replicas: Sequence[str], first: str) -> Event:
    names = ", ".join(map(text, replicas[:_NAMED]))
    more = f" and {len(replicas) - _NAMED} more" if len(replicas) > _NAMED else ""
    return Event(EventKind.LOG, {"text": f"{names}{more}: the same error as {text(first)}"})

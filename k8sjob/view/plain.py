"""Lines for a pipe or a build log, and JSON lines for a program."""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Final, TextIO

from k8sjob.contract import EventKind
from k8sjob.view.lines import Speaker, costs, position
from k8sjob.view.repeats import Repeats
from k8sjob.view.story import Story

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.text import Text

    from k8sjob.contract import Event

__all__ = ["JsonView", "PlainView", "record"]

EVERY_S: Final = 10.0
"""Seconds between two lines about the progress of one epoch, or about who is missing."""
_WAITING: Final = "waiting for "


class PlainView:
    """One line an event, with its speaker in front; progress now and then.

    Attributes:
        story: what was shown so far, added up.
    """

    def __init__(self, out: TextIO, job: str = "") -> None:
        self.story = Story(job)
        self._out = out
        self._speaker = Speaker()
        self._repeats = Repeats()
        self._told: tuple[int, float] = (0, -math.inf)
        self._start: tuple[str, float] = ("", -math.inf)

    def show(self, events: Sequence[Event]) -> None:
        """Write what the events say; nothing for none."""
        self._write(self._repeats.without(events))

    def close(self) -> None:
        """Write what was held back."""
        self._write(self._repeats.rest())

    def _write(self, events: Sequence[Event]) -> None:
        for event in events:
            self.story.add(event)
            line = self._own(event) or self._speaker.line(event)
            if line is not None:
                self._out.write(line.plain + "\n")
        if events:
            self._out.flush()

    def _own(self, event: Event) -> Text | None:
        """What a screen shows in its panel."""
        if event.kind == EventKind.PROGRESS:
            return self._progress(event)
        if event.kind in {EventKind.STARTING, EventKind.STARTED}:
            return self._starting(event)
        return None

    def _starting(self, event: Event) -> Text | None:
        """What keeps the job from training, where that has changed; who is missing, now and then.

        It is said for the first replica that comes to it: all go the same way.
        """
        said, (before, at) = self.story.starting, self._start
        if said == before:
            return None
        again = before.startswith(_WAITING) and said.startswith(_WAITING)
        if again and 0 <= event.time - at < EVERY_S:
            return None
        self._start = said, event.time
        return self._speaker.prefix(event.replica).append(said) if said else None

    def _progress(self, event: Event) -> Text | None:
        now = self.story.progress
        epoch, at = self._told
        if now.epoch == epoch and 0 <= event.time - at < EVERY_S:
            return None
        self._told = now.epoch, event.time
        return self._speaker.prefix(event.replica).append("  ".join([*position(now), *costs(now)]))


class JsonView:
    """One JSON object an event: see `record`.

    Attributes:
        story: what was shown so far, added up.
    """

    def __init__(self, out: TextIO, job: str = "") -> None:
        self.story = Story(job)
        self._out = out

    def show(self, events: Sequence[Event]) -> None:
        """Write the events; nothing for none."""
        for event in events:
            self.story.add(event)
            self._out.write(json.dumps(record(event), default=str) + "\n")
        if events:
            self._out.flush()

    def close(self) -> None:
        """Nothing is left open."""


def record(event: Event) -> dict[str, Any]:
    """The event as the JSON object of `-o json`: kind, time, replica, data.

    Numbers that JSON has no word for (NaN, infinities) become null, so that every parser can read
    the line; text is left as it came, since JSON escapes what is not printable ASCII.
    """
    return {key: _finite(value) for key, value in asdict(event).items()}


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value

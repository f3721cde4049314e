"""The screen of a terminal: the job's lines scroll by, its state stands below them."""

from __future__ import annotations

import time
from collections import Counter
from typing import TYPE_CHECKING, Final

from rich.text import Text

from k8sjob.view.lines import (
    NAME_WIDTH,
    STATE_STYLE,
    Speaker,
    colour,
    costs,
    duration,
    position,
    started,
)
from k8sjob.view.region import Region
from k8sjob.view.repeats import Repeats
from k8sjob.view.story import Story

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from rich.console import Console

    from k8sjob.contract import Event
    from k8sjob.view.story import Replica

__all__ = ["LiveView", "Panel"]

MAX_LINE: Final = 4000
"""Characters of one log line that a screen shows; the log itself keeps them all."""
_BAR: Final = 40
"""Columns of the progress bar, where there is room for them."""


class LiveView:
    """Lines above, a panel below that is drawn anew where it changed.

    Attributes:
        story: what was shown so far, added up.
    """

    def __init__(
        self,
        console: Console,
        job: str = "",
        *,
        ascii_only: bool = False,
    ) -> None:
        """A view.

        Args:
            console: the terminal.
            job: the job as its user calls it.
            ascii_only: use no character beyond ASCII.
        """
        self.story = Story(job)
        self._console = console
        self._speaker = Speaker()
        self._panel = Panel(self.story, ascii_only=ascii_only)
        self._region = Region(console)
        self._repeats = Repeats()

    def show(self, events: Sequence[Event]) -> None:
        """Print what the events say and draw the panel, in one write."""
        self._draw(self._repeats.without(events))

    def close(self) -> None:
        """Take the panel away; the lines stay."""
        self._draw(self._repeats.rest())
        self._region.close()

    def _draw(self, events: Sequence[Event]) -> None:
        lines = []
        for event in events:
            self.story.add(event)
            if (text := self._speaker.line(event)) is not None:
                lines.append(_shortened(text))
        above = Text("\n").join(lines) if lines else None
        size = self._console.size
        self._region.draw(self._panel.lines(size.width, size.height), above)


class Panel:
    """The state of a job in as many lines as the terminal has to spare.

    Args:
        story: drawn as it is at the time of drawing.
        ascii_only: use no character beyond ASCII.
    """

    def __init__(self, story: Story, *, ascii_only: bool = False) -> None:
        self._story = story
        self._begun = time.time()
        self._ascii = ascii_only

    def lines(self, columns: int, rows: int) -> list[Text]:
        """The lines for a terminal of that size: narrower than it by one column, and lower."""
        room, width = max(rows - 3, 1), max(columns - 1, 1)
        lines = [self._title()]
        if self._story.starting:
            lines.append(Text(self._story.starting, style="yellow"))
        lines += [*self._progress(width), *self._costs(width)]
        lines += self._replicas(max(min(room // 2, room - len(lines)), 0))
        for text in lines:
            text.truncate(width, overflow="crop" if self._ascii else "ellipsis")
        return lines[:room]

    def _title(self) -> Text:
        story = self._story
        state = story.state or "Starting"
        if story.stopping and state == "Running":
            state = "Stopping"
        title = Text(story.job, style="bold").append("  ")
        title.append(state, style=f"not bold {STATE_STYLE.get(state, 'yellow')}")
        age = time.time() - (story.created or self._begun)
        title.append(f"  {duration(max(age, 0))}", style="not bold")
        if story.group:
            title.append(f"  {started(story.group)}", style="not bold dim")
        return title

    def _progress(self, width: int) -> list[Text]:
        progress = self._story.progress
        pieces = position(progress)
        if not pieces:
            return []
        done = progress.fraction
        if done is None:
            return [Text(_joined(pieces, width))]
        said = "  ".join(pieces)
        beside = (width - len(said) - len("  100%  ")) // 10 * 10  # tens: a steady bar
        if beside >= _BAR // 4:
            return [self._bar(done, min(beside, _BAR)).append(f"  {said}")]
        bar = self._bar(done, max(min(width - len(" 100%"), _BAR), 1))
        return [bar, Text(_joined(pieces, width))]

    def _costs(self, width: int) -> list[Text]:
        pieces = costs(self._story.progress)
        return [Text(_joined(pieces, width), style="dim")] if pieces else []

    def _bar(self, done: float, width: int) -> Text:
        full, rest = ("#", ".") if self._ascii else ("━", "─")  # differ without colours, too
        filled = int(done * width)
        bar = Text(full * filled, style="green")
        bar.append(rest * (width - filled), style="dim" if self._ascii else "grey37")
        return bar.append(f" {done:4.0%}")

    def _replicas(self, rows: int) -> Iterator[Text]:
        """One line a replica; where they are too many, those that do not simply run, and counts."""
        replicas = self._story.replicas
        if len(replicas) <= rows:
            shown, rest = list(replicas), Counter[str]()
        else:
            odd = [name for name, replica in replicas.items() if replica.phase != "Running"]
            shown = odd[: max(rows - 1, 0)]
            rest = Counter(replica.phase for name, replica in replicas.items() if name not in shown)
        width = max([NAME_WIDTH, *map(len, shown)])
        for name in shown:
            yield Text(f"{name:{width}}  ", style=colour(name)).append_text(
                _replica(replicas[name])
            )
        if rest and rows:
            counts = ", ".join(f"{count} {phase or 'Unknown'}" for phase, count in rest.items())
            yield Text(f"and {counts}" if shown else counts)


def _replica(replica: Replica) -> Text:
    phase = replica.phase or "Unknown"
    text = Text(f"{phase:9}", style=STATE_STYLE.get(phase, "yellow"))
    if replica.restarts:
        text.append(f"  {replica.restarts} restart{'s' * (replica.restarts > 1)}", style="yellow")
    if replica.reason not in {"", phase, "Error"}:
        text.append(f"  {replica.reason}")
    if replica.exit_code is not None:
        which = "last exit code" if phase == "Running" else "exit code"
        text.append(f"  {which} {replica.exit_code}")
    if replica.node:
        text.append(f"  {replica.node}", style="dim")
    return text


def _joined(pieces: list[str], width: int) -> str:
    """As many of the pieces as fit, at least the first one."""
    kept = list(pieces)
    while len(kept) > 1 and len("  ".join(kept)) > width:
        kept.pop()
    return "  ".join(kept)


def _shortened(text: Text) -> Text:
    over = len(text) - MAX_LINE
    if over <= 0:
        return text
    return text[:MAX_LINE].append(f" ({over:,} more characters)", style="dim")

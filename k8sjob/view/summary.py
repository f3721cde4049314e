"""What is left to say when a job is over."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.text import Text

from k8sjob.view.lines import STATE_STYLE, duration, finding_lines
from k8sjob.view.plot import number, plot

if TYPE_CHECKING:
    from collections.abc import Mapping

    from k8sjob.view.story import Story

__all__ = ["summary"]

MAX_WIDTH = 76


def summary(
    story: Story,
    *,
    width: int = 80,
    ascii_only: bool = False,
    more: Mapping[str, str] | None = None,
) -> list[Text]:
    """The loss curve, how the job ended, what it reached, why it failed, and what to do next.

    Args:
        story: the job's events, added up.
        width: columns of the terminal.
        ascii_only: use no character beyond ASCII.
        more: further rows, by label: where the logs are, which command shows them.
    """
    lines = [
        Text(line) for line in curve(story, width=min(width, MAX_WIDTH), ascii_only=ascii_only)
    ]
    if lines:
        lines.append(Text())
    lines.append(_outcome(story))
    for found in story.findings:
        lines += finding_lines(found)
    rows = {
        name: value if isinstance(value, str) else number(value)
        for name, value in story.metrics.items()
        if name not in {"epoch", "step"}
    }
    if story.checkpoint:
        rows["checkpoint"] = story.checkpoint
    rows.update(more or {})
    margin = max([10, *map(len, rows)])
    lines += [
        Text("  ").append(f"{label:{margin}}", style="dim").append(f"  {value}")
        for label, value in rows.items()
    ]
    return lines


def curve(story: Story, *, width: int, ascii_only: bool) -> list[str]:
    """The loss over the epochs as lines of text; none where there is too little of it."""
    lines = plot(story.curve, width=width, ascii_only=ascii_only)
    if not lines:
        return []
    first, last = (number(round(story.curve[end][0], 1)) for end in (0, -1))
    return [*lines, f"loss, epoch {first} to {last}".rjust(len(lines[-1]))]


def _outcome(story: Story) -> Text:
    state = story.state or "Ended"
    text = Text(story.job, style="bold").append(" ")
    text.append(state, style=STATE_STYLE.get(state, "yellow"))
    if story.seconds is not None:
        text.append(f" after {duration(story.seconds)}", style="not bold")
    detail = story.message if state != "Succeeded" and not story.findings else ""
    return text.append(f": {detail}", style="not bold") if detail else text

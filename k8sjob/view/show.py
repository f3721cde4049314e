"""Which view suits the output: a screen, plain lines or JSON lines."""

from __future__ import annotations

import os
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING, Literal, Protocol, TextIO, Union

from rich.console import Console
from rich.text import Text

from k8sjob.view.board import LiveBoard, PlainBoard
from k8sjob.view.live import LiveView
from k8sjob.view.plain import JsonView, PlainView
from k8sjob.view.story import Story
from k8sjob.view.summary import summary

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from k8sjob.contract import Event

__all__ = [
    "Format",
    "Output",
    "Screen",
    "View",
    "ascii_only",
    "board",
    "close_with_summary",
    "console_for",
    "is_live",
    "viewer",
]

Format = Literal["auto", "plain", "json"]
Output = Union[Format, "Callable[[Event], object]"]
"""A name of a view, or a function that is called with each event."""


class Screen(Protocol):
    """Shows events as they come."""

    def show(self, events: Sequence[Event]) -> None:
        """Show what happened; to be called several times a second, with nothing too."""

    def close(self) -> None:
        """Leave the terminal as it was found."""


class View(Screen, Protocol):
    """Shows the events of one job."""

    story: Story
    """What was shown so far, added up."""


class CallbackView:
    """Hands each event to a function of the caller's.

    Attributes:
        story: what was shown so far, added up.
    """

    def __init__(self, callback: Callable[[Event], object], job: str = "") -> None:
        self.story = Story(job)
        self._callback = callback

    def show(self, events: Sequence[Event]) -> None:
        """Call the function with each of the events."""
        for event in events:
            self.story.add(event)
            self._callback(event)

    def close(self) -> None:
        """Nothing is left open."""


@contextmanager
def viewer(
    kind: Output = "auto",
    *,
    job: str = "",
    out: TextIO | None = None,
) -> Iterator[View]:
    """The view for an output, closed at the end.

    Args:
        kind: "json" for JSON lines, "plain" for plain lines, "auto" for a live screen where the
            output is a terminal and plain lines where it is not; a function is called with each
            event.
        job: the job as its user calls it.
        out: standard output, unless another stream is given.
    """
    out = out or sys.stdout
    view: View
    if callable(kind):
        view = CallbackView(kind, job)
    elif kind == "json":
        view = JsonView(out, job)
    elif kind == "auto" and is_live(out):
        view = LiveView(console_for(out), job, ascii_only=ascii_only(out))
    else:
        view = PlainView(out, job)
    try:
        yield view
    finally:
        view.close()


@contextmanager
def board(kind: Format = "auto", *, out: TextIO | None = None) -> Iterator[Screen]:
    """The view of many jobs for an output, closed at the end; see `viewer`."""
    out = out or sys.stdout
    view: Screen
    if kind == "json":
        view = JsonView(out)
    elif kind == "auto" and is_live(out):
        view = LiveBoard(console_for(out), ascii_only=ascii_only(out))
    else:
        view = PlainBoard(out)
    try:
        yield view
    finally:
        view.close()


def close_with_summary(
    view: View,
    *,
    more: Mapping[str, str] | None = None,
    out: TextIO | None = None,
) -> None:
    """End a view and write the summary of what it showed; not where the view is for a program.

    Args:
        view: from `viewer`.
        more: further rows of the summary, by label.
        out: as for `viewer`.
    """
    view.close()
    if isinstance(view, JsonView | CallbackView):
        return
    out = out or sys.stdout
    console = console_for(out)
    lines = summary(view.story, width=console.width, ascii_only=ascii_only(out), more=more)
    console.print(Text("\n").join([Text(), *lines]), soft_wrap=True)


def console_for(out: TextIO) -> Console:
    """A console that takes text as text: no markup, no emoji codes, no highlighting."""
    return Console(file=out, markup=False, emoji=False, highlight=False)


def is_live(out: TextIO) -> bool:
    """Whether the output is a terminal that a person looks at, and not a build's log."""
    return out.isatty() and not os.environ.get("CI") and os.environ.get("TERM") != "dumb"


def ascii_only(out: TextIO) -> bool:
    """Whether the output can show ASCII alone: by its encoding, or because the locale says so."""
    locale = os.environ.get("LC_ALL") or os.environ.get("LANG") or ""
    return not (out.encoding or "").lower().startswith("utf") or locale in {"C", "POSIX"}

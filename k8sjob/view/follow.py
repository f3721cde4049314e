"""A job on the screen, from its beginning until it ends or its reader leaves.

`run`, `submit --watch` and `watch` differ in what an interrupt does, and in nothing else.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from k8sjob.contract import Event, EventKind
from k8sjob.lifecycle.status import JobState
from k8sjob.lifecycle.watch import watch
from k8sjob.view.feed import Feed, Interrupts
from k8sjob.view.show import board, close_with_summary, viewer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path

    from k8sjob.backends.api import Backend, JobRef
    from k8sjob.view.show import Format, Output
    from k8sjob.view.story import Story

__all__ = ["follow", "follow_all", "leave"]


def leave(_times: int) -> str | None:
    """What an interrupt does by default: the reader leaves, and the job goes on."""
    return None


def follow(
    backend: Backend,
    ref: JobRef,
    *,
    output: Output = "auto",
    logs: bool = True,
    interrupted: Callable[[int], str | None] = leave,
    files: Path | None = None,
    seen: Callable[[Event], object] = lambda _event: None,
) -> int:
    """Show a job to its end.

    Args:
        backend: where the job lives.
        ref: the job.
        output: how, see `viewer`.
        logs: read what the replicas write; without it there is no progress either.
        interrupted: called at each SIGINT, SIGTERM or SIGHUP with how many there were; does what
            is to be done and says it, or gives None where the reader leaves the job alone.
        files: where the job's files lie on this machine; the summary names it.
        seen: called with each event that is shown.

    Returns:
        The exit code: 130, 143 or 129 where it was interrupted, else that of the job's outcome.

    Raises:
        JobNotFound: there is no such job.
        BackendError: the back end could not be read any more.
    """
    with viewer(output, job=ref.name) as view, Interrupts() as interrupts:
        answered = 0
        for batch in Feed(watch(backend, ref, logs=logs)):
            view.show(batch)
            for event in batch:
                seen(event)
            while answered < interrupts.count:
                answered += 1
                answer = interrupted(answered)
                if answer is None:
                    return interrupts.exit_code
                view.show([Event(EventKind.WARNING, {"message": answer}, time.time())])
        close_with_summary(view, more=_further(view.story, ref, files))
    return interrupts.exit_code or view.story.exit_code or 0


def follow_all(events: Iterable[Event], *, output: Format = "auto") -> int:
    """Show many jobs until an interrupt comes; the exit code.

    Args:
        events: see lifecycle.many.
        output: "auto" is a table in a terminal and a line a change elsewhere.

    Raises:
        BackendError: the jobs could not be read any more.
    """
    with board(output) as view, Interrupts() as interrupts:
        for batch in Feed(events):
            view.show(batch)
            if interrupts.count:
                break
    return interrupts.exit_code


def _further(story: Story, ref: JobRef, files: Path | None) -> dict[str, str]:
    """Where to look further; nothing of a job that is gone."""
    if story.state == JobState.DELETED:
        return {}
    more = {"files": str(files)} if files else {}
    return more | {"logs": f"k8sjob logs {ref.name if files else ref}"}

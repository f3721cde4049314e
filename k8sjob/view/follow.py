"""A job on the screen, from its beginning until it ends or its reader detaches.

`run`, `submit --watch` and `watch` differ only in what an interrupt does. A source of events blocks
while nothing happens, and an exception thrown into it would end it. So it runs in a thread of its
own; the main thread draws, ten times a second, and counts interrupts instead of being interrupted.
"""

from __future__ import annotations

import io
import os
import signal
import sys
import threading
import time
from contextlib import closing, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Final, Self, TextIO, TypeVar

from k8sjob.backends.api import JobRef
from k8sjob.backends.local.outputs import listed, written_files
from k8sjob.contract import Event, EventKind
from k8sjob.observe.merge import Ended, Merge
from k8sjob.observe.watch import watch
from k8sjob.targets.api import JobState
from k8sjob.view.views import CallbackView, Format, Output, board, close_with_report, viewer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from types import FrameType

    from k8sjob.backends.api import Backend, Snapshot
    from k8sjob.backends.local.state_folder import JobFolder
    from k8sjob.view.summary import JobSummary

T = TypeVar("T")

TICK: Final = 0.1
"""Seconds between two batches."""
_BATCH: Final = 1000


def follow(
    backend: Backend,
    ref: JobRef,
    *,
    output: Output = "auto",
    logs: bool = True,
    verbose: bool = False,
    interrupted: Callable[[int], str | None] = lambda _times: None,
    files: JobFolder | None = None,
    on_event: Callable[[Event], object] = lambda _event: None,
    outlives_reader: bool = False,
) -> int:
    """Show a job to its end.

    Args:
        backend: where the job lives.
        ref: the job.
        output: how, see `viewer`.
        logs: read what the replicas write; without it there is no progress either.
        verbose: show tracebacks with the frames of libraries.
        interrupted: called at each SIGINT, SIGTERM or SIGHUP with how many there were; acts on it
            and returns a message, or None if the reader detaches from the job, as by default.
        files: the job's folder on this machine; the report names it, and what the job wrote.
        on_event: called with each event that is shown.
        outlives_reader: continue without output when a pipe is closed by its reader, as by head.

    Returns:
        The exit code: 130, 143 or 129 where it was interrupted, else that of the job's outcome.

    Raises:
        JobNotFound: there is no such job.
        BackendError: the back end could not be read any more.
    """
    with (
        _replacing(sys.stdout),
        closing(viewer(output, job=ref.name, verbose=verbose)) as view,
        Interrupts() as interrupts,
    ):
        answered = 0

        # A job on this machine must not end because `| head` has read enough.
        def write(shown: Callable[[], object]) -> None:
            try:
                shown()
            except BrokenPipeError:
                if not outlives_reader:
                    raise
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())

        shown = batches(watch(backend, ref, logs=logs))
        if files and not isinstance(view, CallbackView):  # a program gets all
            shown = _since_resume(shown, view.summary, backend.snapshot(ref))
        for batch in shown:
            write(partial(view.show, batch))
            for event in batch:
                on_event(event)
            # Interrupts are counted by a signal handler, and acted on between two batches.
            while answered < interrupts.count:
                answered += 1
                answer = interrupted(answered)
                if answer is None:
                    return interrupts.exit_code
                view.show([Event(EventKind.WARNING, {"message": answer}, time.time())])
        record = backend.snapshot(ref).record if backend.recorded else ""
        more = _further(view.summary, record or ref, files)
        write(lambda: close_with_report(view, more=more))
    return interrupts.exit_code or view.summary.exit_code or 0


def _since_resume(
    event_batches: Iterable[list[Event]], summary: JobSummary, snapshot: Snapshot
) -> Iterator[list[Event]]:
    """Batches without what was written before the job was resumed, for which a line stands.

    For jobs of this machine: in a cluster the nodes' clocks may differ from that of the condition,
    and the output before it is gone with the Pods.
    """
    suspended, mark = snapshot.job.condition("Suspended"), list[Event]()
    resumed = suspended.since if suspended.false else None
    since = resumed.timestamp() if resumed else 0.0
    for batch in event_batches:
        later = [event for event in batch if event.time >= since]
        for event in batch:
            if event.time < since:
                summary.add(event)
        if len(later) < len(batch) and not mark:
            at = time.strftime("%H:%M:%S", time.localtime(since))
            line = f"resumed at {at}; the output before: k8sjob logs {summary.job}"
            mark = [Event(EventKind.LOG, {"text": line}, since)]
            later = mark + later
        yield later


def follow_all(events: Iterable[Event], *, output: Format = "auto") -> int:
    """Show many jobs until an interrupt comes; the exit code.

    Args:
        events: see observe.watch_all.
        output: "json" is an object for each event, all others a row for each change.

    Raises:
        BackendError: the jobs could not be read any more.
    """
    with closing(board(output)) as view, Interrupts() as interrupts:
        for batch in batches(events):
            view.show(batch)
            if interrupts.count:
                break
    return interrupts.exit_code


def _further(summary: JobSummary, job: JobRef | str, files: JobFolder | None) -> dict[str, str]:
    """The next commands to look with; none for a job that is gone."""
    if summary.state == JobState.DELETED:
        return {}
    if files and isinstance(job, JobRef):
        places = {"files": str(files.path), "written": listed(written_files(files))}
        return {**places, "logs": f"k8sjob logs {job.name}"}
    return {"logs": f"k8sjob logs {job}"}


@contextmanager
def _replacing(out: TextIO) -> Iterator[None]:
    """A character that the stream's encoding lacks becomes a `?`, inside a `with`.

    A job must not end because one of its lines cannot be shown.
    """
    if not isinstance(out, io.TextIOWrapper):
        yield
        return
    before = out.errors
    out.reconfigure(errors="replace")
    try:
        yield
    finally:
        out.reconfigure(errors=before)


class Interrupts:
    """Counts SIGINT, SIGTERM and SIGHUP instead of ending by them, inside a `with`.

    SIGHUP, which a terminal sends when it is closed, is left alone where it is ignored (nohup).

    Attributes:
        count: how often an end was requested.
        exit_code: what a process ends with after it, 128 + the first signal; 0 before.
    """

    def __init__(self) -> None:
        self.count = 0
        self.exit_code = 0
        self._before: dict[signal.Signals, signal._HANDLER] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():  # others may not set handlers
            ends = [signal.SIGINT, signal.SIGTERM]
            if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
                ends.append(signal.SIGHUP)
            for number in ends:
                self._before[number] = signal.signal(number, self._count)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _count(self, number: int, _frame: FrameType | None) -> None:
        self.count += 1
        self.exit_code = self.exit_code or 128 + number


def batches(source: Iterable[T]) -> Iterator[list[T]]:
    """The items of a blocking source, at least one batch each TICK; its error is raised at its end.

    A daemon thread reads it: it ends with the process, or with the item after the loop was left.
    """
    error = None
    with Merge[T]() as merge:
        merge.add("", lambda _stop: iter(source))
        while merge.open:
            started, batch = time.monotonic(), list[T]()
            while merge.open and len(batch) < _BATCH:
                item = merge.get(0 if batch else TICK)
                if item is None:
                    break
                if isinstance(item, Ended):
                    error = item.error
                else:
                    batch.append(item)
            yield batch
            pause = TICK - (time.monotonic() - started)
            if merge.open and 0 < len(batch) < _BATCH and pause > 0:
                time.sleep(pause)  # let more come together for one drawing
    if error is not None:
        raise error

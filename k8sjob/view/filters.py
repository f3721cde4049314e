"""The events of a job as views show them: each error once, and one line per epoch.

The log of a replica has all that it wrote; these filters shorten what is on the screen.
"""

from __future__ import annotations

import re
import time
from collections import Counter
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final

from k8sjob.contract import LOG, RUNTIME_HOME, Event, EventKind, counted
from k8sjob.findings import listed
from k8sjob.observe.training import Progress
from k8sjob.sanitize import flat, text
from k8sjob.view.formats import duration, file_name, number
from k8sjob.view.summary import REPEATS, JobSummary

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence


class ShownEvents:
    """All filters of a view, and the summary of what has passed them.

    With `pace` the line of an epoch has the samples per second and the ETA; with `verbose`
    tracebacks are left as they came.
    """

    def __init__(self, job: str, *, pace: bool = False, verbose: bool = False) -> None:
        self.summary = JobSummary(job=job)
        self._errors, self._epochs = Errors(verbose=verbose), Epochs(pace=pace)

    def take(self, events: Iterable[Event]) -> Iterator[Event]:
        """The events to show now; to be called several times a second, with none too."""
        yield from self._pass(self._errors.take(events))
        yield from self._epochs.late()

    def rest(self) -> Iterator[Event]:
        """The output that is still held back, at the end."""
        yield from self._pass(self._errors.rest())
        yield from self._epochs.rest()

    def _pass(self, events: Iterable[Event]) -> Iterator[Event]:
        for event in events:
            self.summary.add(event)
            if not event.printed:
                yield from self._epochs.take(event)
            elif event.kind != EventKind.METRICS:
                yield event


# --- versions -----------------------------------------------------------------------------------

_BANNER: Final = re.compile(r"k8sjob: [^,]+, job .*?, (Python [^,]+(?:, torch .+)?)")
"""An agent's first line, which says where it is; the group's line says that for all."""


class Versions:
    """Leaves out the first line of each agent, but for versions that are not the first agent's."""

    def __init__(self) -> None:
        self._first: tuple[str, str] | None = None

    def take(self, events: Iterable[Event]) -> Iterator[Event]:
        """The events to show."""
        for event in events:
            written = str(event.data.get("text")) if event.kind == LOG else ""
            match = _BANNER.fullmatch(written)
            if match is None:
                yield event
                continue
            replica, versions = self._first = self._first or (text(event.replica), match[1])
            if versions != match[1]:
                line = f"k8sjob: {match[1]}, while {replica} has {versions}"
                yield replace(event, data={**event.data, "text": line})


# --- errors -------------------------------------------------------------------------------------

_LINE: Final = re.compile(r"(?:\[rank (\d{1,9})\] )?(.*)", re.DOTALL)
"""A line; the runtime puts the rank in front of each line of a traceback."""
_HEAD: Final = "Traceback (most recent call last):"
_FRAME: Final = re.compile(r'  File "(?P<file>[^"\n]+)", line \d+(?:, in .*)?')
_LIBRARY: Final = re.compile(
    r"/(?:site|dist)-packages/(?P<package>[^/]+)"
    rf"|(?:/runtime|{re.escape(RUNTIME_HOME)})/(?P<runtime>k8sjob)/"
    r"|/lib/python3[\d.]*/(?!(?:site|dist)-packages/)|^<frozen "
)
_AGAIN: Final = re.compile(r"\[rank \d{1,9}\] (?:.*: )?the same traceback as another rank's")
_AGENT: Final = re.compile(r"k8sjob: rank \d{1,9}: (.*)", re.DOTALL)
"""An agent's line about the end of a rank."""
_MODULE: Final = re.compile(r"^(?:[A-Za-z_]\w*\.)+(?=[A-Za-z_]\w*(?::|$))")
_PATIENCE_S: Final = 1.0
"""Seconds after its last line after which a traceback counts as complete."""
_MOST_LINES: Final = 1000
"""Lines of a traceback that are held back at most, and errors that are remembered."""
_LONGEST_LINE: Final = 4000


@dataclass(eq=False, slots=True)
class _Block:
    """A traceback that is being written.

    Attributes:
        written: when its last line was, by time.monotonic().
    """

    written: float
    lines: list[str] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)


class Errors:
    """Shows a traceback once, without the frames of libraries.

    A script that fails on all ranks fails in the same way on each. So a traceback is held back
    until it is complete, and left out if another replica has written the same one.
    """

    def __init__(self, *, verbose: bool = False) -> None:
        self._verbose = verbose
        # (replica, rank or None for lines without one) -> the traceback that it is writing
        self._open: dict[tuple[str, str | None], _Block] = {}
        self._raised = dict[str, None]()
        self._first: dict[str, str] = {}  # the words of an error -> the replica that wrote it first
        self._named = set[str]()  # replicas that a note names: their agents' lines add nothing
        self._out: list[Event] = []
        self._alike: dict[str, list[str]] = {}  # a replica -> those with the same error since

    def take(self, events: Iterable[Event]) -> Sequence[Event]:
        """The events to show now; to be called several times a second, with none too."""
        for event in events:
            self._take(event)
        late = time.monotonic() - _PATIENCE_S
        return self._closed([key for key, block in self._open.items() if block.written <= late])

    def rest(self) -> Sequence[Event]:
        """The output that is still held back, at the end."""
        return self._closed(list(self._open))

    def _closed(self, complete: Iterable[tuple[str, str | None]]) -> list[Event]:
        for key in complete:
            self._close(key)
        notes = [_alike(names, first) for first, names in self._alike.items()]
        shown, self._out, self._alike = self._out + notes, [], {}
        return shown

    def _take(self, event: Event) -> None:
        written = str(event.data.get("text") or "") if event.kind == LOG else ""
        is_of_block = self._open or written.endswith(_HEAD)
        if is_of_block and self._add_to_block(event, written):
            return
        if self._verbose or not _AGAIN.fullmatch(written):
            self._show(event, written)

    def _add_to_block(self, event: Event, written: str) -> bool:
        """Hold a line of a traceback back; whether it is one."""
        match = _LINE.fullmatch(written)
        rank, line = (match[1], match[2]) if match else (None, written)
        key = event.replica, rank
        block = self._open.get(key)
        fits = block and len(block.lines) < _MOST_LINES and len(written) <= _LONGEST_LINE
        if event.kind == LOG and (fits or (not block and line == _HEAD)):
            block = self._open.setdefault(key, _Block(time.monotonic()))
            block.written = time.monotonic()
            block.lines.append(line)
            block.events.append(event)
            if rank is None and line != _HEAD and not _is_in_frame(line):  # the error itself
                self._close(key)
            return True
        # Another line of the replica: what it wrote before is shown first, so that the order stays.
        for replica, process in list(self._open):
            if replica == event.replica or not event.replica:
                self._close((replica, process))
        return False

    def _show(self, event: Event, written: str) -> None:
        """Show an event, but of an agent's lines about an end only what is new in them."""
        match = _AGENT.fullmatch(written)
        if not match or len(written) > _LONGEST_LINE:
            self._out.append(event)
            return
        end, replica = match[1], event.replica
        first = self._first_of(end, replica)
        named = replica in self._named
        self._named.discard(replica)
        if first != replica:
            if not named:
                self._alike.setdefault(first, []).append(replica)
            return
        beginnings = (error for error in self._raised if end.startswith(error))
        error = next((error for error in beginnings if end[len(error) :][:1] in {"", " ", ","}), "")
        self._out.append(replace(event, data={**event.data, REPEATS: error}) if error else event)

    def _close(self, key: tuple[str, str | None]) -> None:
        """Show a traceback as far as it has come."""
        block, (replica, rank) = self._open.pop(key), key
        words = "\n".join(block.lines)
        first = replica if rank is None else self._first_of(words, replica)
        if first != replica:
            self._named.add(replica)
            self._alike.setdefault(first, []).append(replica)
        else:
            self._out += block.events if self._verbose else self._shortened(rank, block)

    def _first_of(self, words: str, replica: str) -> str:
        """The replica that wrote these words first: this one, if none has."""
        if len(self._first) >= _MOST_LINES:
            self._first.clear()
        return self._first.setdefault(words, replica)

    def _shortened(self, rank: str | None, block: _Block) -> list[Event]:
        """The lines of a traceback, with one for each run of library frames in place of these.

        A traceback without any frame of the user's stays whole.
        """
        shown: list[Event] = []
        hidden: list[Event] = []
        libraries: Counter[str] = Counter()
        inside = users = False  # within the frames of a traceback; after a frame of the user's
        for line, event in zip(block.lines, block.events, strict=True):
            frame = _FRAME.fullmatch(line) if inside else None
            library = frame and _library(frame["file"])
            in_frame = inside and _is_in_frame(line)
            if library or (hidden and in_frame and not frame):
                libraries.update([library] if library else [])
                hidden.append(event)
                continue
            users = users or bool(frame)
            if hidden:
                shown += [_note(rank, hidden[0], libraries)] if users else hidden
                hidden, libraries = [], Counter()
            shown.append(event)
            if inside and not in_frame and line.strip() and len(self._raised) < _MOST_LINES:
                self._raised[_MODULE.sub("", line)] = None
            inside, users = (in_frame, users) if inside else (line == _HEAD, False)
        return shown + hidden  # it broke off within a library: its last frames stay


def _is_in_frame(line: str) -> bool:
    return bool(_FRAME.fullmatch(line)) or line.startswith(("    ", "  [Previous line repeated"))


def _library(file: str) -> str:
    """The package that a file belongs to, "Python" for its own; empty for the user's code."""
    match = _LIBRARY.search(file)
    return (match["package"] or match["runtime"] or "Python") if match else ""


def _note(rank: str | None, first: Event, libraries: Counter[str]) -> Event:
    count, names = libraries.total(), ", ".join(libraries)
    prefix = "" if rank is None else f"[rank {rank}] "
    line = f"{prefix}  ... {counted(count, 'frame')} in {names}"
    return replace(first, data={**first.data, "text": line})


def _alike(replicas: Sequence[str], first: str) -> Event:
    names = listed(map(text, replicas))
    return Event(EventKind.LOG, {"text": f"{names}: the same error as {text(first)}"})


# --- epochs -------------------------------------------------------------------------------------

_HOLD_S: Final = 60.0
"""Seconds for which the line of an epoch waits for the evaluation behind it."""
_LONE_S: Final = 10.0
"""Seconds for which a checkpoint waits for the end of an epoch."""


class Epochs:
    """Joins a job's events about the end of an epoch into one METRICS event."""

    def __init__(self, *, pace: bool) -> None:
        self._pace = pace
        self._epoch: dict[str, Any] = {}
        self._logged = set[str]()
        self._last: Event | None = None
        self._since = 0.0
        self._checkpoint: Event | None = None
        self._written = 0.0

    def take(self, event: Event) -> Iterator[Event]:
        """The events to show now that this one has come."""
        if event.kind == LOG and not (self._last and event.replica == self._last.replica):
            yield event
            return
        match event.kind:
            case EventKind.PROGRESS if Progress.of(event.data).ends_epoch:
                yield from self._close()
                self._open(event)
            case EventKind.PROGRESS:
                yield from self._close()
                yield event
            case EventKind.METRICS if self._last and self._last.replica == event.replica:
                logged = flat(event.data)
                logged = {name: logged[name] for name in logged if name not in {"epoch", "step"}}
                if self._logged & logged.keys():  # of the next epoch already
                    yield from self._close()
                    yield event
                else:
                    self._epoch |= logged
                    self._logged |= logged.keys()
            case EventKind.CHECKPOINT:
                if self._checkpoint:
                    yield self._checkpoint
                self._checkpoint, self._written = event, time.monotonic()
            case EventKind.STARTING | EventKind.FINISHED:  # without a line of their own
                yield event
            case _:
                yield from self.rest()
                yield event

    def late(self) -> Iterator[Event]:
        """The output that has been held back for too long; call it several times a second."""
        now = time.monotonic()
        if self._last and now - self._since >= _HOLD_S:
            yield from self._close()
        if self._checkpoint and not self._last and now - self._written >= _LONE_S:
            yield from self.rest()

    def rest(self) -> Iterator[Event]:
        """The output that is still held back, at the end."""
        yield from self._close()
        if self._checkpoint:
            yield self._checkpoint
            self._checkpoint = None

    def _open(self, event: Event) -> None:
        progress, self._last, self._since = Progress.of(event.data), event, time.monotonic()
        self._logged = set()
        epoch = max(progress.epoch, 1)
        self._epoch = {"epoch": f"{epoch}/{progress.epochs}" if progress.epochs else epoch}
        loss = progress.loss if progress.epoch_loss is None else progress.epoch_loss
        if loss is not None:
            self._epoch["loss"] = loss

    def _close(self) -> Iterator[Event]:
        if self._last is None:
            return
        last, self._last = self._last, None
        progress = Progress.of(last.data)
        if self._pace and progress.samples_per_s is not None:
            self._epoch["samples/s"] = number(round(progress.samples_per_s, 1))
        if self._pace and progress.eta_s is not None:
            self._epoch["ETA"] = duration(progress.eta_s)
        if self._checkpoint:
            self._epoch["checkpoint"] = file_name(self._checkpoint)
            self._checkpoint = None
        yield Event(EventKind.METRICS, self._epoch, last.time, last.replica)

"""The attempts of a job: what its group did when, and the faults and checkpoints in between.

The phases are those of `usage` and, before the first line of output, of `why --timing`.
"""

from __future__ import annotations

from bisect import bisect_right
from itertools import groupby
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from k8sjob.contract import EventKind, ExitCode
from k8sjob.kube.objects import Pod, moment
from k8sjob.observe.holding import cut
from k8sjob.observe.status import job_status
from k8sjob.observe.suspension import last_suspension, read_related
from k8sjob.observe.timing import starts_of
from k8sjob.observe.usage import Use, reported_lines, sessions_of, spans_of
from k8sjob.sanitize import text

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from k8sjob.backends.api import Backend, LogLine, Snapshot
    from k8sjob.kube.objects import Json
    from k8sjob.observe.usage import Session, Span

_MOST_MARKS: Final = 100
"""The last marks of an attempt that are kept: checkpoints may be thousands."""
_LONGEST: Final = 300
"""Characters of a mark's text."""
_TEXTS: Final[dict[str, str]] = {
    EventKind.CHECKPOINT: "path",
    EventKind.RESUMED: "path",
    EventKind.STOPPING: "signal",
    EventKind.WARNING: "message",
}
"""Where the text of a mark is, in the event of its kind."""


class Segment(NamedTuple):
    """A time with one phase, a Use of `usage` or a part of one; in seconds since the epoch.

    `waits` is the part of it, 0 to 1, that ranks waited for the slowest.
    """

    phase: str
    begin: float
    end: float
    waits: float = 0.0


class Mark(NamedTuple):
    """A moment, its kind that of an event, or "fault"."""

    kind: str
    time: float
    text: str


class Attempt(NamedTuple):
    """One start of the group, with the time until the next; of the first with that before it."""

    segments: list[Segment]
    marks: list[Mark]

    def as_dict(self) -> dict[str, list[dict[str, Any]]]:
        """The same as JSON."""
        return {name: [part._asdict() for part in parts] for name, parts in self._asdict().items()}


def read_attempts(backend: Backend, snapshot: Snapshot) -> list[Attempt]:
    """The attempts, by the job's objects and the output of the replica that reports."""
    related = read_related(backend, snapshot)
    return attempts(snapshot, reported_lines(backend, snapshot.job), related)


def attempts(
    snapshot: Snapshot, lines: Iterable[LogLine], related: Iterable[Json] = ()
) -> list[Attempt]:
    """The same by lines; at least one."""
    status, paused = job_status(snapshot), last_suspension(snapshot, related)
    now = (status.finished or snapshot.now).timestamp()
    created = status.created.timestamp() if status.created else now
    sessions = list(sessions_of(lines))
    begins = [session.begin for session in sessions]
    pauses = [(paused.begin, paused.end or now)] if paused and paused.begin is not None else []
    rows = [Attempt([], _marks(session)) for session in sessions] or [Attempt([], [])]

    def number(time: float) -> int:
        return max(bisect_right(begins, time) - 1, 0)

    rows[0].segments.extend(_until_output(snapshot, created, begins[0] if begins else now, begins))
    spans = (s for s in spans_of(sessions, now, ended=status.state.finished) if s.end > s.begin)
    for index, of_attempt in groupby(spans, lambda span: number(span.begin)):
        rows[index].segments.extend(_segments(sessions[index], of_attempt))
    for fault in _faults(snapshot):
        rows[number(fault.time)].marks.append(fault)
    return [Attempt(_joined(row.segments, pauses), row.marks) for row in rows]


def _until_output(
    snapshot: Snapshot, created: float, until: float, begins: list[float]
) -> Iterator[Segment]:
    """The phases of the replica that was started last, up to the first line of output."""
    starts = starts_of(snapshot, until)
    if not starts and begins:  # its Pods and their Events are gone
        yield Segment("unknown", created, until)
        return
    last = max(starts, key=lambda start: start.end("container") or until, default=None)
    bound, begun = (last.end("scheduling"), last.end("container")) if last else (None, None)
    runs, at = "importing" if begins else "running", created
    for phase, end in (("queued", bound or begun), ("pulling", begun), (runs, until)):
        stop = until if end is None else min(max(end, at), until)
        yield Segment(phase, at, stop)
        at = stop


def _segments(session: Session, spans: Iterable[Span]) -> Iterator[Segment]:
    joined = session.joined or session.begin
    for span in spans:
        if span.use is Use.STARTING and span.begin == session.begin:
            for begin, end, imports in cut(span.begin, span.end, [(span.begin, joined)]):
                yield Segment("importing" if imports else "first step", begin, end)
        else:
            phase = {Use.STARTING: "restart", Use.IDLE: "stop"}.get(span.use, str(span.use))
            yield Segment(phase, span.begin, span.end, span.waits)


def _joined(segments: Iterable[Segment], pauses: list[tuple[float, float]]) -> list[Segment]:
    """The segments, alike ones as one, with the suspension in them; none of no length."""
    joined: list[Segment] = []
    for segment in segments:
        for begin, end, is_paused in cut(segment.begin, segment.end, pauses):
            phase, waited = segment.phase, segment.waits * (end - begin)
            if is_paused:
                phase, waited = "suspended", 0.0
            first = begin
            # The clock of a node may have been set back.
            if joined and joined[-1].phase == phase and joined[-1].end <= begin:
                _, first, last, waits = joined.pop()
                waited += waits * (last - first)
            joined.append(Segment(phase, first, end, waited / (end - first)))
    return joined


def _marks(session: Session) -> list[Mark]:
    marks = []
    for at, event in session.marks:
        if event.kind == EventKind.RESTARTING:
            reason = event.data.get("reason")  # of anybody's script: of any shape
            message = reason.get("message") if isinstance(reason, dict) else reason
            marks.append(Mark("fault", at, text(message)[:_LONGEST]))
        elif key := _TEXTS.get(event.kind):
            name = text(event.data.get(key)).rpartition("/")[2]
            marks.append(Mark(event.kind, at, name[:_LONGEST]))
    return marks[-_MOST_MARKS:]


def _faults(snapshot: Snapshot) -> Iterator[Mark]:
    """The last containers that failed by themselves."""
    for pod in map(Pod, snapshot.pods):
        for ended in (pod.terminated_before, pod.terminated):
            at, code = moment(ended.get("finishedAt")), ended.get("exitCode", 0)
            # Those of the last two end because another one failed, or as they were asked to.
            if at and code not in {0, ExitCode.PEER_LOST, ExitCode.STOPPED}:
                reason = f"{ended.get('reason') or 'Error'}, exit code {code}"
                yield Mark("fault", at.timestamp(), f"{snapshot.job.replica_of(pod.raw)}: {reason}")

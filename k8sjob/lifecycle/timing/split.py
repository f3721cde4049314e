"""The time from a submission to the first training step, split where it is told. Pure.

A group begins when its last replica has come, so the split follows the one whose container was
started last, and rank 0 from where the processes have met. What is not told is never guessed: its
phase is joined with the next one that has an end.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from k8sjob.backends.api import LOCAL, JobRef
from k8sjob.lifecycle.status import job_status
from k8sjob.lifecycle.timing.moments import (
    SLACK,
    Heard,
    Moment,
    Start,
    resumed,
    starts,
    submitted,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from k8sjob.backends.api import Json, Snapshot

__all__ = ["Phase", "Row", "Timing", "timing"]

_WORTH_TELLING: Final = 0.5


@dataclass(frozen=True, slots=True)
class Phase:
    """A part of the time.

    Attributes:
        phase: suspended, pod, scheduling, setup, init, image, container, runtime, import, meeting,
            step; several joined by "+" where only the end of the last one is told.
        seconds: how long it took.
        at: seconds from the submission to its end.
        exact: else `seconds` may be wrong by one, since Kubernetes keeps whole seconds.
        replica: of which one.
        detail: more about it; may be empty.
    """

    phase: str
    seconds: float
    at: float
    exact: bool
    replica: str
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Row:
    """One replica on its way; each moment in seconds after the submission, None: not known.

    Attributes:
        name: "worker-2".
        node: the machine; may be empty.
        pod: its Pod was made.
        scheduled: that was given to a node.
        init: its init containers had ended.
        image: its node had the image.
        container: its container was started.
        first_line: that wrote its first line.
        imported: rank 0 had imported what it needs.
        met: all processes had met.
    """

    name: str
    node: str
    pod: float | None
    scheduled: float | None
    init: float | None
    image: float | None
    container: float | None
    first_line: float | None
    imported: float | None
    met: float | None


@dataclass(frozen=True, slots=True)
class Timing:
    """How a job came to its first training step.

    Attributes:
        ref: the job.
        seconds: from its submission to its first step; None: there is none that is known of.
        phases: what took them, in order, as far as it has come.
        replicas: those that have, or had, a Pod.
        notes: what is to be known about it.
        missing: what is not known, and why.
    """

    ref: JobRef
    seconds: float | None
    phases: tuple[Phase, ...]
    replicas: tuple[Row, ...]
    notes: tuple[str, ...]
    missing: tuple[str, ...]

    def as_dict(self) -> dict[str, Any]:
        """The same as JSON; docs/reference/json.md says what each field means."""
        return {
            "name": self.ref.name,
            "namespace": self.ref.namespace,
            "seconds": _rounded(self.seconds),
            "phases": [_rounded(asdict(phase)) for phase in self.phases],
            "replicas": [_rounded(asdict(row)) for row in self.replicas],
            "notes": list(self.notes),
            "missing": list(self.missing),
        }


class _Mark(NamedTuple):
    """The end of a phase, where it is known."""

    phase: str
    end: Moment | None
    replica: str
    detail: str = ""


def timing(snapshot: Snapshot, heard: Mapping[str, Heard]) -> Timing:
    """Split the time from the submission to the first step.

    Args:
        snapshot: the job; its Events may be gone.
        heard: what the replicas' output tells, by name, see `hear`.
    """
    ref, begin = JobRef.of(snapshot.job), submitted(snapshot.job)
    speaker = _speaker(heard)
    told = heard.get(speaker, Heard())
    found = starts(snapshot, told.step or told.met)
    last = _last(found, speaker)
    if begin is None or last is None:
        return Timing(ref, None, (), (), (), ("no pod of it is there, or told of any more",))
    marks = [
        *_of_objects(snapshot.job, last),
        *_of_output(last.replica, heard.get(last.replica, Heard()), speaker, told),
    ]
    if ref.namespace == LOCAL:  # what no machine of one's own has is not missing
        marks = [m for m in marks if m.end or m.phase not in {"scheduling", "setup", "image"}]
    phases, behind = _phases(marks, begin)
    return Timing(
        ref,
        # Where a replica came last and the first step was before it, that is the end all the same.
        None if told.step is None else phases[-1].at,
        phases,
        tuple(_row(start, heard.get(start.replica, Heard()), begin) for start in found),
        (*_notes(last, heard, speaker, told), *_clocks(behind)),
        tuple(_missing(snapshot, last, heard, speaker, told)),
    )


def _speaker(heard: Mapping[str, Heard]) -> str:
    """The replica of rank 0, as its output shows; else the first one that was heard at all."""
    ranked = sorted(heard, key=lambda name: (heard[name].step is None, heard[name].met is None))
    return next(iter(ranked), "")


def _last(found: Sequence[Start], speaker: str) -> Start | None:
    """The replica that all others had to wait for."""

    def order(start: Start) -> tuple[bool, float, bool]:
        begun = start.started
        return begun is None, begun.time if begun else 0.0, start.replica == speaker

    return max(found, key=order, default=None)


def _of_objects(job: Json, last: Start) -> Iterator[_Mark]:
    let_go = resumed(job)
    if let_go and (last.made is None or last.made.time + SLACK >= let_go.time):
        yield _Mark("suspended", let_go, "")
    yield _Mark("pod", last.made, last.replica)
    yield _Mark("scheduling", last.scheduled, last.replica, last.node and f"to {last.node}")
    first = last.inits[0].began if last.inits else last.pulling or last.pulled
    yield _Mark("setup", first, last.replica, "network, volumes")
    for init in last.inits:
        yield _Mark("init", init.ended, last.replica, init.name)
    pulled = "" if last.pull is None else f"pulled in {last.pull:.1f} s"
    there = "" if last.pulling or not last.pulled else "was on the node"
    yield _Mark("image", last.pulled, last.replica, there or pulled)
    yield _Mark("container", last.started, last.replica)


def _of_output(last: str, own: Heard, speaker: str, told: Heard) -> Iterator[_Mark]:
    yield _Mark("runtime", _exact(own.first_line), last)
    yield _Mark("import", _exact(own.imported if last == speaker else None), last)
    yield _Mark("meeting", _exact(told.met), speaker)
    yield _Mark("step", _exact(told.step), speaker)


def _phases(marks: Sequence[_Mark], begin: Moment) -> tuple[tuple[Phase, ...], float]:
    """The phases between the marks, and by how many seconds clocks seem to differ."""
    phases: list[Phase] = []
    joined: list[str] = []
    before, behind = begin, 0.0
    for mark in marks:
        joined.append(mark.phase)
        if mark.end is None:
            continue
        behind = max(behind, before.time - mark.end.time - (not mark.end.exact) * SLACK)
        end = max(before, mark.end)
        phases.append(
            Phase(
                "+".join(dict.fromkeys(joined)),
                end.time - before.time,
                end.time - begin.time,
                before.exact and end.exact,
                mark.replica,
                mark.detail,
            )
        )
        before, joined = end, []
    return tuple(phases), behind


def _row(start: Start, own: Heard, begin: Moment) -> Row:
    def after(moment: Moment | None) -> float | None:
        return None if moment is None else max(moment.time - begin.time, 0.0)

    return Row(
        name=start.replica,
        node=start.node,
        pod=after(start.made),
        scheduled=after(start.scheduled),
        init=after(start.inits[-1].ended) if start.inits else None,
        image=after(start.pulled),
        container=after(start.started),
        first_line=after(_exact(own.first_line)),
        imported=after(_exact(own.imported)),
        met=after(_exact(own.met)),
    )


def _notes(last: Start, heard: Mapping[str, Heard], speaker: str, told: Heard) -> Iterator[str]:
    if told.met is not None and told.imported is not None and told.began is not None:
        waited = told.met - told.imported
        if last.replica != speaker and waited >= _WORTH_TELLING:
            yield (
                f"{speaker} imported for {told.imported - told.began:.1f} s and then waited"
                f" {waited:.1f} s for the others; {last.replica} was started last"
            )
    if last.again:
        yield f"this is Pod number {last.again + 1} of {last.replica}"
    for name in dict.fromkeys([speaker, last.replica]):
        if name in heard and heard[name].attempt:
            yield f"this is start number {heard[name].attempt + 1} of {name}'s container"


def _clocks(behind: float) -> Iterator[str]:
    if behind > _WORTH_TELLING:
        yield f"the clocks of the cluster and of its nodes seem to differ by {behind:.1f} s or more"


def _missing(
    snapshot: Snapshot, last: Start, heard: Mapping[str, Heard], speaker: str, told: Heard
) -> Iterator[str]:
    over = job_status(snapshot).state.finished
    if last.started is None and not last.gone:
        yield f"{last.replica} has not been started yet; k8sjob why says what it waits for"
    elif JobRef.of(snapshot.job).namespace != LOCAL and last.pulled is None:
        yield f"when {last.replica}'s image was there: a cluster keeps Events for about an hour"
    if last.started and last.replica not in heard:
        kept = "is gone with its Pod" if last.gone else "has nothing, or cannot be read"
        yield f"what {last.replica} did then: its output {kept}"
    if speaker and told.met is None and (over or told.step is None):
        yield (
            f"when the processes met: the output of {speaker} does not tell it"
            f"{'' if over else ' yet'}; a script with runtime.session() does"
        )
    elif told.met is not None and told.step is None:
        yield (
            f"the first step: the output of {speaker} tells of none{'' if over else ' yet'};"
            " run.step(...) of a session does"
        )


def _exact(time: float | None) -> Moment | None:
    return None if time is None else Moment(time)


def _rounded(value: Any) -> Any:
    """Milliseconds are enough."""
    if isinstance(value, dict):
        return {key: _rounded(part) for key, part in value.items()}
    return round(value, 3) if isinstance(value, float) else value

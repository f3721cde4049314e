"""One job on the page, part by part; what differs between two jobs; what can be done to one."""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from heapq import nlargest
from itertools import count, islice
from typing import TYPE_CHECKING, Any, Final

from k8sjob.backends.api import LOCAL
from k8sjob.backends.local import LocalBackend
from k8sjob.backends.local.outputs import listed, written_files
from k8sjob.backends.record import RecordBackend
from k8sjob.contract import Event, EventKind
from k8sjob.errors import BackendError, K8sJobError
from k8sjob.jobs.plan import plan_job, plan_run
from k8sjob.jobs.rerun import spec_of
from k8sjob.jobs.result import read_reached
from k8sjob.jobs.submit import submit_plan
from k8sjob.jobs.suspend import suspend
from k8sjob.observe.attempts import read_attempts
from k8sjob.observe.diagnose import as_data
from k8sjob.observe.findings import findings, keep_record_of
from k8sjob.observe.logs import logs, select
from k8sjob.observe.status import processes
from k8sjob.observe.timing import read_timing
from k8sjob.observe.usage import read_usage
from k8sjob.rendering.diff import lines_between
from k8sjob.sanitize import integer, safe_text
from k8sjob.spec import JobSpec
from k8sjob.targets.jobs import has_ended, replica_names
from k8sjob.ui.jobs import CLUSTER, clock, key_of
from k8sjob.view.json_output import job_document, provenance
from k8sjob.view.lines import phrase, unstyled
from k8sjob.view.summary import JobSummary
from k8sjob.yamldoc import dump

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator, Mapping, Sequence

    from k8sjob.backends.api import LogLine, Snapshot
    from k8sjob.backends.cluster.backend import ClusterBackend
    from k8sjob.targets.api import Job
    from k8sjob.ui.jobs import JobEntry

MOST_POINTS: Final = 2000
"""Points of a curve that are sent: more than a screen has columns for."""
MOST_LINES: Final = 5000
"""Lines of the output that are sent at once."""
_PIECE: Final = 500

_MOST_METRICS: Final = 13
"""The loss, and names that a script logs, whose last values are sent."""
_LISTED: Final = frozenset(
    {EventKind.WARNING, EventKind.CHECKPOINT, EventKind.RESUMED, EventKind.STOPPING}
    | {EventKind.JOB, EventKind.STARTED}
)
"""Events that the page lists."""


class JobNews:
    """A job by its events so far, for one reader, who is sent what changes."""

    def __init__(self) -> None:
        self._summary = JobSummary()
        self._sent_curves: dict[str, list[tuple[float, float]]] = {}

    def after(self, events: Sequence[Event]) -> dict[str, Any]:
        """What is new after some events.

        It has `job` and `training` as they are now, `replicas` (those that changed, by name),
        `points` (see _points), `lines` of output, and `events` as sentences.
        """
        # `names` is a dict, as it keeps the order of the replicas.
        summary, lines, listed, names = self._summary, [], [], dict[str, None]()
        for event in events:
            summary.add(event)
            if event.kind == EventKind.LOG:
                lines.append({"replica": event.replica, **event.data})
            elif event.kind == EventKind.REPLICA:
                names[event.replica] = None
            elif event.kind in _LISTED:
                listed.append(self._sentence(event))
        return {
            "job": {
                name: getattr(summary, name)
                for name in ("state", "message", "created", "started", "finished", "since")
            },
            "training": self._training(),
            "replicas": {
                name: replica._asdict() for name in names if (replica := summary.replicas.get(name))
            },
            "points": self._points(),
            "lines": lines,
            "events": listed,
        }

    def _sentence(self, event: Event) -> dict[str, Any]:
        # The time of a JOB event is that at which it was read.
        is_job = event.kind == EventKind.JOB
        changed = (self._summary.finished or self._summary.since) if is_job else None
        written = event.kind == EventKind.CHECKPOINT  # its phrase has the name alone
        words = f"checkpoint {self._summary.written}" if written else unstyled(phrase(event) or [])
        time = event.time if changed is None else changed
        return {"kind": event.kind, "time": time, "replica": event.replica, "text": words}

    def _training(self) -> dict[str, Any]:
        summary, progress, hang = self._summary, self._summary.progress, self._summary.hang
        return {
            **progress._asdict(),
            "fraction": progress.fraction,
            "waited": progress.waited,
            "starting": summary.starting,
            "counts_epochs": summary.counts_epochs,
            "metrics": dict(islice(summary.last_values.items(), _MOST_METRICS)),
            "group": summary.group,
            "restarts": summary.restarts,
            "hang": hang and {"rank": integer(hang.data.get("rank"))},
        }

    def _points(self) -> dict[str, list[Any]]:
        """By name how many points of its curve remain, the x and the y of those that follow.

        That of `time`, which no number of a script has, says when its points were written.
        """
        points = {}
        for name, curve in [("time", self._summary.times), *self._summary.curves.items()]:
            sent = self._sent_curves.get(name, [])
            remain = min(len(sent), len(curve))
            # A restart replaces the end of a curve, and a long one is thinned out.
            while remain and sent[remain - 1] is not curve[remain - 1]:
                remain -= 1
            if remain < len(curve):
                points[name] = [remain, *zip(*curve[remain:], strict=True)]
                self._sent_curves[name] = curve.copy()
        return points


def plain(value: Any) -> Any:
    """JSON for a browser: text without control characters, null for numbers that JSON lacks."""
    match value:
        case str():
            return safe_text(value)
        case float():
            return value if math.isfinite(value) else None
        case dict():
            return {safe_text(str(key)): plain(part) for key, part in value.items()}
        case list() | tuple():
            return [plain(part) for part in value]
        case _:
            return value


def status(entry: JobEntry, snapshot: Snapshot) -> dict[str, Any]:
    """The job as `status -o json` has it, with the names of all its replicas.

    `processes` are those of the first and of each other replica, null where Pods have no ranks.
    `written` are the files of a job on this machine, which its deletion removes, a line each.
    """
    return {
        **job_document(snapshot),
        "names": list(replica_names(snapshot.job)),
        "processes": processes(snapshot.job) if snapshot.job.has_ranks else None,
        "can": can(entry),
        "written": listed(written_files(entry.backend.folder(entry.ref)))
        if isinstance(entry.backend, LocalBackend)
        else "",
        **clock(entry.backend, snapshot),
    }


def run(entry: JobEntry, snapshot: Snapshot) -> dict[str, Any]:
    """The command of the job's first replica, its job.yaml and commit; empty: not known."""
    job, backend, spec = snapshot.job, entry.backend, ""
    commit = origin.commit if (origin := provenance(job)) else ""
    main = next((role.main for role in job.replicas), {})
    with suppress(K8sJobError):
        if isinstance(backend, LocalBackend | RecordBackend) and entry.ref.namespace == LOCAL:
            launched = backend.launched(entry.ref)
            spec, commit = launched.spec, launched.commit
        else:
            spec = spec_of(job).to_yaml()
    command = shlex.join([*(main.get("command") or ()), *(main.get("args") or ())])
    return {"command": command, "commit": commit, "yaml": spec}


def can(entry: JobEntry) -> list[str]:
    """What can be done to the job; nothing to that of a record."""
    return [] if entry.backend.recorded else list(ACTIONS)


def history(entry: JobEntry, snapshot: Snapshot) -> dict[str, Any]:
    """The curves of the training by name, as [[epochs], [values]], and its process group.

    The curve `time` is of when they were written, in seconds since the epoch.
    """
    reached = read_reached(entry.backend, snapshot)
    curves = {
        name: list(zip(*points[:: -(-len(points) // MOST_POINTS)], strict=True))
        for name, points in {**reached.curves, "time": reached.times}.items()
        if points
    }
    return {
        "curves": curves,
        "steps": reached.progress.steps if reached.counts_epochs else 0,
        "counts_epochs": reached.counts_epochs,
        "group": reached.last_group,
        "metrics": reached.metrics,
    }


def timing(entry: JobEntry, snapshot: Snapshot) -> dict[str, Any]:
    """As `why --timing -o json` has it, with the words for the phases."""
    start = read_timing(entry.backend, snapshot)
    return {**start.as_dict(), "ends": [phase.ends for phase in start.phases]}


PARTS: Final[dict[str, Callable[[JobEntry, Snapshot], Any]]] = {
    "status": status,
    "attempts": lambda entry, snapshot: [
        attempt.as_dict() for attempt in read_attempts(entry.backend, snapshot)
    ],
    "run": run,
    "history": history,
    "why": lambda entry, snapshot: [
        as_data(finding) for finding in findings(entry.backend, snapshot)
    ],
    "timing": timing,
    "usage": lambda entry, snapshot: read_usage(entry.backend, snapshot).as_dict(),
    "manifest": lambda _entry, snapshot: {"text": dump(snapshot.job.raw)},
}
"""What the page asks of a job: the part's name, and the function that reads it."""


def part(entry: JobEntry, name: str) -> Any:
    """A part of a job as it is now.

    Raises:
        KeyError: there is no such part.
        BackendError: the job is gone, or cannot be read.
    """
    reader = PARTS[name]
    return plain(reader(entry, entry.backend.snapshot(entry.ref)))


def output(entry: JobEntry, query: Mapping[str, str]) -> dict[str, Any]:
    """The last lines in which `search` occurs, of one `replica` or of all, without runtime events.

    It has `lines` by time, MOST_LINES at most, their `total`, and by replica the time of the last
    line that was looked at (`ends`).

    Raises:
        BackendError: there is no such replica, or its output cannot be read.
    """
    ends: dict[str, str] = {}
    total = count()
    lines = _fitting_lines(entry, query, ends)
    last = nlargest(MOST_LINES, ((line.timestamp, next(total), line) for line in lines))
    return {
        "lines": [
            {
                "replica": line.replica,
                "text": safe_text(line.text),
                "timestamp": line.timestamp,
                "gap": line.gap,
            }
            for _, _, line in reversed(last)
        ],
        "total": next(total),
        "ends": ends,
    }


def output_text(entry: JobEntry, query: Mapping[str, str]) -> Generator[str, None, None]:
    """All of these lines, as the job wrote them, in pieces of some hundred lines."""
    name = "" if query.get("replica") else "{} | "
    try:
        lines = _fitting_lines(entry, query, {})
        while piece := list(islice(lines, _PIECE)):
            yield "".join(f"{name.format(line.replica)}{line.text}\n" for line in piece)
    except K8sJobError as error:
        yield f"k8sjob: the output ends here: {error}\n"


def _fitting_lines(
    entry: JobEntry, query: Mapping[str, str], ends: dict[str, str]
) -> Iterator[LogLine]:
    replica, words = query.get("replica"), query.get("search", "").lower()

    def fits(line: LogLine) -> bool:
        ends[line.replica] = line.timestamp
        return words in safe_text(line.text).lower() and not Event.decode(line.text)

    chosen = select(entry.snapshot.job, [replica] if replica else [])
    return logs(entry.backend, entry.ref, chosen, fits=fits)


def compared(entries: Sequence[JobEntry]) -> dict[str, Any]:
    """What differs between jobs: `manifests`, the lines between the first and each of the others.

    And `settings`, the fields of each one's spec as texts, none of what no spec can express.

    Raises:
        BackendError: a job is gone, or cannot be read.
    """
    jobs = [entry.backend.snapshot(entry.ref).job for entry in entries]
    manifests = [list(lines_between(jobs[0], job)) for job in jobs[1:]]
    settings: list[dict[str, str]] = [plain(_settings(job)) for job in jobs]
    return {"manifests": manifests, "settings": settings}


def _settings(job: Job) -> dict[str, str]:
    with suppress(K8sJobError):
        return dict(_texts(spec_of(job).model_dump(mode="json", exclude_defaults=True)))
    return {}


def _texts(fields: dict[str, Any], above: str = "") -> Iterator[tuple[str, str]]:
    """The fields as `resources.gpu: 2`; a list is one line, as a shell would have it."""
    for name, value in fields.items():
        if isinstance(value, dict):
            yield from _texts(value, f"{above}{name}.")
        else:
            parts = value if isinstance(value, list) else [value]
            plain_words = all(isinstance(part, str) for part in parts)
            yield f"{above}{name}", shlex.join(parts) if plain_words else json.dumps(value)


Connect = Callable[[str], "ClusterBackend"]
"""The cluster in one of its namespaces."""


def _delete(entry: JobEntry, _connect: Connect) -> str:
    problem = ""
    if has_ended(entry.backend.snapshot(entry.ref).job):
        problem = keep_record_of(entry.backend, entry.ref)
    entry.backend.delete(entry.ref)
    remains = "its checkpoints remain" if entry.ref.namespace == LOCAL else problem
    return "; ".join(filter(None, (f"{entry.ref} deleted", remains)))


def _suspend(entry: JobEntry, _connect: Connect, *, value: bool) -> str:
    return "; ".join(filter(None, suspend(entry.backend, entry.ref, value=value)))


def _rerun(entry: JobEntry, connect: Connect) -> tuple[str, str]:
    if isinstance(entry.backend, LocalBackend):
        launched = entry.backend.launched(entry.ref)
        plan = plan_run(JobSpec.from_yaml(launched.spec), launched.folder)
        ref = LocalBackend(detached=True).create(plan)
        return f"{ref} started", key_of(LOCAL, ref)
    plan = plan_job(spec_of(entry.backend.snapshot(entry.ref).job))
    submission = submit_plan(plan, connect(entry.ref.namespace), replace=True)
    return f"{submission.ref} {submission.outcome}", key_of(CLUSTER, submission.ref)


ACTIONS: Final[dict[str, Callable[[JobEntry, Connect], str | tuple[str, str]]]] = {
    "suspend": partial(_suspend, value=True),
    "resume": partial(_suspend, value=False),
    "rerun": _rerun,
    "delete": _delete,
}
"""What the page can do to a job: the action's name, and the function that does it; see act()."""


def act(entry: JobEntry, action: str, connect: Connect) -> tuple[str, str]:
    """Change a job; what was done, as a sentence, and the key of the job that it made, if any.

    Raises:
        KeyError: there is no such action.
        K8sJobError: it could not be done.
    """
    change = ACTIONS[action]
    if action not in can(entry):
        raise BackendError(f"{entry.ref} is the job of a record, which cannot be changed")
    result = change(entry, connect)
    done, key = (result, "") if isinstance(result, str) else result
    return safe_text(done), key

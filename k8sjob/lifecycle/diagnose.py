"""Why a job stands where it stands: objects and last lines of output in, findings out. Pure.

Each cause is a small function over a Case, and `_CAUSES` is their order: what explains the others
stands first. How a container ended is told apart by `_ENDS`, the first that knows it counts.
"""

from __future__ import annotations

import re
import signal
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Final

from k8sjob.contract import Event, ExitCode
from k8sjob.lifecycle.evidence import End, ends, first_end
from k8sjob.lifecycle.status import JobState, JobStatus, job_status

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from k8sjob.backends.api import Snapshot

__all__ = ["Finding", "diagnose"]

_MISSING_MODULE: Final = re.compile(r"(?:ModuleNotFoundError: )?No module named '?([\w.]+)'?")
_GPU_MEMORY: Final = re.compile(r"CUDA out of memory|OutOfMemoryError", re.IGNORECASE)
_ERROR_LINE: Final = re.compile(r"^[\w.]*(?:Error|Exception|Interrupt|Exit)\b.*")
_WORDLESS: Final = re.compile(r"k8sjob: (rank \d+: )?Exit: it gave no reason")
_ADDRESS: Final = re.compile(r"Address already in use|EADDRINUSE")
_GONE: Final = "PyTorchJobSupervisorGone"
_SUPERVISOR_GONE: Final = frozenset({_GONE, "PyTorchJobSupervisorFailed"})
_AGAIN: Final = "run the job again; with `checkpoint` in its spec it goes on from the newest one"


@dataclass(frozen=True, slots=True)
class Finding:
    """One cause and what to do about it.

    Attributes:
        cause: a stable short name, as "crash" or "suspended"; see docs/reference/states.md.
        message: what was seen, in one paragraph.
        next_step: what to do now.
        replica: "worker-2", or empty where it concerns the whole job.
    """

    cause: str
    message: str
    next_step: str
    replica: str = ""

    def as_dict(self) -> dict[str, str]:
        """The finding as the data of a FINDING event."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class _Case:
    """What the causes look at. `end` is the failure that began the others, if any container failed.

    `tail` gives the last lines of a replica, runtime events and the
    agent's word that there was none left out.
    """

    snapshot: Snapshot
    status: JobStatus
    logs: Mapping[str, Sequence[str]]
    end: End | None

    @property
    def name(self) -> str:
        return self.status.ref.name

    def tail(self, replica: str) -> list[str]:
        lines = (line.rstrip() for line in self.logs.get(replica, ()))
        said = (line for line in lines if line and not _WORDLESS.match(line))
        return [line for line in said if Event.decode(line) is None]


def diagnose(snapshot: Snapshot, logs: Mapping[str, Sequence[str]]) -> list[Finding]:
    """The findings about a job, the first cause first; none where nothing is wrong.

    Args:
        snapshot: the job and its objects.
        logs: the last lines of each replica's output, by its name; replicas may be missing.
    """
    case = _Case(snapshot, job_status(snapshot), logs, first_end(ends(snapshot)))
    return [finding for cause in _CAUSES for finding in cause(case)]


# --- the job


def _supervisor_gone(case: _Case) -> Iterator[Finding]:
    if case.status.reason in _SUPERVISOR_GONE:
        yield Finding(
            "supervisor-gone",
            case.status.message,
            _AGAIN if case.status.reason == _GONE else f"remove the cause, then {_AGAIN}",
        )


def _stopped(case: _Case) -> Iterator[Finding]:
    if case.status.state is JobState.STOPPED:
        yield Finding(
            "stopped",
            case.status.message,
            _AGAIN,
        )


def _suspended(case: _Case) -> Iterator[Finding]:
    if case.status.state is JobState.SUSPENDED:
        yield Finding(
            "suspended",
            "the job is suspended: its replicas are stopped, its checkpoints are kept",
            f"k8sjob resume {case.name}",
        )


def _deadline(case: _Case) -> Iterator[Finding]:
    if case.status.state is JobState.FAILED and "longer than specified dead" in case.status.message:
        policy = case.snapshot.job.get("spec", {}).get("runPolicy", {})
        yield Finding(
            "deadline",
            f"the job was ended after its {policy.get('activeDeadlineSeconds')} s",
            f"raise policy.active_deadline, or {_AGAIN}",
        )


def _restart_limit(case: _Case) -> Iterator[Finding]:
    message = case.status.message
    if case.status.state is JobState.FAILED and (
        "backoff limit" in message or "max_restarts is" in message
    ):
        yield Finding(
            "restart-limit",
            message,
            "remove the cause of the restarts; policy.max_restarts allows more of them",
        )


def _container_ended(case: _Case) -> Iterator[Finding]:
    if case.status.reason in _SUPERVISOR_GONE:
        return  # it took its containers along
    if case.end and case.status.state not in (JobState.SUCCEEDED, JobState.STOPPED):
        yield next(finding for kind in _ENDS if (finding := kind(case, case.end)))


# --- how a container ended


def _hung(case: _Case, end: End) -> Finding | None:
    if end.exit_code != ExitCode.HUNG:
        return None
    who = end.reason.culprits if end.reason else ()
    where = f" --rank {who[0]}" if who else ""
    return Finding(
        "hung",
        f"{_ranks(who) or end.told} hung{_own_words(end)}",
        f"see the Python stacks in the output: k8sjob logs {case.name}{where}; if a step may take"
        " so long, raise run.hang_timeout",
        end.replica,
    )


def _not_met(case: _Case, end: End) -> Finding | None:
    if not (end.reason and end.reason.culprits and end.exit_code == ExitCode.PEER_LOST):
        return None
    who = end.reason.culprits
    return Finding(
        "rendezvous",
        f"{_ranks(who)} did not come{_own_words(end)}",
        f"see why: k8sjob status {case.name}, k8sjob logs {case.name} --rank {who[0]}; if it only"
        " needs longer, raise run.rendezvous_timeout",
        end.replica,
    )


def _misconfigured(case: _Case, end: End) -> Finding | None:
    if end.exit_code != ExitCode.CONFIG or not end.reason:
        return None
    return Finding(
        "configuration",
        f"{end.told}: {end.reason.message}",
        f"correct the job's settings; the same start would fail again ({case.name})",
        end.replica,
    )


def _cannot_start(case: _Case, end: End) -> Finding | None:
    if end.why not in ("StartError", "ContainerCannotRun") and end.exit_code != 127:
        return None
    return Finding(
        "start",
        f"{end.told}: its command cannot be started{_said(end, case)}",
        "correct run.command, or install the program in the image",
        end.replica,
    )


def _missing_module(case: _Case, end: End) -> Finding | None:
    texts = [end.message, *reversed(case.tail(end.replica)[-40:])]
    found = next((m for text in texts if (m := _MISSING_MODULE.search(text))), None)
    if found is None:
        return None
    name = found.group(1)
    package = name.partition(".")[0]
    return Finding(
        "missing-module",
        f"{end.told}: no module named {name!r}",
        f"if it is a package, add {package!r} (or the package that has it) to image.pip or the"
        " requirements; if it is a file of yours, see that .dockerignore does not leave it out",
        end.replica,
    )


def _out_of_gpu_memory(case: _Case, end: End) -> Finding | None:
    if not _GPU_MEMORY.search("\n".join([end.message, *case.tail(end.replica)[-40:]])):
        return None
    return Finding(
        "gpu-memory",
        f"{end.told}: out of GPU memory{_said(end, case)}",
        "make the batch smaller and raise strategy.accumulate by as much: the result is the same",
        end.replica,
    )


def _out_of_memory(_case: _Case, end: End) -> Finding | None:
    if end.why != "OOMKilled":
        return None
    return Finding(
        "memory",
        f"{end.told}: killed by the kernel, which was out of memory",
        "raise resources.memory, or use less: fewer data loader workers, smaller batches",
        end.replica,
    )


def _address_in_use(case: _Case, end: End) -> Finding | None:
    if not any(_ADDRESS.search(line) for line in case.tail(end.replica)[-40:]):
        return None
    return Finding(
        "address-in-use",
        f"{end.told}: a port that it wanted to listen on is taken{_said(end, case)}",
        "take the port from MASTER_PORT, or 0 for a free one, instead of a fixed number",
        end.replica,
    )


def _killed(case: _Case, end: End) -> Finding | None:
    number = end.exit_code - 128
    if number <= 0 or end.exit_code in (ExitCode.PEER_LOST, ExitCode.HUNG):
        return None
    name = next((s.name for s in signal.Signals if s == number), f"signal {number}")
    step = {
        "SIGKILL": "see what killed it: often memory (raise resources.memory), or an operator's"
        " hand",
        "SIGBUS": "mostly /dev/shm is full: raise resources.shm, or use fewer data loader workers",
        "SIGTERM": "something asked it to end; if it was the cluster, the job goes on by itself",
    }.get(name, f"see its last lines: k8sjob logs {case.name} -r {end.replica}")
    said = "" if end.reason and end.reason.type == "Signal" else _said(end, case)
    return Finding("killed", f"{end.told}: ended by {name}{said}", step, end.replica)


def _crashed(case: _Case, end: End) -> Finding | None:
    return Finding(
        "crash",
        f"{end.told}: exit code {end.exit_code}{_said(end, case)}",
        f"correct the script; its output: k8sjob logs {case.name} -r {end.replica}",
        end.replica,
    )


def _said(end: End, case: _Case | None = None) -> str:
    """The error in its own words, or the last line of its output that looks like one."""
    if end.reason:
        kind = f"{end.reason.type}: " if end.reason.type not in ("", "Exit", "Signal") else ""
        where = f" ({end.reason.where})" if end.reason.where else ""
        if end.reason.type != "Exit":
            return f": {kind}{end.reason.message}{where}"
    lines = case.tail(end.replica) if case else []
    lines = end.message.splitlines() if not end.reason and end.message else lines
    likely = [line for line in lines if _ERROR_LINE.match(line)] or lines
    return f": {likely[-1]}" if likely else ""


def _own_words(end: End) -> str:
    return f": {end.reason.message}" if end.reason else ""


def _ranks(ranks: tuple[int, ...]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}" if ranks else ""


_ENDS: tuple[Callable[[_Case, End], Finding | None], ...] = (
    _hung,
    _not_met,
    _misconfigured,
    _out_of_memory,
    _cannot_start,
    _missing_module,
    _out_of_gpu_memory,
    _address_in_use,
    _killed,
    _crashed,
)

_CAUSES: tuple[Callable[[_Case], Iterator[Finding]], ...] = (
    _supervisor_gone,
    _stopped,
    _suspended,
    _deadline,
    _container_ended,
    _restart_limit,
)

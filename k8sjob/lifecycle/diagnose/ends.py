"""How the container ended that brought the others down: told apart by the first kind that fits."""

from __future__ import annotations

import re
import signal
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from k8sjob.contract import Event, ExitCode
from k8sjob.lifecycle.diagnose.collectives import (
    lost_a_peer,
    other_nccl_error,
    spoken_of,
    timed_out_ranks,
)
from k8sjob.lifecycle.diagnose.finding import Cause, Finding, Told

if TYPE_CHECKING:
    from collections.abc import Callable

    from k8sjob.lifecycle.diagnose.case import Case
    from k8sjob.lifecycle.evidence import End

__all__ = ["how_it_ended", "is_consequence"]

_MISSING_MODULE: Final = re.compile(r"(?:ModuleNotFoundError: )?No module named '?([\w.]+)'?")
_GPU_MEMORY: Final = re.compile(r"CUDA out of memory|OutOfMemoryError", re.IGNORECASE)
_PREFIX: Final = re.compile(r"^\[\w+\]:\s*")
"""torch's and torchrun's mark of the rank in front of a line."""
_ERROR_LINE: Final = re.compile(r"^(?:\[\w+\]:\s*)?[\w.]*(?:Error|Exception|Interrupt|Exit)\b.*")
_SUMMARY: Final = re.compile(r"^(?:\[\w+\]:\s*)?torch\.distributed\.elastic\S*ChildFailedError")
"""torchrun's last word: its own error, after that of the rank that failed."""
_WORDLESS: Final = re.compile(r"k8sjob: (rank \d+: )?Exit: it gave no reason")
_ADDRESS: Final = re.compile(r"Address already in use|EADDRINUSE")
_LAST: Final = 40
"""So many last lines are searched for what ended a container."""


def how_it_ended(case: Case, end: End) -> Finding:
    """What a container's bad end was."""
    return next(finding for kind in _ENDS if (finding := kind(case, end)))


def _tail(case: Case, replica: str) -> list[str]:
    """A replica's last lines, runtime events and the agent's word that there was none left out."""
    said = (line for line in case.tail(replica) if not _WORDLESS.match(line))
    return [line for line in said if Event.decode(line) is None]


def _words(case: Case, end: End) -> list[str]:
    """All that it said before it ended."""
    last = end.reason.message if end.reason else end.message
    return [*_tail(case, end.replica), *last.splitlines()]


def is_consequence(case: Case, end: End) -> bool:
    """Whether another end, or a request, brought this one about."""
    return end.consequence or lost_a_peer(_words(case, end))


def _hung(case: Case, end: End) -> Finding | None:
    if end.exit_code != ExitCode.HUNG:
        return None
    who = end.reason.culprits if end.reason else ()
    where = f" --rank {who[0]}" if who else ""
    waited = end.reason is not None and end.reason.type == "Hung"  # and so says runtime.watchdog
    limit = "the others may wait so long, raise run.collective_timeout"
    return Finding(
        Cause.HUNG,
        f"{_ranks(who) or end.told} hung{_own_words(end)}",
        f"see the Python stacks in the output: k8sjob logs {case.called}{where}; if "
        + (limit if waited else "a step may take so long, raise run.hang_timeout"),
        end.replica,
    )


def _not_met(case: Case, end: End) -> Finding | None:
    if not (end.reason and end.reason.culprits and end.exit_code == ExitCode.PEER_LOST):
        return None
    who = end.reason.culprits
    if left := _left_well(case, end):
        return Finding(
            Cause.RENDEZVOUS,
            f"{_ranks(who)} did not come: {left} had ended with exit code 0, and does not start"
            f" again{_own_words(end)}",
            "submit the job again: it goes on from its newest checkpoint, and is done at once where"
            " that was the last one",
            end.replica,
        )
    return Finding(
        Cause.RENDEZVOUS,
        f"{_ranks(who)} did not come{_own_words(end)}",
        f"see why: k8sjob status {case.called}, k8sjob logs {case.called} --rank {who[0]};"
        " if it only needs longer, raise run.rendezvous_timeout",
        end.replica,
    )


def _misconfigured(case: Case, end: End) -> Finding | None:
    if end.exit_code != ExitCode.CONFIG or not end.reason:
        return None
    return Finding(
        Cause.CONFIGURATION,
        f"{end.told}: {end.reason.message}",
        f"correct the job's settings; the same start would fail again ({case.called})",
        end.replica,
    )


def _cannot_start(case: Case, end: End) -> Finding | None:
    if end.why not in ("StartError", "ContainerCannotRun"):
        return None
    said = re.sub(
        r"^.*?unable to start container process: (?:error during container init: )?",
        "",
        " ".join(end.message.split()),
    )
    said = said.removesuffix(": unknown")
    if "nvidia-container-cli" in said:
        said = said[said.index("nvidia-container-cli") :]
        return _told(end, spoken_of([said]))
    if "OOM-killed" in said:
        return _out_of_memory(case, replace(end, why="OOMKilled"))
    if said.startswith(("mkdir ", "chdir ")):
        what, step = "its working directory is not there", "correct the container's workingDir"
    else:
        what, step = (
            "its command cannot be started",
            ("correct run.command, or install the program in the image"),
        )
    return Finding(Cause.START, f"{end.told}: {what}{f': {said}' * bool(said)}", step, end.replica)


def _not_found(case: Case, end: End) -> Finding | None:
    """Exit code 127 is a shell's word that there is no such program."""
    if end.exit_code != 127:
        return None
    return Finding(
        Cause.START,
        f"{end.told}: its command cannot be started{_said(end, case)}",
        "correct run.command, or install the program in the image",
        end.replica,
    )


def _missing_module(case: Case, end: End) -> Finding | None:
    texts = [end.message, *reversed(_tail(case, end.replica)[-_LAST:])]
    found = next((m for text in texts if (m := _MISSING_MODULE.search(text))), None)
    if found is None:
        return None
    name = found.group(1)
    package = name.partition(".")[0]
    return Finding(
        Cause.MISSING_MODULE,
        f"{end.told}: no module named {name!r}",
        f"if it is a package, add {package!r} (or the package that has it) to image.pip or the"
        " requirements; if it is a file of yours, see that .dockerignore does not leave it out",
        end.replica,
    )


def _out_of_gpu_memory(case: Case, end: End) -> Finding | None:
    if not _GPU_MEMORY.search("\n".join([end.message, *_tail(case, end.replica)[-_LAST:]])):
        return None
    return Finding(
        Cause.GPU_MEMORY,
        f"{end.told}: out of GPU memory{_said(end, case)}",
        "make the batch smaller and raise strategy.accumulate by as much: the result is the same",
        end.replica,
    )


def _out_of_memory(case: Case, end: End) -> Finding | None:
    if end.why != "OOMKilled":
        return None
    limits = (pod.limits().get("memory") for pod in case.pods if pod.replica == end.replica)
    limit = next((f": its limit is {limit}" for limit in limits if limit), "")
    return Finding(
        Cause.MEMORY,
        f"{end.told}: killed by the kernel, which was out of memory{limit}",
        "raise resources.memory, or use less: fewer data loader workers, smaller batches",
        end.replica,
    )


def _collective(case: Case, end: End) -> Finding | None:
    words = _words(case, end)
    return _told(end, spoken_of(words) or other_nccl_error(words), _absent(case))


def _told(end: End, told: Told | None, absent: str = "") -> Finding | None:
    if told is None:
        return None
    cause, what, step = told
    if cause is Cause.COLLECTIVE_TIMEOUT:
        what += absent
    return Finding(cause, f"{end.told}: {what}", step, end.replica)


def _absent(case: Case) -> str:
    """The ranks that did not wait: those are the ones to look at."""
    waited = timed_out_ranks(line for lines in case.logs.values() for line in lines)
    away = sorted(set(range(case.world_size)) - waited) if waited else []
    if not 0 < len(away) <= case.world_size // 2 or len(case.logs) < len(case.pods):
        return ""
    return f"; {_ranks(tuple(away))} did not wait for it"


def _lost_connection(case: Case, end: End) -> Finding | None:
    if not lost_a_peer(_words(case, end)):
        return None
    if left := _left_well(case, end):
        return Finding(
            Cause.CONNECTION,
            f"{end.told}: it waited for {left}, which had ended with exit code 0{_said(end, case)}",
            "let all ranks take the same number of steps, in the same order: run.batches and a"
            " DistributedSampler give each as many batches; torch's Join stands in for who is done",
            end.replica,
        )
    return Finding(
        Cause.CONNECTION,
        f"{end.told}: the connection to another rank broke off{_said(end, case)}",
        f"see whether another replica ended: k8sjob status {case.called}; if none did, see what"
        " stands between them: a NetworkPolicy, a sidecar, the nodes' network",
        end.replica,
    )


def _left_well(case: Case, end: End) -> str:
    """The replicas whose training was done while this one still waited for them."""
    return ", ".join(
        pod.replica
        for pod in case.pods
        if pod.replica != end.replica and pod.trainer and pod.trainer.ended.get("exitCode") == 0
    )


def _address_in_use(case: Case, end: End) -> Finding | None:
    if not any(_ADDRESS.search(line) for line in _tail(case, end.replica)[-_LAST:]):
        return None
    return Finding(
        Cause.ADDRESS_IN_USE,
        f"{end.told}: a port that it wanted to listen on is taken{_said(end, case)}",
        "take the port from MASTER_PORT, or 0 for a free one, instead of a fixed number",
        end.replica,
    )


def _killed(case: Case, end: End) -> Finding | None:
    number = end.exit_code - 128
    if number <= 0 or end.exit_code in (ExitCode.PEER_LOST, ExitCode.HUNG):
        return None
    name = next((s.name for s in signal.Signals if s == number), f"signal {number}")
    step = {
        "SIGKILL": "see what killed it: often memory (raise resources.memory), or an operator's"
        " hand",
        "SIGBUS": "mostly /dev/shm is full: raise resources.shm, or use fewer data loader workers",
        "SIGTERM": "something asked it to end; if it was the cluster, the job goes on by itself",
    }.get(name, f"see its last lines: k8sjob logs {case.called} -r {end.replica}")
    said = "" if end.reason and end.reason.type == "Signal" else _said(end, case)
    return Finding(Cause.KILLED, f"{end.told}: ended by {name}{said}", step, end.replica)


def _crashed(case: Case, end: End) -> Finding | None:
    return Finding(
        Cause.CRASH,
        f"{end.told}: exit code {end.exit_code}{_said(end, case)}",
        f"correct the script; its output: k8sjob logs {case.called} -r {end.replica}",
        end.replica,
    )


def _said(end: End, case: Case | None = None) -> str:
    """The error in its own words, or the last line of its output that looks like one."""
    if end.reason:
        kind = f"{end.reason.type}: " if end.reason.type not in ("", "Exit", "Signal") else ""
        where = f" ({end.reason.where})" if end.reason.where else ""
        if end.reason.type != "Exit":
            return f": {kind}{end.reason.message}{where}"
    lines = _tail(case, end.replica) if case else []
    lines = end.message.splitlines() if not end.reason and end.message else lines
    lines = (
        lines[: next((n for n, line in enumerate(lines) if _SUMMARY.match(line)), None)] or lines
    )
    likely = [line for line in lines if _ERROR_LINE.match(line)] or lines
    return f": {_PREFIX.sub('', likely[-1])}" if likely else ""


def _own_words(end: End) -> str:
    return f": {end.reason.message}" if end.reason else ""


def _ranks(ranks: tuple[int, ...]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}" if ranks else ""


_ENDS: tuple[Callable[[Case, End], Finding | None], ...] = (
    _hung,
    _not_met,
    _misconfigured,
    _out_of_memory,
    _cannot_start,
    _not_found,
    _missing_module,
    _out_of_gpu_memory,
    _collective,
    _address_in_use,
    _lost_connection,
    _killed,
    _crashed,
)

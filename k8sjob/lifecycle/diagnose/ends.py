"""How the container ended that brought the others down: told apart by the first kind that fits."""

from __future__ import annotations

import re
import signal
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from k8sjob.contract import Event, EventKind, ExitCode
from k8sjob.lifecycle.diagnose.account import Account, account_of
from k8sjob.lifecycle.diagnose.collectives import explained, timed_out_ranks
from k8sjob.lifecycle.diagnose.finding import SAME_STEPS, Cause, Finding, Told
from k8sjob.lifecycle.status import JobState

if TYPE_CHECKING:
    from collections.abc import Callable

    from k8sjob.lifecycle.diagnose.case import Case
    from k8sjob.lifecycle.evidence import End

__all__ = ["how_it_ended", "is_consequence"]

_IN_VAIN: Final = frozenset({Cause.COLLECTIVE_TIMEOUT, Cause.RENDEZVOUS})
"""Causes of a rank that waited for another one."""

_FIELD: Final = re.compile(
    r"((?:checkpoint|image|policy|replicas|resources|run|strategy)\.[a-z_]+)[\[:]"
)
"""How an error of k8sjob's runtime begins that is about a field of the job.yaml."""
_SETTINGS: Final = "correct the job's settings"
_SAME_MOMENT: Final = 1.0
"""Seconds by which the kubelet's and a container's own clock may differ: it rounds."""
_SIGNALLED: Final = re.compile(r"^\s*traceback : Signal (\d{1,2}) \(SIG\w+\) received by PID")
"""How torchrun's summary names the signal that ended a process; torchrun itself exits with 1."""
_FORMAT: Final = re.compile(r"^exec \S+: exec format error$|: exec format error: unknown$")
"""As the kernel's refusal reads in a container's output, and in the runtime's message."""


_STATE_REFUSED: Final = re.compile(
    r"Error\(s\) in loading state_dict for|^\s*size mismatch for \S+:"
    r"|loaded state dict (?:has a different number of parameter groups|contains a parameter group)"
)
"""What torch's load_state_dict says of a state of another model or optimizer."""


def how_it_ended(case: Case, end: End) -> Finding:
    """What a container's bad end was, told of the replica whose rank failed.

    The Master's agent ends with the failure of another node where its own ranks have done well.
    """
    if end.reason and end.reason.rank >= 0 and end.replica == next(iter(case.ranks), ""):
        end = replace(end, replica=case.replica_of(end.reason.rank) or end.replica)
    return next(finding for kind in _ENDS if (finding := kind(case, end)))


def is_consequence(case: Case, end: End) -> bool:
    """Whether another end, or a request, brought this one about."""
    return end.consequence or _account(case, end).lost_a_peer


def _account(case: Case, end: End) -> Account:
    return account_of(end, case.tail(end.replica), ranks=case.ranks.get(end.replica, 1))


def _hung(case: Case, end: End) -> Finding | None:
    if end.exit_code != ExitCode.HUNG:
        return None
    if left := _left_early(case, end):
        return left
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
    if left := _left_early(case, end):
        again = "submit the job again: it goes on from its newest checkpoint, and is done at once"
        step = f"{again} where that was the last one; {left.next_step}"
        return replace(left, next_step=step)
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
        f"{_change(end) or _SETTINGS}; restarting will not help ({case.called})",
        end.replica,
    )


def _wrong_processor(case: Case, end: End) -> Finding | None:
    lines = [*end.message.splitlines(), *_account(case, end).context]
    if end.reason or not any(_FORMAT.search(line) for line in lines):
        return None
    return Finding(
        Cause.IMAGE,
        f"{end.told}: its image is not made for its node's kind of processor (exec format error)",
        "build it on a base for that platform (image.platform in job.yaml), or select other nodes"
        " (node_selector: {kubernetes.io/arch: ...})",
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
        return _told(end, explained(Account((said,), ()), local=case.local))
    if "OOM-killed" in said:
        return _out_of_memory(case, replace(end, why="OOMKilled"))
    if said.startswith(("mkdir ", "chdir ")):
        what, step = "its working directory is not there", "correct the container's workingDir"
    else:
        what, step = (
            "its command cannot be started",
            _install(case),
        )
    return Finding(Cause.START, f"{end.told}: {what}{f': {said}' * bool(said)}", step, end.replica)


def _not_found(case: Case, end: End) -> Finding | None:
    """Exit code 127 is a shell's word that there is no such program."""
    if end.exit_code != 127:
        return None
    return Finding(
        Cause.START,
        f"{end.told}: its command cannot be started{_said(end, case)}",
        _install(case),
        end.replica,
    )


def _install(case: Case) -> str:
    where = "on this machine" if case.local else "in the image"
    return f"correct run.command, or install the program {where}"


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


def _others_left(case: Case, end: End) -> Finding | None:
    named = end.reason is not None and end.reason.type == "Left"
    return _left_early(case, end) if named else None


def _explained(case: Case, end: End) -> Finding | None:
    told = explained(_account(case, end), local=case.local)
    if told and told.cause in _IN_VAIN:
        if left := _left_early(case, end):
            return left
        absent = _absent(case) if told.cause is Cause.COLLECTIVE_TIMEOUT else ""
        told = told._replace(what=told.what + absent)
    return _told(end, told)


def _told(end: End, told: Told | None) -> Finding | None:
    if told is None:
        return None
    where = f" ({end.reason.where})" if end.reason and end.reason.where else ""
    return Finding(told.cause, f"{end.told}: {told.what}{where}", told.next_step, end.replica)


def _absent(case: Case) -> str:
    """The ranks that did not wait: those are the ones to look at."""
    waited = timed_out_ranks(line for lines in case.logs.values() for line in lines)
    away = sorted(set(range(case.world_size)) - waited) if waited else []
    if not 0 < len(away) <= case.world_size // 2 or len(case.logs) < len(case.pods):
        return ""
    return f"; {_ranks(tuple(away))} did not wait for it"


def _lost_connection(case: Case, end: End) -> Finding | None:
    if end.exit_code != ExitCode.PEER_LOST and not _account(case, end).lost_a_peer:
        return None
    between = "" if case.local else ": a NetworkPolicy, a sidecar, the nodes' network"
    return _left_early(case, end) or Finding(
        Cause.CONNECTION,
        f"{end.told}: the connection to another rank broke off{_said(end, case)}",
        f"see whether another replica ended: k8sjob status {case.called}; if none did, see what"
        f" stands between them{between}",
        end.replica,
    )


def _left_early(case: Case, end: End) -> Finding | None:
    """That the end's rank had waited for ranks whose training was done."""
    left = _done_before(case, end)
    if not left:
        return None
    at = f" after step {end.reason.step}" if end.reason and end.reason.step >= 0 else ""
    said = _said(end, case)
    if end.reason and end.reason.type == "Left":  # the message says the same, then what it did
        said = "".join(said.partition("exit code 0")[2:])
    replicas = tuple(dict.fromkeys((*left.values(), end.replica)))
    return Finding(
        Cause.LEFT_EARLY,
        f"{' and '.join(left)} had ended with exit code 0, and {end.told} still waited for"
        f" {'it' if len(left) == 1 else 'them'}{at}{said}",
        SAME_STEPS,
        replicas[0],
        replicas,
    )


def _done_before(case: Case, end: End) -> dict[str, str]:
    """Who had ended with exit code 0 by then, in words, each with its replica."""
    if end.reason and end.reason.type == "Left":
        return {f"rank {rank}": case.replica_of(rank) for rank in end.reason.culprits}
    done = {pod.replica: pod.finished for pod in case.done}
    if case.status.state is JobState.SUCCEEDED and case.ranks:
        done.setdefault(next(iter(case.ranks)), None)  # that one decides, and its Pod may be gone
    return {
        case.with_ranks(replica): replica
        for replica, finished in done.items()
        if replica != end.replica and (finished is None or finished <= end.time + _SAME_MOMENT)
    }


def _killed(case: Case, end: End) -> Finding | None:
    number = end.exit_code - 128 if end.reason else _signal(case, end)
    if number <= 0 or end.exit_code in (ExitCode.PEER_LOST, ExitCode.HUNG):
        return None
    name = next((s.name for s in signal.Signals if s == number), f"signal {number}")
    killed = "see what killed it: a hand, or this machine's memory (dmesg)"
    if not case.local:
        killed = (
            "see what killed it: its pod was deleted or evicted (kubectl get events -n"
            f" {case.namespace}), or one of its processes ran out of memory (resources.memory)"
        )
    step = {
        "SIGKILL": killed,
        "SIGBUS": "mostly /dev/shm is full: raise resources.shm, or use fewer data loader workers",
        "SIGTERM": "something asked it to end; if it was the cluster, the job goes on by itself",
    }.get(name, f"see its last lines: k8sjob logs {case.called} -r {end.replica}")
    said = "" if end.reason and end.reason.type == "Signal" else _said(end, case)
    return Finding(Cause.KILLED, f"{end.told}: ended by {name}{said}", step, end.replica)


def _signal(case: Case, end: End) -> int:
    """The signal that ended the container, or a process of torchrun's, by its summary."""
    account = _account(case, end)
    lines = () if account.error else account.context
    found = next((found for line in lines if (found := _SIGNALLED.search(line))), None)
    return int(found[1]) if found else end.exit_code - 128


def _change(end: End) -> str:
    """The field of the job.yaml that an error of k8sjob's runtime names; empty for none."""
    field = _FIELD.match(end.reason.message) if end.reason else None
    return f"change {field[1]} in the job.yaml" if field else ""


def _of_another_model(case: Case, end: End) -> Finding | None:
    """A script's own load_state_dict that refuses the checkpoint that the job has resumed."""
    if not any(_STATE_REFUSED.search(line) for line in _account(case, end).error):
        return None
    events = (Event.decode(line) for lines in case.logs.values() for line in lines)
    resumed = [event for event in events if event and event.kind == EventKind.RESUMED]
    if not resumed:
        return None
    name = " ".join(str(resumed[-1].data.get("path") or "the checkpoint").split())
    scratch = "k8sjob run --fresh" if case.local else "an empty checkpoint.dir"
    step = (
        f"the script refused what it resumed from {name}: if that was saved with another model or"
        f" optimizer, start from scratch ({scratch}), or give the script the former ones"
    )
    return replace(_crashed(case, end), next_step=step)


def _crashed(case: Case, end: End) -> Finding:
    return Finding(
        Cause.CRASH,
        f"{end.told}: exit code {end.exit_code}{_said(end, case)}",
        f"{_change(end) or 'correct the script'}; its output: k8sjob logs {case.called}"
        f" -r {end.replica}",
        end.replica,
    )


def _said(end: End, case: Case) -> str:
    """The error in its own words, or the last line of its output."""
    if end.reason and end.reason.type != "Exit":
        kind = f"{end.reason.type}: " if end.reason.type not in ("", "Signal", "Left") else ""
        where = f" ({end.reason.where})" if end.reason.where else ""
        return f": {kind}{end.reason.message}{where}"
    account = _account(case, end)
    line = (account.error[0] if account.error else account.last).strip()
    return f": {line}" if line else ""


def _own_words(end: End) -> str:
    return f": {end.reason.message}" if end.reason else ""


def _ranks(ranks: tuple[int, ...]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}" if ranks else ""


_ENDS: tuple[Callable[[Case, End], Finding | None], ...] = (
    _others_left,
    _hung,
    _not_met,
    _misconfigured,
    _out_of_memory,
    _wrong_processor,
    _cannot_start,
    _not_found,
    _explained,
    _lost_connection,
    _killed,
    _of_another_model,
    _crashed,
)

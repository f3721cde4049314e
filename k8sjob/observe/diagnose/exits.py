"""Causes of a container's failure, the most specific first."""

from __future__ import annotations

import re
import signal
from functools import partial
from itertools import dropwhile
from typing import TYPE_CHECKING, Final

from k8sjob.contract import EventKind, ExitCode
from k8sjob.findings import Finding
from k8sjob.kube.capacity import pod_requests
from k8sjob.kube.objects import Object, event_time, moment
from k8sjob.observe.diagnose.facts import GRACE_SECONDS, SIGKILLED
from k8sjob.observe.diagnose.finding import (
    Cause,
    Explanation,
    load_data,
    load_rules,
    shortened,
)
from k8sjob.observe.diagnose.next_steps import equal_steps
from k8sjob.observe.diagnose.output import (
    ARGUMENTS_REFUSED,
    LastOutput,
    explain_by,
    explain_output,
    is_bare_exit,
    last_output,
    timed_out_ranks,
)
from k8sjob.targets.api import JobState

if TYPE_CHECKING:
    from collections.abc import Callable

    from k8sjob.observe.diagnose.facts import Facts, Failure

_WAITS: Final = frozenset({Cause.COLLECTIVE_TIMEOUT, Cause.RENDEZVOUS})
"""Causes of a rank that waited for another one."""
_BESIDE: Final = re.compile(r"'(\.\./([\w.-]*\w[\w.-]*))")
"""A path that leads to what is beside the folder of a job."""
_FIELD: Final = re.compile(
    r"(checkpoint\.dir(?= )"
    r"|(?:checkpoint|image|policy|replicas|resources|run|strategy)\.[a-z_]+(?=[\[:]))"
)
"""How an error of k8sjob's runtime begins that is about a field of the job.yaml."""
_CLOCK_TOLERANCE: Final = 1.0
"""Seconds by which the kubelet's clock, which rounds, and a container's own may differ."""
_OFTEN: Final = 3
"""How many times an Event was written about what recurs."""
_NO_GPU: Final = re.compile(
    r"No CUDA GPUs are available|Found no NVIDIA driver|no CUDA-capable device|libcuda\.so\.1"
)
_IN_LOADER: Final = re.compile(r"\bCaught \w+ in DataLoader worker process \d+\.$")
_SIGNAL_EXCEPTION: Final = re.compile(r"\bSignalException: Process \d+ got signal: (\d{1,2})$")
_LAUNCHER_ROOT: Final = re.compile(
    r"^Root Cause\b.*?^\s*rank\s*: (\d+) .*?^\s*exitcode\s*: (-?\d+) "
    r"|--local_rank=(\d+)\b[^\n]{0,4000} exits with return code = (-?\d+)$",
    re.DOTALL | re.MULTILINE,
)
"""The rank that failed first, and its exit code, as torchrun and DeepSpeed's launcher say it."""
_steps: Final = partial(load_data, "steps")
_STATE_REFUSED: Final = re.compile(
    r"Error\(s\) in loading state_dict for|^\s*size mismatch for \S+:"
    r"|loaded state dict (?:has a different number of parameter groups|contains a parameter group)"
)
"""Errors of torch's load_state_dict about a state of another model or optimizer."""


def explain_end(facts: Facts, end: Failure) -> Finding:
    """The finding about a container's failure, at the replica whose rank failed.

    The Master's agent ends with the failure of another node where its own ranks have succeeded, and
    each node's with the rank that made all of them hang.
    """
    if end.reason and end.reason.rank >= 0:
        end = end._replace(replica=facts.replica_of(end.reason.rank) or end.replica)
    return next(finding for cause in _CAUSES if (finding := cause(facts, end)))


def is_consequence(facts: Facts, end: Failure) -> bool:
    """Whether another failure, or a request, caused this one."""
    if end.is_consequence:
        return True
    output = _output(facts, end)
    return _lost_a_peer(end, output) or _torchruns_signal(output) == signal.SIGTERM


def _lost_a_peer(end: Failure, output: LastOutput) -> bool:
    """Whether its output says that another rank went away, and nothing else killed it."""
    # NCCL's watchdog aborts a rank that lost its peer, and torchrun ends the ranks beside it: only
    # another signal is a cause of its own.
    number = _signal(end, output)
    killed = number > 0 and number not in {signal.SIGABRT, signal.SIGTERM}
    return not killed and end.why != "OOMKilled" and output.lost_a_peer


def _output(facts: Facts, end: Failure) -> LastOutput:
    if end not in facts.outputs:
        ranks = facts.ranks.get(end.replica, 1)
        facts.outputs[end] = last_output(end, facts.output_before(end), ranks=ranks)
    output: LastOutput = facts.outputs[end]
    return output


def _finding(end: Failure, cause: Cause, problem: str, next_step: str) -> Finding:
    return Finding(cause, f"{end.source}: {problem}", next_step, replicas=(end.replica,))


def _explained(end: Failure, explanation: Explanation | None) -> Finding | None:
    if explanation is None:
        return None
    where = f" ({end.reason.where})" if end.reason and end.reason.where else ""
    return _finding(end, explanation.cause, explanation.problem + where, explanation.next_step)


def _hung(facts: Facts, end: Failure) -> Finding | None:
    if not end.means(ExitCode.HUNG):
        return None
    if finding := _left_early(facts, end):
        return finding
    culprits = end.reason.culprits if end.reason else ()
    where = f" --rank {culprits[0]}" if culprits else ""
    kind = end.reason.type if end.reason else ""
    verb = "works, and the others waited too long for it" if kind == "Late" else "hung"
    step = _steps()["waited"].get(kind, "if a step may take that long, raise run.hang_timeout")
    if end.reason and not culprits:  # all wait, and would forever
        step = (
            "all ranks must make the same calls in the same order, with tensors of the same shape"
        )
    return Finding(
        Cause.HUNG,
        f"{_ranks(culprits) or end.source} {verb}{_reported(end)}",
        f"see the Python stacks in the output: k8sjob logs {facts.output_argument}{where}; {step}",
        replicas=(end.replica,),
    )


def _refused_by_preflight(facts: Facts, end: Failure) -> Finding | None:
    # A script may end with the same code.
    if not (end.reason and end.reason.type == "Preflight"):
        return None
    reason = end.reason
    replicas = list(dict.fromkeys(map(facts.replica_of, reason.culprits)))
    steps = _steps()["preflight"]
    step = steps["local" if facts.local else "none"]
    if reason.nodes and not facts.local:
        options = " ".join(f"--avoid-node {node}" for node in reason.nodes)
        step = steps["node"].format(
            names=", ".join(reason.nodes), job=facts.job_argument, options=options
        )
    who = ", ".join(replicas) or "the group"
    return Finding(
        Cause.PREFLIGHT,
        f"the preflight refused {who}: {reason.message}",
        step,
        replicas=tuple(replicas) or (end.replica,),
    )


def _absent_from_rendezvous(facts: Facts, end: Failure) -> Finding | None:
    if not (end.reason and end.reason.culprits and end.means(ExitCode.PEER_LOST)):
        return None
    if finding := _left_early(facts, end):  # a rank that is done does not join a new rendezvous
        step = "submit the job again: it continues from its newest checkpoint, and ends at once"
        step = f"{step} if that was the last one; {finding.next_step}"
        return finding._replace(next_step=step)
    job, culprits = facts.output_argument, end.reason.culprits
    return Finding(
        Cause.RENDEZVOUS,
        f"{_ranks(culprits)} did not join the rendezvous{_reported(end)}",
        f"see why: k8sjob status {job}, k8sjob logs {job} --rank {culprits[0]};"
        " if it just needs more time, raise run.rendezvous_timeout",
        replicas=(end.replica,),
    )


def _misconfigured(facts: Facts, end: Failure) -> Finding | None:
    # argparse and click leave with the same code, and no exception.
    if end.exit_code != ExitCode.CONFIG or not end.reason or is_bare_exit(end.reason):
        return None
    step = _field_to_change(end) or "correct the job's settings"
    step = f"{step}; restarting will not help ({facts.job_argument})"
    return _finding(end, Cause.CONFIGURATION, end.reason.message, step)


def _not_executable(facts: Facts, end: Failure) -> Finding | None:
    if end.reason and not is_bare_exit(end.reason):
        return None
    lines = [*end.message.splitlines(), *_output(facts, end).context]
    return _explained(end, explain_by(load_rules("start"), lines, local=facts.local))


def _cannot_start(facts: Facts, end: Failure) -> Finding | None:
    where = "on this machine" if facts.local else "in the image"
    step = f"correct run.command, or install the program {where}"
    problem = "its command cannot be started"
    # Docker's kubelets say ContainerCannotRun where those of containerd say StartError.
    if end.why not in ("StartError", "ContainerCannotRun"):
        by_agent = _output(facts, end).last.startswith("k8sjob: cannot start ")
        no_program = end.exit_code == 127 and not end.chosen_by_script  # a shell's code for that
        if not no_program and not by_agent:
            return None
        return _finding(end, Cause.START, problem + _error(facts, end), step)
    error = re.sub(
        r"^.*?unable to start container process: (?:error during container init: )?",
        "",
        " ".join(end.message.split()),
    ).removesuffix(": unknown")
    if "nvidia-container-cli" in error:  # its hook failed: the driver, and not the command
        error = error[error.index("nvidia-container-cli") :]
        return _explained(end, explain_output(LastOutput((error,), ()), local=facts.local))
    if "OOM-killed" in error:  # the limit is too low for runc, before the command starts
        return _out_of_memory(facts, end._replace(why="OOMKilled"))
    if error.startswith(("mkdir ", "chdir ")):
        problem, step = "its working directory does not exist", "correct the container's workingDir"
    return _finding(end, Cause.START, problem + f": {error}" * bool(error), step)


def _out_of_memory(facts: Facts, end: Failure) -> Finding | None:
    if end.why != "OOMKilled":
        return None
    limits = (pod.memory_limit for pod in facts.pods_of(end.replica))
    limit = next((f": its limit is {limit}" for limit in limits if limit), "")
    return _finding(
        end,
        Cause.MEMORY,
        f"killed by the kernel, which was out of memory{limit}",
        "raise resources.memory, or use less: fewer data loader workers, smaller batches",
    )


def _lost_by_node(facts: Facts, end: Failure) -> Finding | None:
    """A container whose end its node did not see: containerd says so by 255 and "Unknown"."""
    if (end.exit_code, end.why) != (255, "Unknown") and end.why != "ContainerStatusUnknown":
        return None
    pod = facts.pod(end.replica)
    node = pod.node if pod else ""
    restart = "submit the job again" if facts.status.state.finished else "it is started again"
    return _finding(
        end,
        Cause.NODE_LOST,
        f"its node{f' {node}' * bool(node)} restarted, or lost its container",
        f"{restart}: with checkpoints the job continues from the newest one; if this happens again,"
        f" have the node checked: kubectl describe node {node or 'NODE'}",
    )


def _others_left(facts: Facts, end: Failure) -> Finding | None:
    reported = end.reason is not None and end.reason.type == "Left"
    return _left_early(facts, end) if reported else None


def _explained_by_output(facts: Facts, end: Failure) -> Finding | None:
    explanation = explain_output(_output(facts, end), local=facts.local)
    if explanation and explanation.cause in _WAITS:
        # A timeout only says that others did not come; one that was done explains it.
        if finding := _left_early(facts, end):
            return finding
        if explanation.cause is Cause.COLLECTIVE_TIMEOUT:
            explanation = explanation._replace(problem=explanation.problem + _absent_ranks(facts))
    if explanation and explanation.cause is Cause.GPU_DRIVER and not facts.local:
        pod = facts.pod(end.replica)
        asked = pod_requests(pod.spec).get("nvidia.com/gpu") if pod else None
        if pod and asked and _NO_GPU.search(explanation.problem):
            step = _steps()["sees_no_gpu"].format(node=pod.node)
            explanation = explanation._replace(next_step=step)
    return _explained(end, explanation)


def _absent_ranks(facts: Facts) -> str:
    """The ranks that did not wait: those are the ones to look at."""
    world_size = sum(facts.ranks.values())
    waited = timed_out_ranks(line for lines in facts.logs.values() for line in lines)
    # Where most are absent, or their output is, more is unknown than who did not come.
    if world_size > 2 * len(waited) or len(facts.logs) < len(facts.pods):
        return ""
    absent = sorted(set(range(world_size)) - waited)
    return f"; {_ranks(tuple(absent))} did not wait for it" if absent else ""


def _lost_connection(facts: Facts, end: Failure) -> Finding | None:
    if not end.means(ExitCode.PEER_LOST) and not _lost_a_peer(end, _output(facts, end)):
        return None
    between = "" if facts.local else ": a NetworkPolicy, a sidecar, the nodes' network"
    return _left_early(facts, end) or _finding(
        end,
        Cause.CONNECTION,
        f"the connection to another rank broke{_error(facts, end)}",
        f"see whether another replica ended: k8sjob status {facts.output_argument}; if none did,"
        f" check what is between them{between}",
    )


def _left_early(facts: Facts, end: Failure) -> Finding | None:
    """That the rank had waited for ranks whose training was done."""
    done = _done_before(facts, end)
    if not done:
        return None
    at = f" after step {end.reason.step}" if end.reason and end.reason.step >= 0 else ""
    error = _error(facts, end)
    if end.reason and end.reason.type == "Left":  # its message begins with the same, perhaps twice
        error = error.rpartition("exit code 0")[2]
    replicas = tuple(dict.fromkeys((*done.values(), end.replica)))
    return Finding(
        Cause.LEFT_EARLY,
        f"{' and '.join(done)} had ended with exit code 0, and {end.source} still waited for"
        f" {'it' if len(done) == 1 else 'them'}{at}{error}",
        equal_steps(facts),
        replicas=replicas,
    )


def _done_before(facts: Facts, end: Failure) -> dict[str, str]:
    """Descriptions of those that had ended with exit code 0 by then, each with its replica."""
    if end.reason and end.reason.type == "Left":
        return {f"rank {rank}": facts.replica_of(rank) for rank in end.reason.culprits}
    done = {pod.replica: pod.trained_until for pod in facts.done}
    if facts.status.state is JobState.SUCCEEDED and facts.ranks:
        done.setdefault(next(iter(facts.ranks)), None)  # it decides the state; its Pod may be gone
    return {
        facts.with_ranks(replica): replica
        for replica, ended in done.items()
        if replica != end.replica
        and (ended is None or ended.timestamp() <= end.time + _CLOCK_TOLERANCE)
    }


def _ended_by_kubelet(facts: Facts, end: Failure) -> Finding | None:
    """A probe or a hook that failed, or the deadline of the Pod."""
    if end.exit_code not in {SIGKILLED, ExitCode.STOPPED} or end.why == "OOMKilled":
        return None
    # The status of a container says "Error" and 137 or 143 only; the reason is in an Event, which
    # the kubelet repeats and which then has the time of the last probe.
    present = facts.pod(end.replica)
    for event in facts.kubelet_kills_by_replica.get(end.replica, ()):
        uid = Object(event).part("involvedObject").get("uid", "")
        first_seen = moment(event.get("firstTimestamp")) or event_time(event)
        began = first_seen.timestamp() <= end.time + _CLOCK_TOLERANCE
        lasted = end.time <= event_time(event).timestamp() + GRACE_SECONDS
        # After 25 Events about a Pod the kubelet writes one in five minutes, and fewer ends than
        # there are (client-go's EventCorrelator): what has ended it again and again does so still.
        lasted |= event.get("count", 1) >= _OFTEN and present is not None and present.uid == uid
        if began and lasted:
            problem = f"the kubelet ended it: {shortened(event.get('message', '').strip(' :'))}"
            return _finding(end, Cause.KILLED, problem, _steps()["kubelet"][event["reason"]])
    return None


def _killed(facts: Facts, end: Failure) -> Finding | None:
    number = _signal(end, _output(facts, end))
    name = next((s.name for s in signal.Signals if s == number), "")
    if not name or end.chosen_by_script:
        return None
    signal_name = f"{name}_local" if facts.local else name
    look = f"see its last lines: k8sjob logs {facts.output_argument} -r {end.replica}"
    step = _steps()["signal"].get(signal_name) or _steps()["signal"].get(name, look)
    step = step.replace("{namespace}", facts.namespace)
    return _finding(end, Cause.KILLED, f"ended by {name}{_error(facts, end)}", step)


def _signal(end: Failure, output: LastOutput) -> int:
    """The signal that ended the container, or torchrun or one of its processes, by what it wrote.

    Not positive where none did.
    """
    if not end.reason and (number := _torchruns_signal(output)):
        return number
    # torchrun ends with 1 when a signal ended one of its ranks, and DeepSpeed with 256 - signal.
    root = None if end.reason or output.error else _launchers_root(output)
    return -root[1] if root else end.exit_code - 128


def _launchers_root(output: LastOutput) -> tuple[int, int] | None:
    """The rank that failed first, and its exit code (negative: a signal), by the launcher.

    The other failures in it are mostly ranks that the launcher itself ended by SIGTERM.
    """
    root = _LAUNCHER_ROOT.search("\n".join(output.context))
    rank, code = filter(None, root.groups()) if root else ("", "")
    return (int(rank), int(code)) if root else None


def _torchruns_signal(output: LastOutput) -> int:
    """The signal that torchrun itself got, which it raises as an exception; 0 for none."""
    exception = _SIGNAL_EXCEPTION.search(output.error[0]) if output.error else None
    return int(exception[1]) if exception else 0


def _refused_checkpoint(facts: Facts, end: Failure) -> Finding | None:
    """A script's own load_state_dict that refuses the checkpoint that the job has resumed."""
    if not any(_STATE_REFUSED.search(line) for line in _output(facts, end).error):
        return None
    if not (resumed := facts.reported(EventKind.RESUMED)):
        return None
    name = " ".join(str(resumed[-1].data.get("path") or "the checkpoint").split())
    scratch = "k8sjob run --fresh" if facts.local else "an empty checkpoint.dir"
    step = (
        f"the script refused what it resumed from {name}: if that was saved with another model or"
        f" optimizer, start from scratch ({scratch}), or give the script the previous ones"
    )
    return _crashed(facts, end)._replace(next_step=step)


def _crashed(facts: Facts, end: Failure) -> Finding:
    error = _output(facts, end).error
    steps = (step for words, step in _steps()["crashed"].items() if words in "\n".join(error))
    step = next(steps, "correct the script")
    if any(map(ARGUMENTS_REFUSED.match, error)):
        step = "correct run.args, or the arguments after `--`"
    elif end.reason and "No usable temporary directory" in end.reason.message:
        step = "mount a volume for it: volumes: [{name: tmp, mount: /tmp, empty_dir: {}}]"
    elif end.reason and end.reason.type == "FileNotFoundError":
        step = (
            "put the file where the script looks for it; relative paths start in"
            f" {'the folder of the job' if facts.local else '/app, the copy of image.context'}"
        )
        if beside := _BESIDE.search(end.reason.message):
            folder, name = beside.groups()
            volume = f"{{name: data, mount: /{name}, pvc: CLAIM, local: {folder}}}"
            step = (
                f"{folder} is next to the folder of the job, and a replica has a copy of the job's"
                f" folder only: add `volumes: [{volume}]` to the job.yaml, as `k8sjob init --from"
                " SCRIPT` does"
            )
    elif end.exit_code == ExitCode.CONFIG:
        step += ", or its arguments (run.args)"
    problem = f"exit code {end.exit_code}"
    if root := None if end.reason else _launchers_root(_output(facts, end)):
        problem = f"rank {root[0]} ended with exit code {root[1]}"
    return _finding(
        end,
        Cause.CRASH,
        f"{problem}{_error(facts, end)}",
        f"{_field_to_change(end) or step}; its output:"
        f" k8sjob logs {facts.output_argument} -r {end.replica}",
    )


def _field_to_change(end: Failure) -> str:
    """The field of the job.yaml that an error of k8sjob's runtime names; empty for none."""
    field = _FIELD.match(end.reason.message) if end.reason else None
    return f"change {field[1]} in the job.yaml" if field else ""


def _error(facts: Facts, end: Failure) -> str:
    """`: ` and the error as it was written, or the last line of the output."""
    where = f" ({end.reason.where})" if end.reason and end.reason.where else ""
    if end.reason and end.reason.type == "Signal":
        return where
    if end.reason and not is_bare_exit(end.reason):
        kind = end.reason.type if end.reason.type != "Left" else ""
        exception = "".join(f": {part}" for part in (kind, shortened(end.reason.message)) if part)
        return "; ".join((exception, *end.reason.causes)) + where
    output = _output(facts, end)
    error = output.error or (output.last,)
    if _IN_LOADER.search(error[0]):  # the exception of the loader's process follows
        inner = dropwhile(lambda line: not line.startswith("Original Traceback"), error)
        error = tuple(line for line in [*inner][1:] if line[:1].strip()) or error
    line = shortened(" ".join(error[: 2 if error[0].endswith(":") else 1]))
    return (f": {line}" if line else "") + where


def _reported(end: Failure) -> str:
    return f": {end.reason.message}" if end.reason else ""


def _ranks(ranks: tuple[int, ...]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}" if ranks else ""


# What the agent, the kubelet or the kernel reports comes before what the output suggests: ranks
# write of broken connections whenever another one goes away. A bare signal or code says least.
_CAUSES: Final[tuple[Callable[[Facts, Failure], Finding | None], ...]] = (
    _others_left,
    _ended_by_kubelet,
    _refused_by_preflight,
    _hung,
    _absent_from_rendezvous,
    _misconfigured,
    _lost_by_node,
    _out_of_memory,
    _not_executable,
    _cannot_start,
    _explained_by_output,
    _lost_connection,
    _killed,
    _refused_checkpoint,
    _crashed,
)

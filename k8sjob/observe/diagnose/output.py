"""The error in a container's output, and its explanation by a rule of rules/output.toml."""

from __future__ import annotations

import re
from itertools import pairwise, takewhile
from typing import TYPE_CHECKING, Final, NamedTuple

from k8sjob.contract import Event, EventKind
from k8sjob.observe.diagnose.finding import Cause, Explanation, Rule, load_rules, shortened

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from k8sjob.contract import Reason
    from k8sjob.observe.diagnose.facts import Failure

_NO_EXCEPTION: Final = frozenset({"", "Signal"})
"""Types of a Reason where the process reported no exception."""
_RANK: Final = re.compile(r"^(?:\[\w+\]:|\[\d+,\d+\]<std\w+>:|\((?:\w+ )?pid=\d+[^)]*\))\s?")
"""What torch, mpirun and ray put in front of a rank's line."""
_TRACEBACK: Final = "Traceback (most recent call last)"
_DIRECT_CAUSE: Final = "The above exception was the direct cause of the following exception:"
"""The line between the traceback of an exception and that of one that was raised from it."""
_INWARD: Final = re.compile(r"\b[Ss]ee (?:the )?inner exception")
"""An exception's text that says nothing but where the reason is: torch's rendezvous does so."""
_ERROR: Final = re.compile(
    r"[\w.]*(?:[Ee]rror|Exception|Interrupt|Exit)\b|\S+\.py: error: |\S*python[\d.]*: "
)
ARGUMENTS_REFUSED: Final = re.compile(r"\S+\.py: error: ")
"""How argparse ends a script."""
_TORCHRUN_SUMMARY: Final = re.compile(r"torch\.distributed\.elastic\S*ChildFailedError")
"""torchrun's own error, which follows that of the rank that failed."""
_AT_EXIT: Final = re.compile(r"wandb:(?! ERROR)")
"""Lines that a library writes whenever a process ends; they name epochs and losses, too."""
_REDRAWN_BAR: Final = re.compile(r"\r?[^\r|]*\d%\|[^\r]*")
"""A progress bar drawn once: tqdm draws it again, below the traceback, when a process ends."""
_MAX_REDRAWN_BARS: Final = 3
"""More of them, one inside the other, are the progress of training."""
_LIBRARY_LINE: Final = re.compile(
    r"\s|k8sjob: |Traceback |(?:Last |[\w.]*)[Ee]rror\b|frame #\d|Exception raised from"
    r"|.*(?:NCCL|c10d|gloo|Warning:|\.(?:cpp|cc|cu):\d)"
)
"""A line of NCCL, gloo or torch, a warning, or part of an exception."""
_TORCH_WARNING: Final = re.compile(r"\[W\w* ")
_NO_REASON: Final = re.compile(
    r"k8sjob: (?:\d\S*, job "
    r"|(?:rank \d+: )?(?:SystemExit: sys\.exit\(|(?:Exit: )?exited with code))"
)
"""The agent's first line, and its line about a process that left no exception."""
_OWN_LINE: Final = re.compile(r"k8sjob: (?!cannot start )")
"""A line that the agent writes itself."""
_TRAINING: Final = re.compile(
    r"(?!.*(?:Error|NCCL))(?:\S.*\b(?:epoch|steps?|iter(?:ation)?s?|batch|loss)\b|epoch|step|iter"
    r"|loss)[^A-Za-z]{0,4}\d|.*\d%\|",
    re.IGNORECASE,
)
"""A line in which a script reports its progress, tqdm's progress bars among them."""
_NOT_TRAINING: Final = frozenset({EventKind.STARTING, EventKind.WARNING, EventKind.STOPPING})
"""Events that are no sign of training."""
_PEER_LOST: Final = re.compile(
    r"Connection closed by|Connection reset by peer|Broken pipe|remote process exit(?:ed|ing)"
    r"|ncclRemoteError|failed to recv, got 0 bytes|recvValue failed"
    r"|NCCL communicator was aborted",
    re.IGNORECASE,
)
_AFTERMATH: Final = re.compile(
    r"$|frame #\d|terminate called|\s+what\(\)|Exception raised from"
    r"|[IWE]\d{4} \S+ .*torch/distributed/elastic"
)
"""A line that C++ or torchrun writes after what ended a process."""
_OF_TORCHRUN: Final = re.compile(
    r"[*=-]*$|(?:.*torch/distributed/run(?:(?!torch/d).)*\] )?Setting OMP_NUM_THREADS"
    r"|[IWE]\d{4} \S+ .*torch/distributed/elastic"
)
"""A line that torchrun writes itself."""
_BETWEEN_RANKS: Final = re.compile(
    r"(?i:gloo|nccl|c10d)|Dist\w{0,40}Error|PeerLost"
    r"|^RuntimeError: (?:Connection reset by peer|Broken pipe)$"  # torch's store; Python's differ
)
"""In a text about a connection: it is one between ranks, and not one of the script's own."""
_TORCH_ERROR: Final = re.compile(r"^[\w.]*(?:RuntimeError|Dist\w{0,40}Error|PeerLost)\b")
"""Exceptions of torch and jax; a ConnectionResetError is that of another connection."""
_MAX_UNFRAMED: Final = 10
"""Last lines in which an error without a traceback is looked for."""

_KIND: Final = re.compile(
    r"(?:[\w.]*InductorError: |[\w.]+: .*:\n)?(?:\w+\.)*(\w+)(?::|$)", re.MULTILINE
)
"""The class at the beginning of an exception, or of the one that the compiler wraps in its own."""
_UNSPECIFIC: Final = re.compile(
    r"NCCL|nccl|gloo|c10d|ProcessGroup|Dist\w{0,40}Error|DataLoader worker \(\S+ [\d, ]+\) exited"
    r"|device-side assert|ProcessExitedException|process \d+ terminated with exit code"
)
"""In an exception's text: what NCCL, gloo, a GPU or its cause wrote before it may say more."""
_NCCL_FAILED: Final = r"NCCL(?::| [Ee]rror| operation| failure)"
_NCCL: Final = re.compile(
    rf"^(?:(?!{_NCCL_FAILED}).)*+{_NCCL_FAILED}.*?"
    r"(unhandled (?:system|cuda) error|internal error|invalid \w+|remote .{0,80}error)"
    r"(?:.*? entry \(may be unrelated\) '(.*?)')?"
)
_LAST_ERROR: Final = "Last error:"
_FAILED_CALL: Final = re.compile(r"NCCL INFO \S+:\d+ -> \d+$")
_WATCHDOG: Final = re.compile(r"\[Rank (\d+)\] Watchdog caught collective operation timeout")
_LOG_PREFIXES: Final = (
    r"^(?:\[\w+\]:\s*)?(?:\[[\d: -]+\] )?(?:\S+:\d+:\d+ )?(?:\[\d+\] )?(?:\S+:\d+ )?NCCL WARN ",
    r"^(?:\[\w+\]:\s*)?(?:[\w.]+Error: )?",
)


class LastOutput(NamedTuple):
    """The last output of a container, about its end.

    An exception that the runtime has reported is the error, whatever else is in the output. Without
    a report the last traceback counts; a script got over what it wrote before its last sign of
    training.

    Attributes:
        error: the lines of the exception that ended it; empty if none is known.
        context: the last lines of its output, since training last advanced.
        last: the last line of all; empty if there is none.
        reported: whether the runtime has reported the error; its exit code says what it means.
        causes: what the error was raised from, each as a line; the last one, its root, first.
    """

    error: tuple[str, ...]
    context: tuple[str, ...]
    last: str = ""
    reported: bool = False
    causes: tuple[str, ...] = ()

    @property
    def lost_a_peer(self) -> bool:
        """Whether the output says that it ended because another rank went away."""
        if self.error:
            return not self.reported and _is_lost_peer(self.error)
        lines = [line for line in _before_summary(self.context) if not _AFTERMATH.match(line)]
        return any(_broke(line) for line in lines[-8:])


def _before_summary(lines: Sequence[str]) -> Sequence[str]:
    """The lines before torchrun's summary, which ends the output of all its processes."""
    summary = next((n for n, line in enumerate(lines) if _TORCHRUN_SUMMARY.match(line)), None)
    if summary is None:
        return lines
    starts = (n for n in reversed(range(summary)) if lines[n].startswith(_TRACEBACK))
    return lines[: next(starts, summary)]


def is_bare_exit(reason: Reason) -> bool:
    """Whether a process only left with an exit code; its output has the reason, if there is one."""
    by_number = reason.type == "SystemExit" and reason.message.startswith("sys.exit(")
    return by_number or reason.type == "Exit"


def last_output(end: Failure, lines: Sequence[str], *, ranks: int) -> LastOutput:
    """Read the report and the last output of a container."""
    bars = sum(1 for _ in takewhile(_REDRAWN_BAR.fullmatch, reversed(lines)))
    lines = lines[: len(lines) - bars] if bars <= _MAX_REDRAWN_BARS else lines
    context = tuple(since_training(lines))
    if end.reason and end.reason.type not in _NO_EXCEPTION and not is_bare_exit(end.reason):
        text = ": ".join(filter(None, (end.reason.type, end.reason.message)))
        error = tuple(text.splitlines())
        return _pointed_to(LastOutput(error, context, reported=True, causes=_roots(end.reason)))
    written = [_RANK.sub("", line) for line in lines if _is_text(line)]
    if end.message and not end.reason:  # from the script, or taken from the log by the kubelet
        message = [_RANK.sub("", line) for line in end.message.splitlines() if line.strip()]
        context, written = (*context, *message), message or written
    by_script = [line for line in _before_summary(written) if not _OWN_LINE.match(line)]
    last = next((line for line in reversed(by_script) if not _OF_TORCHRUN.match(line)), "")
    if end.exit_code > 128:  # a signal ended it, and no exception
        return LastOutput((), context, last)
    unframed = ARGUMENTS_REFUSED if end.chosen_by_script else _ERROR
    chain = _exceptions(context, several=ranks > 1) or [_unframed(context, unframed)]
    causes = tuple("\n".join(error) for error in chain[:-1])
    return _pointed_to(LastOutput(chain[-1], context, last, causes=causes))


def _pointed_to(output: LastOutput) -> LastOutput:
    """The output with the exception that the outer one only points to in its place."""
    if not output.causes or not any(_INWARD.search(line) for line in output.error):
        return output
    inner = tuple(output.causes[-1].splitlines())
    return _pointed_to(output._replace(error=inner, causes=output.causes[:-1]))


def _roots(reason: Reason) -> tuple[str, ...]:
    """The exceptions that one was raised from; one that was being handled may not matter."""
    causes = takewhile(lambda cause: not cause.startswith("while "), reason.causes)
    return tuple(cause.partition(" ")[2] for cause in causes)[::-1]


def since_training(lines: Sequence[str]) -> list[str]:
    """The lines after the last sign of training."""
    after: list[str] = []
    for line in reversed(lines):
        if _is_text(line):
            text = _RANK.sub("", line)
            if _TRAINING.match(text):
                break
            after.append(text)
        elif (event := Event.decode(line)) and event.kind not in _NOT_TRAINING:
            break
    return after[::-1]


def library_lines(lines: Sequence[str]) -> list[str]:
    """The last lines, back to the last one that a script wrote, as a rank does that continues."""
    return list(takewhile(_LIBRARY_LINE.match, reversed(lines)))[::-1]


def _is_text(line: str) -> bool:
    """Whether a line is neither an event nor one that is written at the end of any process."""
    return not (_NO_REASON.match(line) or _AT_EXIT.match(line) or Event.decode(line))


def _exceptions(lines: Sequence[str], *, several: bool) -> list[tuple[str, ...]]:
    """The last exception, after those that it was raised from, the first one first.

    Of several ranks' it is the last one that is not the loss of another rank. An exception during
    whose handling another was raised may not matter.
    """
    starts = [n for n, line in enumerate(lines) if line.startswith(_TRACEBACK)]
    chains: list[list[tuple[str, ...]]] = []
    for begin, end in pairwise([*starts, len(lines)]):
        before = next((line for line in reversed(lines[:begin]) if line), "")
        if not (error := _raised(lines[begin:end])):
            continue
        error = tuple(line for line in error if line != _DIRECT_CAUSE)
        chains.append([*(chains.pop() if before == _DIRECT_CAUSE and chains else ()), error])
    chains = [chain for chain in chains if not _TORCHRUN_SUMMARY.match(chain[-1][0])]
    firsthand = [chain for chain in chains if not _is_lost_peer(chain[-1])] if several else []
    return (firsthand or chains or [[]])[-1]


def _unframed(lines: Sequence[str], start: re.Pattern[str]) -> tuple[str, ...]:
    """An error without the beginning of its traceback: the last line, or one below a frame.

    `start` is how such an error may begin: a script that leaves by itself has handled whatever it
    wrote before. Another line that reads like an error was written by a script that handled it.
    """
    last = lines[-_MAX_UNFRAMED:]
    errors = [
        line
        for above, line, below in zip(["", *last], last, [*last[1:], ""], strict=False)
        if start.match(line)
        and not _TORCHRUN_SUMMARY.match(line)
        and (above[:1].isspace() or not below)
    ]
    return tuple(errors[-1:])


def _raised(block: Sequence[str]) -> tuple[str, ...]:
    """The exception at the end of a traceback, and what follows it."""
    at = next((n for n, line in enumerate(block) if n and line and not line[0].isspace()), None)
    return () if at is None else tuple(block[at:])


def _is_lost_peer(error: Sequence[str]) -> bool:
    return bool(_TORCH_ERROR.match(error[0])) and _broke("\n".join(error))


def _broke(text: str) -> bool:
    """Whether a text says that a connection between ranks broke."""
    return bool(_PEER_LOST.search(text) and _BETWEEN_RANKS.search(text))


def explain_output(output: LastOutput, *, local: bool) -> Explanation | None:
    """The explanation of a container's end by its output; None if nothing in it is known."""
    if not output.error:
        return explain_lines(output.context, local=local) or _nccl_error(output, output.context)
    causes = [(cause,) for cause in output.causes]
    if output.reported:
        errors = (output.error, *causes)
        downloads = [
            d for error in errors if (d := explain_by(load_rules("download"), error, local=local))
        ]
        if downloads:
            return next((d for d in downloads if "://" in d.problem), downloads[0])
    for error in (*causes, output.error):
        if explanation := explain_by(load_rules("output"), error, local=local):
            return explanation
    if not any(_UNSPECIFIC.search(line) for line in output.error):
        return None
    lines = [*output.error, *output.context]
    return explain_lines(lines, local=local) or _nccl_error(output, lines)


def explain_lines(lines: Sequence[str], *, local: bool) -> Explanation | None:
    """The problem between ranks that lines tell, the most telling rule first; None for none."""
    raised = [line.partition("what(): ")[2].strip() for line in lines if "what(): " in line]
    if explanation := explain_by(load_rules("output"), raised, local=local):
        return explanation  # of a C++ exception, which has ended the process
    rules = [rule for rule in load_rules("output") if rule.any_line]
    # torch also warns where it tries again: such a line counts where nothing else follows it.
    last = library_lines(lines)
    lines = [line for line in lines if line in last or not _TORCH_WARNING.match(line)]
    return explain_by(rules, lines, local=local, raised=False)


def explain_by(
    rules: Iterable[Rule], lines: Sequence[str], *, local: bool, raised: bool = True
) -> Explanation | None:
    """The explanation of the first rule that fits a line; `raised`: the first is an exception's."""
    kind = match[1] if raised and lines and (match := _KIND.match("\n".join(lines[:2]))) else ""
    for rule in rules:
        if kind and rule.types and not re.fullmatch(rule.types, kind):
            continue
        for line in lines:
            if match := rule.search(line):
                seconds = str(round(int(match.groupdict().get("ms") or 0) / 1000))
                facts = {"text": _plain(line), "seconds": seconds}
                return rule.explain(match, facts, local=local)
    return None


def _nccl_error(output: LastOutput, lines: Sequence[str]) -> Explanation | None:
    """An NCCL error that no rule knows, with what NCCL itself calls the last error."""
    if output.lost_a_peer:
        return None
    # A warning is followed by the line of code that gave it.
    errors = (line for line in lines if "Warning: " not in line and not line[:1].isspace())
    error = next(filter(None, map(_NCCL.search, errors)), None)
    after = next((n + 1 for n, line in enumerate(lines) if line.endswith(_LAST_ERROR)), len(lines))
    # NCCL also warns where it does without something. What failed is its last word, below the
    # warning; a script that continues has handled the failure.
    last_words = [line for line in library_lines(output.context) if "NCCL " in line]
    if error is None and not (last_words and _FAILED_CALL.search(last_words[-1])):
        return None
    warnings = (line for line in last_words if "NCCL WARN " in line)
    details = [*lines[after:], *(line for line in warnings if "falling back" not in line)]
    detail = _plain(details[0]) if details else ""
    failure = ": ".join(filter(None, (*(error.groups() if error else ()), detail)))
    step = "INFO in run.env shows what it did before" if detail else "WARN in run.env shows why"
    return Explanation(Cause.NCCL, f"NCCL failed: {failure}", f"NCCL_DEBUG: {step}")


def timed_out_ranks(lines: Iterable[str]) -> set[int]:
    """The ranks whose watchdog saw a collective time out."""
    return {int(timeout[1]) for line in lines if (timeout := _WATCHDOG.search(line))}


def _plain(line: str) -> str:
    """A log line without the prefixes of torch and NCCL."""
    for prefix in _LOG_PREFIXES:
        line = re.sub(prefix, "", line)
    return shortened(line)

"""The error that ended a container, found in its report or in its output.

An exception that the runtime has reported is the error, whatever else stands in the output. Without
a report the last traceback counts; what was written before the last sign of training was handled.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import pairwise, takewhile
from typing import TYPE_CHECKING, Final

from k8sjob.contract import Event, EventKind

if TYPE_CHECKING:
    from collections.abc import Sequence

    from k8sjob.lifecycle.evidence import End

__all__ = ["Account", "account_of", "of_libraries", "since_training"]

_NO_EXCEPTION: Final = frozenset({"", "Exit", "Signal"})
"""Types of a Reason that the agent gives where the process left none."""
_RANK: Final = re.compile(r"^\[\w+\]:\s?")
"""The rank that torch and torchrun put in front of a line."""
_TRACEBACK: Final = "Traceback (most recent call last)"
_ERROR: Final = re.compile(
    r"[\w.]*(?:[Ee]rror|Exception|Interrupt|Exit)\b|\S+\.py: error: |\S*python[\d.]*: "
)
_SUMMARY: Final = re.compile(r"torch\.distributed\.elastic\S*ChildFailedError")
"""torchrun's own error, which follows that of the rank that failed."""
_AT_EXIT: Final = re.compile(r"wandb:(?! ERROR)")
"""What a library writes when a process ends, however it ends: it names epochs and losses, too."""
_CLOSED_BAR: Final = re.compile(r"\r?[^\r|]*\d%\|[^\r]*")
"""A progress bar drawn once: tqdm draws it again, below the traceback, when a process ends."""
_BARS: Final = 3
"""So many of them at most, one in the other; more are the progress of training."""
_OF_A_LIBRARY: Final = re.compile(
    r"\s|k8sjob: |Traceback |(?:Last |[\w.]*)[Ee]rror\b|frame #\d|Exception raised from"
    r"|.*(?:NCCL|c10d|gloo|Warning:|\.(?:cpp|cc|cu):\d)"
)
"""A line of NCCL, gloo or torch, a warning, or part of an exception."""
_NO_REASON: Final = re.compile(r"k8sjob: (rank \d+: )?Exit: it gave no reason")
_TRAINING: Final = re.compile(
    r"(?!.*(?:Error|NCCL))(?:\S.*\b(?:epoch|steps?|iter(?:ation)?s?|batch|loss)\b|epoch|step|iter"
    r"|loss)[^A-Za-z]{0,4}\d|.*\d%\|",
    re.IGNORECASE,
)
"""A line in which a script tells its progress, a progress bar of tqdm among them."""
_ASIDE: Final = frozenset({EventKind.STARTING, EventKind.WARNING, EventKind.STOPPING})
"""Events that are no sign of training."""
_PEER_LOST: Final = re.compile(
    r"Connection closed by|Connection reset by peer|Broken pipe|remote process exit(?:ed|ing)"
    r"|ncclRemoteError|failed to recv, got 0 bytes|recvValue failed"
    r"|NCCL communicator was aborted",
    re.IGNORECASE,
)
_OF_TORCH: Final = re.compile(r"^[\w.]*(?:RuntimeError|Dist\w*Error|PeerLost)\b")
"""Exceptions of torch and jax; a ConnectionResetError is that of another connection."""
_LAST: Final = 10
"""An error without a traceback is looked for in so many last lines."""


@dataclass(frozen=True, slots=True)
class Account:
    """What a container wrote about its end.

    Attributes:
        error: the lines of the exception that ended it; empty where none is known.
        context: the last lines of its output, since training was last seen to advance.
        last: the last of all lines; empty where there is none.
    """

    error: tuple[str, ...]
    context: tuple[str, ...]
    last: str = ""

    @property
    def lost_a_peer(self) -> bool:
        """Whether it ended because another rank went away."""
        if self.error:
            return _is_loss(self.error)
        return any(_PEER_LOST.search(line) for line in self.context[-8:])


def account_of(end: End, lines: Sequence[str], *, ranks: int) -> Account:
    """What the report and the output of a container say about its end.

    Args:
        end: how it ended.
        lines: the last lines of its output.
        ranks: how many processes wrote them.
    """
    bars = sum(1 for _ in takewhile(_CLOSED_BAR.fullmatch, reversed(lines)))
    lines = lines[: len(lines) - bars] if bars <= _BARS else lines
    context = tuple(since_training(lines))
    if end.reason and end.reason.type not in _NO_EXCEPTION:
        return Account(tuple(f"{end.reason.type}: {end.reason.message}".splitlines()), context)
    written = [_RANK.sub("", line) for line in lines if _is_text(line)]
    if end.message and not end.reason:  # as the script left it, or the kubelet took it from the log
        left = [_RANK.sub("", line) for line in end.message.splitlines() if line.strip()]
        context, written = (*context, *left), left or written
    last = written[-1] if written else ""
    if end.exit_code > 128:  # a signal ended it, and no exception
        return Account((), context, last)
    return Account(_exception(context, several=ranks > 1), context, last)


def since_training(lines: Sequence[str]) -> list[str]:
    """The lines after the last sign of training."""
    after: list[str] = []
    for line in reversed(lines):
        if _is_text(line):
            text = _RANK.sub("", line)
            if _TRAINING.match(text):
                break
            after.append(text)
        elif (event := Event.decode(line)) and event.kind not in _ASIDE:
            break
    return after[::-1]


def of_libraries(lines: Sequence[str]) -> list[str]:
    """The last lines, as long as none of them is the script's own: a rank that goes on has some."""
    return list(takewhile(_OF_A_LIBRARY.match, reversed(lines)))[::-1]


def _is_text(line: str) -> bool:
    """Whether a line is neither an event nor one that is written at the end of any process."""
    return not (_NO_REASON.match(line) or _AT_EXIT.match(line) or Event.decode(line))


def _exception(lines: Sequence[str], *, several: bool) -> tuple[str, ...]:
    """The last exception; of several ranks' the last one that is not the loss of another rank."""
    starts = [n for n, line in enumerate(lines) if line.startswith(_TRACEBACK)]
    blocks = (lines[begin:end] for begin, end in pairwise([*starts, len(lines)]))
    raised = [error for block in blocks if (error := _raised(block))]
    raised = [error for error in raised if not _SUMMARY.match(error[0])]
    firsthand = [error for error in raised if not _is_loss(error)] if several else []
    if raised:
        return (firsthand or raised)[-1]
    return _unframed(lines)


def _unframed(lines: Sequence[str]) -> tuple[str, ...]:
    """An error without the beginning of its traceback: the last line, or one below a frame.

    Another line that reads like an error was written by a script that handled it.
    """
    last = lines[-_LAST:]
    found = [
        line
        for above, line, below in zip(["", *last], last, [*last[1:], ""], strict=False)
        if _ERROR.match(line) and not _SUMMARY.match(line) and (above[:1].isspace() or not below)
    ]
    return tuple(found[-1:])


def _raised(block: Sequence[str]) -> tuple[str, ...]:
    """The exception at the end of a traceback, and what follows it."""
    at = next((n for n, line in enumerate(block) if n and line and not line[0].isspace()), None)
    return () if at is None else tuple(block[at:])


def _is_loss(error: Sequence[str]) -> bool:
    return bool(_OF_TORCH.match(error[0])) and any(_PEER_LOST.search(line) for line in error)

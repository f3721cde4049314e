"""Numbers, progress and messages as plain text, for lists too, which need no rich."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Final

from k8sjob.contract import Event
from k8sjob.sanitize import integer, text

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from k8sjob.observe.training import Progress

THEN: Final = " > "
"""Between two stages of a timeline."""
_ENDS: Final = frozenset({"succeeded", "failed", "stopped", "deleted"})
_SHORTEST: Final = 1.5
"""Seconds of a stage that is worth showing once it is over."""
_WAITING: Final = 0.05
"""The part of the time lost to the slowest rank that is worth showing."""


def position(progress: Progress) -> list[str]:
    """The progress of a training run, as the pieces of a line, the most important first."""
    pieces = []
    if progress.epoch:
        pieces.append(f"epoch {_of(progress.epoch, progress.epochs)}")
    if progress.step and progress.steps != 1:  # a script that reports epochs alone
        pieces.append(f"step {_of(progress.step, progress.steps)}")
    if progress.loss is not None:
        pieces.append(f"loss {number(progress.loss)}")
    if progress.samples_per_s is not None:
        pieces.append(f"{number(round(progress.samples_per_s, 1))} samples/s")
    if progress.eta_s is not None:
        pieces.append(f"ETA {duration(progress.eta_s)}")
    return pieces


def costs(progress: Progress) -> list[str]:
    """The costs of a training run as pieces of a line, unusual ones first."""
    pieces = []
    if progress.waited is not None and progress.waited >= _WAITING:
        pieces.append(f"{progress.waited:.0%} waiting for rank {progress.slowest}")
    if progress.step_s is not None and 0 < progress.step_s < 1e6:
        pieces.append(f"{number(progress.step_s * 1e3)} ms/step")
    if progress.grad_norm is not None:
        pieces.append(f"gradient norm {number(progress.grad_norm)}")
    if progress.memory_bytes is not None and 0 <= progress.memory_bytes < 2**60:
        pieces.append(f"memory {progress.memory_bytes / 2**30:.2f} GiB")
    return pieces


def timeline(stages: Sequence[tuple[str, float]], now: float) -> list[str]:
    """The stages of a job with how long each took, the last one up to now, without very short ones.

    An end is no stage: the job's state says it.
    """
    return [
        f"{stage} {duration(max(end - at, 0))}"
        for (stage, at), (following, end) in pairwise([*stages, ("", now)])
        if stage not in _ENDS and (not following or not end - at < _SHORTEST)
    ]


def duration(seconds: float) -> str:
    """Seconds as `0:07`, `12:34` or `3:04:05`; `?` for what is no duration."""
    if not 0 <= seconds < 1e9:
        return "?"
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"


def number(value: float) -> str:
    """A number with four digits, in at most eleven characters."""
    if 1e3 <= abs(value) < 1e7:
        return f"{value:,.0f}"
    return f"{value:.4g}"


def quantity(name: str, value: float) -> str:
    """A metric with the unit that its name ends with: `824 MiB` of memory_bytes, `0.21 s`."""
    if name.endswith("_bytes"):
        amount, unit = in_binary_unit(value)
        return f"{number(amount)} {unit}"
    return f"{number(value)}{' s' * name.endswith(('step_s', 'wait_s'))}"


def in_binary_unit(size: float) -> tuple[float, str]:
    """Bytes in B, KiB, MiB or GiB, and which of these."""
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return size, unit
        size /= 1024
    return size, "GiB"


def values(metrics: Mapping[str, str | float]) -> str:
    """Metrics as `loss 0.31  accuracy 0.94`."""
    return "  ".join(
        f"{name} {value if isinstance(value, str) else number(value)}"
        for name, value in metrics.items()
    )


def started(group: Mapping[str, str | float]) -> str:
    """`4 processes joined: ddp over gloo on cpu`, with what is known of it."""
    size = integer(group.get("world_size"))
    joined = f"{size} process{'es joined' if size != 1 else ''}" if size else "started"
    over = [
        f"{word}{value}"
        for word, key in (("", "strategy"), ("over ", "backend"), ("on ", "device"))
        if (value := group.get(key))
    ]
    restart = integer(group.get("restart"))
    return " ".join([f"{joined}:" if over else joined, *over]) + (
        f", restart {restart}" if restart else ""
    )


def environment(group: Mapping[str, str | float]) -> str:
    """`4 processes joined: ddp over gloo on cpu; torch 2.9.1, Python 3.12.1`; empty: ""."""
    names = {"torch": "torch", "python": "Python", "cuda": "CUDA"}
    versions = [f"{name} {value}" for key, name in names.items() if (value := group.get(key))]
    return "; ".join(filter(None, [started(group) if group else "", ", ".join(versions)]))


def file_name(checkpoint: Event) -> str:
    """The file's name alone: the folder is the same each time, and the summary has it."""
    return text(checkpoint.data.get("path")).rstrip("/").rpartition("/")[2]


def last_line(message: object) -> str:
    """The last line of a termination message: some are the end of a log, events included."""
    lines = str(message or "").splitlines()
    written = [line for line in lines if line.strip() and Event.decode(line) is None]
    return text(written[-1]) if written else ""


def _of(count: int, whole: int) -> str:
    return f"{count}/{whole}" if whole else str(count)

"""Whole processes, what they took, and two ways beside each other."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["Run", "middle", "ratio"]


@dataclass(frozen=True)
class Run:
    """What commands took, one after the other.

    Attributes:
        seconds: by the clock.
        cpu: seconds of the processor, the commands' own and their children's.
        megabytes: of memory, at the peak of the largest process.
        network: bytes in both directions, with those of the protocol.
    """

    seconds: float
    cpu: float
    megabytes: float
    network: int

    @classmethod
    def of(cls, *commands: list[str], folder: Path | None = None) -> Run:
        """Run commands, which have to succeed."""
        before, start = _network(), time.perf_counter()
        cpu = peak = 0.0
        for argv in commands:
            with tempfile.TemporaryFile() as detail:
                process = subprocess.Popen(argv, stdout=detail, stderr=detail, cwd=folder)
                _, status, used = os.wait4(process.pid, 0)
                process.returncode = os.waitstatus_to_exitcode(status)
                if process.returncode:
                    detail.seek(0)
                    sys.exit(f"{argv}\n{detail.read().decode(errors='replace')[-2000:]}")
            cpu, peak = cpu + used.ru_utime + used.ru_stime, max(peak, used.ru_maxrss / 1000)
        return cls(time.perf_counter() - start, cpu, peak, _network() - before)


def middle(runs: Sequence[Run], name: str) -> float:
    """The median of one of the attributes."""
    return statistics.median(getattr(run, name) for run in runs)


def ratio(runs: Sequence[Run], beside: Sequence[Run], name: str) -> float:
    """The median of the ratios of neighboring turns, which the machine's other work hits alike."""
    pairs = zip(runs, beside, strict=True)
    return statistics.median(getattr(run, name) / getattr(peer, name) for run, peer in pairs)


def _network() -> int:
    """Bytes that went over loopback since this network is there."""
    line = next(line for line in Path("/proc/net/dev").read_text().splitlines() if "lo:" in line)
    return int(line.split()[1])

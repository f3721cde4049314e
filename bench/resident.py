"""How much memory this process has, in bytes."""

from __future__ import annotations

import ctypes
from pathlib import Path

__all__ = ["forget_peak", "now", "peak"]


def now() -> int:
    """What it has."""
    return _read("VmRSS")


def peak() -> int:
    """The most that it has had, since forget_peak() where that was called."""
    return _read("VmHWM")


def forget_peak() -> int:
    """Begin to measure the peak anew; what the process has now, but for what it could give back."""
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    return peak()


def _read(name: str) -> int:
    status = Path("/proc/self/status").read_text()
    return int(status.partition(f"{name}:")[2].split()[0]) * 1024

"""Which process a pid in a file means: a number alone is never trusted.

A pid is reused after its process has ended, means nothing after a reboot, and means another process
on another machine that shares the home folder. So it is kept together with the start time of its
process, the boot and the host, and a signal is sent only while all of them agree.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

__all__ = ["Identity"]


@dataclass(frozen=True, slots=True)
class Identity:
    """One process, on one machine, since one boot.

    Attributes:
        pid: its process id.
        started: when it was started, in the kernel's own words.
        boot: which boot of the machine.
        host: which machine.
    """

    pid: int
    started: str
    boot: str
    host: str

    @classmethod
    def of(cls, pid: int) -> Identity:
        """The process that has this pid now, on this machine; ProcessLookupError if none has."""
        started = _started(pid)
        if started is None:
            raise ProcessLookupError(f"no process {pid}")
        return cls(pid, started, _boot(), socket.gethostname())

    @classmethod
    def from_json(cls, body: dict[str, Any]) -> Identity:
        """The inverse of to_json; KeyError, TypeError or ValueError for anything else."""
        return cls(int(body["pid"]), str(body["started"]), str(body["boot"]), str(body["host"]))

    def to_json(self) -> dict[str, Any]:
        """A JSON object."""
        return asdict(self)

    @property
    def here(self) -> bool:
        """Whether it is (or was) a process of this machine."""
        return self.host == socket.gethostname()

    @property
    def alive(self) -> bool:
        """Whether it runs; of another machine nothing can be said, so it counts as running."""
        return not self.here or (self.boot == _boot() and _started(self.pid) == self.started)

    def kill(self) -> bool:
        """SIGKILL, if it is of this machine, this boot, and the very process; whether it was sent.

        On Linux the process is held by a descriptor while it is looked at, so that the pid cannot
        come to mean another process between the look and the signal.
        """
        if not self.here:
            return False
        with suppress(ProcessLookupError):
            if sys.platform == "linux":
                held = os.pidfd_open(self.pid)
                try:
                    if self.alive:
                        signal.pidfd_send_signal(held, signal.SIGKILL)
                        return True
                finally:
                    os.close(held)
            elif self.alive:
                os.kill(self.pid, signal.SIGKILL)
                return True
        return False


def _started(pid: int) -> str | None:
    """The start time of a process; None when there is none, or only its zombie."""
    if sys.platform == "linux":
        try:
            stat = Path(f"/proc/{pid}/stat").read_text()
        except OSError:
            return None
        fields = stat.rpartition(")")[2].split()  # the name before may hold anything
        return None if fields[0] in "ZX" else fields[19]
    answer = subprocess.run(
        ["/bin/ps", "-o", "stat=,lstart=", "-p", str(pid)],
        capture_output=True,
        text=True,
        check=False,
    )
    state, _, started = answer.stdout.strip().partition(" ")
    return None if not state or state.startswith("Z") else started.strip()


def _boot() -> str:
    if sys.platform == "linux":
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    answer = subprocess.run(
        ["/usr/sbin/sysctl", "-n", "kern.boottime"], capture_output=True, text=True, check=False
    )
    return answer.stdout.partition("}")[0]  # what follows is a date in the local time zone

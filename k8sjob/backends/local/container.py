"""One start of a replica's container: a process, its output, and everything that it started."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

from k8sjob.backends.local.logfiles import LogWriter
from k8sjob.backends.local.mounts import with_mounts
from k8sjob.backends.local.state_folder import kill_if, stat_fields
from k8sjob.contract import (
    LIFELINE_ENV,
    MAX_TERMINATION_BYTES,
    PATHS_ENV,
    SOURCE_ENV,
    TERMINATION_LOG_ENV,
    WORKDIR,
    ExitCode,
    Reason,
)
from k8sjob.kube.objects import stamp

if TYPE_CHECKING:
    from collections.abc import Mapping

    from k8sjob.kube.objects import Json

_START_ERROR: Final = 128
"""The exit code that a kubelet gives to a container whose command cannot be started."""
STOPPED: Final = "Stopped"
"""The reason of a container that ended after it was stopped; a kubelet has none for it."""


@dataclass(frozen=True, slots=True)
class Launch:
    """Everything a replica is started with, except the ports, which are known only at its start.

    Attributes:
        argv: the command.
        env: its own environment, on top of the supervisor's.
        cwd: its working folder.
        grace: seconds between SIGTERM and SIGKILL.
        fallback_to_logs: the last lines of output stand in for a missing termination message.
        has_agent: the agent is part of the job; otherwise it only runs a command of the user's and
            would not be there in a cluster, so its termination message is not the container's.
        mounts: folders by the path at which it finds them.
    """

    argv: list[str]
    env: dict[str, str]
    cwd: str
    grace: float = 30.0
    fallback_to_logs: bool = False
    has_agent: bool = True
    mounts: dict[str, str] = field(default_factory=dict)


class LocalContainer:
    """A process that runs as if it were alone in a container.

    When it ends, everything that it has started is killed, as at the end of a container's first
    process.

    Args:
        launch: how it is started.
        folder: of the replica: logs/ and termination-log are written here.
        attempt: which start of the replica it is, from 0.
        env: the whole environment.
        lifeline: the file descriptor at whose end of file it stops by itself.

    Attributes:
        output: the file descriptor that its output is read from.
        started: when it was started.
        end: how it ended, as the `terminated` state of a containerStatus: its exit code is 128 + N
            for a signal N, its reason Completed, Error, OOMKilled, StartError or Stopped; empty
            before that.
        missing_output: what of its output could not be written by then, in words.
    """

    def __init__(
        self, launch: Launch, folder: Path, attempt: int, env: Mapping[str, str], lifeline: int
    ) -> None:
        self._launch = launch
        self._termination_log = folder / "termination-log"
        copy = json.loads(env.get(PATHS_ENV, "{}")).get(WORKDIR, "")
        log = folder / "logs" / f"{attempt}.log"
        self._log = LogWriter(log, copy, env.get(SOURCE_ENV, copy))
        self.started = datetime.now(UTC)
        self._kill_at: float | None = None
        self._killed = False
        self._oom_kills = _oom_kills()
        self._mark = f"{TERMINATION_LOG_ENV}={self._termination_log}"
        self.end: Json = {}
        self.missing_output = ""
        self.output, inner = os.pipe()
        # The supervisor reads it, which serves all replicas and must never wait for one.
        os.set_blocking(self.output, False)
        try:
            self._termination_log.unlink(missing_ok=True)
            with suppress(OSError):  # the disk is full; the agent makes the file where it can
                self._termination_log.touch()
            self._process = subprocess.Popen(
                with_mounts(launch.mounts, launch.argv),
                cwd=launch.cwd,
                env={
                    **env,
                    TERMINATION_LOG_ENV: str(self._termination_log),
                    LIFELINE_ENV: str(lifeline),
                },
                stdin=subprocess.DEVNULL,
                stdout=inner,
                stderr=inner,
                pass_fds=(lifeline,),
                # Its group is its own, so that a signal to all of it spares the supervisor.
                start_new_session=True,
            )
        except OSError as error:
            message = f"cannot start {launch.argv[0]!r}: {error.strerror}"
            self._log.close()
            self._finish(_START_ERROR, "StartError", message)
        finally:
            os.close(inner)

    def read(self) -> bool:
        """Store a piece of the output, as far as there is one; False once there will be no more.

        Whoever calls it has other things to do, and the output may never pause.
        """
        if self.end:
            return False
        with suppress(BlockingIOError):
            data = os.read(self.output, 1 << 16)
            self._log.feed(data)
            return bool(data)
        return True

    def poll(self) -> Json:
        """Its end; empty while it runs. Kills it when the grace period of a stop is over."""
        if self.end:
            return self.end
        code = self._process.poll()
        if code is None:
            late = self._kill_at is not None and time.monotonic() >= self._kill_at
            if late and not self._killed:
                self._killed = True
                # Once: the look at all processes of the machine takes milliseconds.
                self._kill_all()
            return {}
        # Before the last read: what the process left behind may hold the pipe open and write on.
        self._kill_all()
        self._drain()
        self._log.close()  # its last line may be the message
        self.missing_output = self._log.missing
        self._finish(ExitCode.of_status(code), *self._explanation(ExitCode.of_status(code)))
        return self.end

    def stop(self, grace: float | None = None) -> bool:
        """SIGTERM now, SIGKILL after its grace, or after `grace` seconds if that is sooner.

        May be repeated; whether SIGTERM was sent.
        """
        if self.end:
            return False
        kill_at = time.monotonic() + (self._launch.grace if grace is None else grace)
        is_first = self._kill_at is None
        if is_first:
            self._process.terminate()
        self._kill_at = min(self._kill_at or kill_at, kill_at)
        return is_first

    def _explanation(self, code: int) -> tuple[str, str]:
        """The reason that a kubelet would give for an exit code, and the termination message."""
        message = _termination_message(self._termination_log)
        if not self._launch.has_agent and Reason.decode(message):
            message = ""
        if not message and code and self._launch.fallback_to_logs:
            agents = "" if self._launch.has_agent else "k8sjob: "
            message = self._log.tail(lines=80, size=2048, without=agents)
        reason = "Completed" if code == 0 else STOPPED if self._kill_at is not None else "Error"
        # The kernel counts for the whole machine, so only a process that was killed is taken for
        # one of them.
        if code == ExitCode.of_status(-signal.SIGKILL) and _oom_kills() > self._oom_kills:
            reason = "OOMKilled"
        return reason, message

    def _finish(self, code: int, reason: str, message: str) -> None:
        self.end = {
            "exitCode": code,
            "reason": reason,
            "message": message,
            "startedAt": stamp(self.started),
            "finishedAt": stamp(datetime.now(UTC)),
        }
        os.close(self.output)

    def _drain(self) -> None:
        """Read the last of the output, without waiting for others that hold the pipe open."""
        deadline = time.monotonic() + 0.5
        while self.read() and (seconds := deadline - time.monotonic()) > 0:
            select.select([self.output], [], [], seconds)

    def _kill_all(self) -> None:
        """SIGKILL for the process, its group, its descendants, and all that carry its mark."""
        # Once it was reaped, its number may belong to another process.
        running = self._process.returncode is None
        if sys.platform == "linux":
            _kill_family(self._process.pid if running else None, self._mark)
        if running:
            self._process.kill()
        # The number of a group stays taken while the group has a member.
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)


def _termination_message(path: Path) -> str:
    """The beginning of a termination log; empty if the job has removed the file."""
    with suppress(OSError), path.open("rb") as file:
        return file.read(MAX_TERMINATION_BYTES).decode(errors="replace")
    return ""


def _kill_family(root: int | None, mark: str) -> None:
    """SIGKILL for each process that descends from `root`, or whose environment holds `mark`."""
    variable = mark.encode()
    # All are read before any is killed: the children of a killed one get another parent.
    births = {
        int(entry.name): _parent_and_start_time(int(entry.name))
        for entry in Path("/proc").glob("[0-9]*")
    }

    def is_kin(pid: int) -> bool:
        descends = root and _descends(pid, root, births)
        # The number may have come to mean another process since the list was made.
        if descends and _parent_and_start_time(pid)[1] == births[pid][1]:
            return True
        return variable in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")

    for pid in births:
        with suppress(OSError):  # gone, or not ours to look at
            kill_if(pid, partial(is_kin, pid))


def _parent_and_start_time(pid: int) -> tuple[int, int]:
    """The parent and the start time of a process; zeros if it is gone."""
    fields = stat_fields(pid)
    return (int(fields[1]), int(fields[19])) if fields else (0, 0)


def _descends(pid: int, root: int, births: Mapping[int, tuple[int, int]]) -> bool:
    for _ in births:  # so that the loop ends whatever was read
        pid = births.get(pid, (0, 0))[0]
        if pid in (root, 0):
            break
    return pid == root


def _oom_kills() -> int:
    """How many processes of this machine the kernel has killed for lack of memory."""
    with suppress(OSError, ValueError, KeyError):
        counts = dict(line.split() for line in Path("/proc/vmstat").read_text().splitlines())
        return int(counts["oom_kill"])
    return 0

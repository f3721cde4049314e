"""A node under test: the real agent with real processes, and scripts that load no torch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
import time
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from k8sjob import contract
from k8sjob.contract import Reason
from k8sjob.runtime.agent.roster import _listen
from k8sjob.runtime.base.config import TIMEOUTS_ENV
from k8sjob.runtime.base.env import NodeEnv
from k8sjob.runtime.base.network import reserve

if TYPE_CHECKING:
    import signal


QUICK = {
    "exchange": 0.1,
    "kill_grace": 0.3,
    "leftover_grace": 0.3,
    "reported": 0.3,
    "restart_max": 0.2,
}
"""Timeouts of the agents under test; what a busy machine needs is as it is in pods."""


@pytest.fixture
def master_port():
    """A free port for MASTER_PORT, the port of whose roster is free, too."""
    with ExitStack() as stack:
        while True:
            port = stack.enter_context(reserve("127.0.0.1")).getsockname()[1]
            with suppress(OSError):  # the roster's port may be another process's
                _listen(NodeEnv(0, 2, 1, "127.0.0.1", port), None).server_close()
                break
        yield port


@dataclass
class Result:
    """How a node ended; `out` is without what the agent tells of the start."""

    code: int
    out: str
    err: str
    reason: Reason | None
    seconds: float


@dataclass
class Node:
    """One running agent."""

    process: subprocess.Popen[str]
    folder: Path
    words: Path
    started: float = field(default_factory=time.monotonic)

    def until(self, name: str, seconds: float = 60) -> str:
        """Wait for a file that the script writes, and return its text."""
        end = time.monotonic() + seconds
        file = self.folder / name
        while not (file.exists() and file.read_text()):
            assert self.process.poll() is None, self.process.communicate()
            assert time.monotonic() < end, f"{name} did not come"
            time.sleep(0.02)
        return file.read_text()

    def send(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def finish(self, seconds: float = 90) -> Result:
        out, err = self.process.communicate(timeout=seconds)
        return Result(
            contract.ExitCode.of_status(self.process.returncode),
            "".join(line for line in out.splitlines(keepends=True) if not is_of_start(line)),
            err,
            Reason.decode(self.words.read_text()) if self.words.exists() else None,
            time.monotonic() - self.started,
        )


def is_of_start(line: str) -> bool:
    event = contract.Event.decode(line)
    return event is not None and event.kind == contract.EventKind.STARTING


def clean_environ() -> dict[str, str]:
    """This machine's environment without anything that names a group."""
    ours = ("RANK", "WORLD_SIZE", "LOCAL_", "GROUP_", "MASTER_", "PET_", "K8SJOB_", "TORCHELASTIC")
    return {name: value for name, value in os.environ.items() if not name.startswith(ours)}


@pytest.fixture
def start(tmp_path):
    """start(script, *args, nproc=1, environ={}, argv=None, **settings) -> Node, ended at last.

    A script may be given in parts, each indented as it stands in the test. `timeouts` are beside
    or in place of QUICK.
    """
    nodes = []

    def start_node(
        script="",
        *arguments,
        nproc=1,
        environ=None,
        argv=None,
        before=(),
        pass_fds=(),
        timeouts=None,
        **settings,
    ):
        file = tmp_path / "main.py"
        parts = [script] if isinstance(script, str) else script
        file.write_text("".join(textwrap.dedent(part) for part in parts))
        settings = {"max_restarts": 0, "hang_timeout": 0.0, **settings}
        environ = {
            **clean_environ(),
            "OMP_NUM_THREADS": "1",
            "PET_NPROC_PER_NODE": str(nproc),
            contract.TERMINATION_LOG_ENV: str(tmp_path / "termination-log"),
            contract.CONFIG_ENV: contract.RuntimeConfig(**settings).encode(),
            TIMEOUTS_ENV: json.dumps({**QUICK, **(timeouts or {})}),
            **(environ or {}),
        }
        process = subprocess.Popen(
            [
                *before,
                sys.executable,
                *contract.AGENT[1:],
                *(argv or ["main.py"]),
                *arguments,
            ],
            cwd=tmp_path,
            env={name: value for name, value in environ.items() if value is not None},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            pass_fds=pass_fds,
        )
        nodes.append(Node(process, tmp_path, Path(environ[contract.TERMINATION_LOG_ENV])))
        return nodes[-1]

    yield start_node
    for node in nodes:
        node.process.kill()
        node.process.wait()
        node.process.stdout.close()
        node.process.stderr.close()


@pytest.fixture
def group(start, master_port, tmp_path):
    """group(script, nnodes=2, nproc=1, environ={}, **settings) -> [Node]: nodes of one group."""

    def begin(script, nnodes=2, nproc=1, environ=None, **settings):
        nodes = []
        for node in range(nnodes):
            (tmp_path / f"node-{node}").mkdir(exist_ok=True)
            own = {
                "RANK": str(node),
                "WORLD_SIZE": str(nnodes * nproc),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(master_port),
                contract.TERMINATION_LOG_ENV: str(tmp_path / f"node-{node}" / "words"),
            }
            nodes.append(start(script, nproc=nproc, environ={**own, **(environ or {})}, **settings))
        return nodes

    return begin


@pytest.fixture
def run(start):
    """run(script, ...) -> Result: start and wait."""

    def run_node(*arguments, **options):
        return start(*arguments, **options).finish()

    return run_node


@pytest.fixture
def gone():
    """gone(pid, seconds) -> bool: whether a process ends, or has become a zombie, in time."""

    def is_gone(pid, seconds=30.0):
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            try:
                state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
            except FileNotFoundError:
                return True
            if state == "Z":
                return True
            time.sleep(0.02)
        return False

    return is_gone

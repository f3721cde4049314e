"""The agent as PID 1, as in a container, where the kernel treats it otherwise."""

from __future__ import annotations

import os
import shutil
import subprocess

import pytest

pytestmark = pytest.mark.system

NAMESPACE = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child"]


@pytest.fixture(autouse=True)
def _namespaces():
    if (
        shutil.which("unshare") is None
        or subprocess.run([*NAMESPACE, "true"], check=False).returncode
    ):
        pytest.skip("no right to make a PID namespace; run as root")


def test_orphans_are_reaped_while_the_rank_runs(start):
    script = """
        import os, pathlib, subprocess, time
        for _ in range(5):
            subprocess.run(["sh", "-c", "setsid sleep 0.1 &"])
        time.sleep(1.5)
        states = [
            (entry / "stat").read_text().rpartition(")")[2].split()[0]
            for entry in pathlib.Path("/proc").glob("[0-9]*")
        ]
        print(os.getppid(), states.count("Z"), len(states))
    """
    result = start(script, before=NAMESPACE).finish()
    assert (result.code, result.out) == (0, "1 0 2\n"), result.err


def test_sigterm_stops_it_although_it_is_pid_1(start):
    script = """
        import pathlib, signal, sys, time
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
        pathlib.Path("ready").write_text("x")
        time.sleep(60)
    """
    node = start(script, before=NAMESPACE)
    node.until("ready")
    children = f"/proc/{node.process.pid}/task/{node.process.pid}/children"
    with open(children) as file:  # noqa: PTH123 - a file of the kernel
        os.kill(int(file.read()), 15)
    assert node.finish(40).code == 0

import contextlib
import io
import os
import pty
import subprocess
import sys
from typing import NamedTuple
from unittest import mock

import pytest
from apiserver import Apiserver
from clusters import kubeconfig
from inmemory import record
from trainings import finished, job, line, met, pod, step

from k8sjob.cli import main


class Done(NamedTuple):
    """What a command left behind."""

    code: int
    out: str
    err: str


@pytest.fixture(autouse=True)
def _alone(tmp_path, monkeypatch):
    """No cluster is configured, and no job is on this machine, whoever runs the tests."""
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "no-kubeconfig"))
    monkeypatch.setenv("K8SJOB_STATE", str(tmp_path / "state"))


@pytest.fixture
def api(tmp_path, monkeypatch):
    """A cluster in memory that the kubeconfig leads to; its namespace is blue."""
    api = Apiserver()
    with api.served() as server:
        monkeypatch.setenv("KUBECONFIG", str(kubeconfig(tmp_path, server.url)))
        yield api


@pytest.fixture
def records(tmp_path):
    """Two jobs of two GPUs; the second one waits for the node of its worker, too."""
    pods = [pod("master-0", 100, 3600, "a"), pod("worker-0", 0, 3600, "b")]
    lines = [line(100), met(100), step(200, 1), step(3200, 2, wait=0.25, slowest=1), finished(3600)]
    return [
        record(tmp_path / f"{name}.k8sjob", job(end=3600, name=name), pods, lines)
        for name in ("one", "two")
    ]


@pytest.fixture
def k8sjob(capfd, monkeypatch):
    """Runs a command line in this process."""
    monkeypatch.setattr("sys.argv", ["k8sjob"])

    def call(*args, stdin=""):
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(stdin.encode())))
        capfd.readouterr()
        with pytest.raises(SystemExit) as end:
            main([str(arg) for arg in args])
        sys.stdout.flush()
        out, err = capfd.readouterr()
        return Done(end.value.code or 0, out, err)

    return call


@pytest.fixture
def process(tmp_path):
    """Starts a command line as a process of its own."""
    started = []

    def start(*args, env=None, **options):
        child = subprocess.Popen(
            [sys.executable, "-m", "k8sjob", *map(str, args)],
            env=os.environ | (env or {}),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            **options,
        )
        started.append(child)
        return child

    yield start
    for child in started:
        if child.poll() is None:
            child.kill()
        child.communicate()


@pytest.fixture
def on_a_terminal(monkeypatch):
    """Runs a command line as a process whose output is a terminal: its code, and what it wrote."""
    for name in ("CI", "NO_COLOR"):
        monkeypatch.delenv(name, raising=False)

    def run(*args, typed=""):
        keeper, terminal = pty.openpty()
        child = subprocess.Popen(
            [sys.executable, "-m", "k8sjob", *map(str, args)],
            env=os.environ | {"TERM": "xterm-256color", "COLUMNS": "80", "LINES": "24"},
            stdin=terminal,
            stdout=terminal,
            stderr=terminal,
        )
        os.close(terminal)
        os.write(keeper, typed.encode())
        seen = b""
        with contextlib.suppress(OSError):  # Linux' way of saying that the other end is closed
            while part := os.read(keeper, 65536):
                seen += part
        os.close(keeper)
        return child.wait(timeout=60), seen.decode()

    return run


@pytest.fixture
def job_file(tmp_path):
    """Writes a small valid job.yaml, with further lines."""

    def write(*lines, name="tiny"):
        file = tmp_path / "job.yaml"
        text = [f"name: {name}", "image: team/tiny:1", "run: {script: main.py}", *lines]
        file.write_text("\n".join(text) + "\n")
        return file

    return write


@pytest.fixture
def complete(tmp_path, k8sjob):
    """What a shell is offered for the last word of a line: the kind and the word of each."""

    def offered(line, **env):
        env |= {"K8SJOB_COMPLETE": "bash", "K8SJOB_LINE": line}
        with mock.patch.dict(
            os.environ, {"K8SJOB_STATE": str(tmp_path / "state")} | env, clear=True
        ):
            done = k8sjob()
        assert done.err == ""
        return [row.split("\t")[:2] for row in done.out.splitlines()]

    return offered

import io

import pytest
from rich.console import Console

from k8sjob.contract import Event, EventKind


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    encoding = "utf-8"

    def isatty(self):
        return True


@pytest.fixture
def terminal():
    return Terminal()


@pytest.fixture
def console(terminal):
    def make(width=80, height=24):
        return Console(
            file=terminal,
            width=width,
            height=height,
            force_terminal=True,
            color_system=None,
            markup=False,
            emoji=False,
            highlight=False,
        )

    return make


@pytest.fixture
def progress():
    def make(epoch=0, step=10, steps=20, *, loss=0.5, epochs=2, time=0.0, **data):
        return Event(
            EventKind.PROGRESS,
            {
                "epoch": epoch,
                "epochs": epochs,
                "step": step,
                "steps": steps,
                "loss": loss,
                "samples_per_s": 1234.5,
                "eta_s": 75.0,
                **data,
            },
            time,
            "master-0",
        )

    return make


@pytest.fixture
def life(progress):
    """The events of a job that succeeds."""
    replicas = ("master-0", "worker-0")
    return [
        Event(EventKind.JOB, {"state": "Created", "message": "PyTorchJob x is created."}),
        *(Event(EventKind.REPLICA, {"phase": "Pending"}, 0, name) for name in replicas),
        *(Event(EventKind.REPLICA, {"phase": "Running", "node": "here"}, 0, r) for r in replicas),
        Event(EventKind.JOB, {"state": "Running"}),
        Event(
            EventKind.STARTED,
            {"world_size": 2, "backend": "gloo", "device": "cpu", "strategy": "ddp", "restart": 0},
            0.0,
            "master-0",
        ),
        Event(EventKind.LOG, {"text": "reading data", "attempt": 0}, 0.0, "worker-0"),
        progress(0, 10, loss=2.0),
        progress(0, 20, loss=1.0),
        Event(EventKind.METRICS, {"epoch": 1, "accuracy": 0.91}, 0.0, "master-0"),
        progress(1, 20, loss=0.25),
        Event(EventKind.CHECKPOINT, {"path": "/checkpoints/step-40.pt"}, 0.0, "master-0"),
        Event(EventKind.METRICS, {"epoch": 2, "accuracy": 0.97}, 0.0, "master-0"),
        *(
            Event(EventKind.REPLICA, {"phase": "Succeeded", "exit_code": 0}, 0, name)
            for name in replicas
        ),
        Event(EventKind.JOB, {"state": "Succeeded", "exit_code": 0}),
    ]


@pytest.fixture
def failure():
    """The events with which a job ends that fails."""
    return [
        Event(
            EventKind.REPLICA,
            {"phase": "Failed", "reason": "Error", "exit_code": 1, "message": "ValueError: no"},
            0.0,
            "worker-0",
        ),
        Event(EventKind.JOB, {"state": "Failed", "message": "worker-0 failed", "exit_code": 100}),
        Event(
            EventKind.FINDING,
            {
                "cause": "crash",
                "message": "the script raised ValueError: no\nat main.py:3",
                "next_step": "correct main.py:3 and run it again",
                "replica": "worker-0",
            },
            0.0,
            "worker-0",
        ),
    ]

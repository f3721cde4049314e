import io

import pytest
from hypothesis import strategies as st
from rich.console import Console

from k8sjob.contract import Event, EventKind
from k8sjob.view.summary import JobSummary

ANY_TEXT = st.text(
    st.characters(codec=None) | st.sampled_from("\x1b[]\r\n:/"), max_size=300
) | st.sampled_from(
    ["<script>", "<img onerror=x>", '"><b onload=y>', "\x1b[31m", "\u202e", "\x00", "\ud800", "&"]
)
ANY_DATA = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | ANY_TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(ANY_TEXT, inner, max_size=3),
    max_leaves=5,
)
KEYS = st.sampled_from(
    ["state", "message", "reason", "text", "loss", "epoch", "epochs", "step", "steps", "phase",
     "exit_code", "restarts", "path", "node", "cause", "next_step", "world_size", "backend",
     "created", "started", "finished", "slowest", "wait_s", "step_s", "samples_per_s", "eta_s",
     "accuracy", "strategy"]
)  # fmt: skip
ANY_EVENTS = st.lists(
    st.builds(
        Event,
        st.sampled_from([str(kind) for kind in EventKind]) | ANY_TEXT,
        st.dictionaries(KEYS | ANY_TEXT, ANY_DATA, max_size=10),
        st.floats(0, 2e9),
        st.sampled_from(["", "master-0", "worker-0"]) | ANY_TEXT,
    ),
    max_size=10,
)
"""What containers may write, which nobody checks."""


def summary_of(events):
    summary = JobSummary(job="digits")
    for event in events:
        summary.add(event)
    return summary


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
        texts = {"markup": False, "emoji": False, "highlight": False, "color_system": None}
        return Console(file=terminal, width=width, height=height, force_terminal=True, **texts)

    return make


@pytest.fixture
def progress():
    def make(epoch=0, step=10, steps=20, *, loss=0.5, epochs=2, time=0.0, **data):
        known = {"epoch": epoch, "epochs": epochs, "step": step, "steps": steps, "loss": loss}
        paces = {"samples_per_s": 1234.5, "eta_s": 75.0}
        return Event(EventKind.PROGRESS, {**known, **paces, **data}, time, "master-0")

    return make


@pytest.fixture
def life(progress):
    """The events of a job that succeeds."""
    group = {"world_size": 2, "backend": "gloo", "device": "cpu", "strategy": "ddp", "restart": 0}

    def replicas(**data):
        return [Event(EventKind.REPLICA, data, 0, name) for name in ("master-0", "worker-0")]

    return [
        Event(EventKind.JOB, {"state": "Created", "message": "PyTorchJob x is created."}),
        *replicas(phase="Pending"),
        *replicas(phase="Running", node="here"),
        Event(EventKind.JOB, {"state": "Running"}),
        Event(EventKind.STARTED, group, 0.0, "master-0"),
        Event(EventKind.LOG, {"text": "reading data", "attempt": 0}, 0.0, "worker-0"),
        progress(0, 10, loss=2.0),
        progress(0, 20, loss=1.0),
        Event(EventKind.METRICS, {"epoch": 1, "accuracy": 0.91}, 0.0, "master-0"),
        progress(1, 20, loss=0.25),
        Event(EventKind.CHECKPOINT, {"path": "/checkpoints/step-40.pt"}, 0.0, "master-0"),
        Event(EventKind.METRICS, {"epoch": 2, "accuracy": 0.97}, 0.0, "master-0"),
        *replicas(phase="Succeeded", exit_code=0),
        Event(EventKind.JOB, {"state": "Succeeded", "exit_code": 0}),
    ]


@pytest.fixture
def failure():
    """The events with which a job ends that fails."""
    end = {"phase": "Failed", "reason": "Error", "exit_code": 1, "message": "ValueError: no"}
    why = {
        "cause": "crash",
        "message": "the script raised ValueError: no\nat main.py:3",
        "next_step": "correct main.py:3 and run it again",
    }
    return [
        Event(EventKind.REPLICA, end, 0.0, "worker-0"),
        Event(EventKind.JOB, {"state": "Failed", "message": "worker-0 failed", "exit_code": 100}),
        Event(EventKind.FINDING, why, 0.0, "worker-0"),
    ]

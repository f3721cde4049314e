"""One function follows a job for every command; what an interrupt does is the caller's."""

import os
import signal
import threading

import pytest

from k8sjob.backends.api import JobRef, Snapshot
from k8sjob.backends.local.state_folder import JobFolder
from k8sjob.targets.jobs import job_of
from k8sjob.view.follow import Interrupts, batches, follow

REF = JobRef("job", "ns", "u")


class Jobs:
    """A back end with one job that runs until it is let go."""

    recorded = False

    def __init__(self, *, ends=True):
        self.go = threading.Event()
        if ends:
            self.go.set()

    def _snapshot(self, state):
        at = "2026-01-01T00:00:09Z"
        condition = {"type": state, "status": "True", "lastTransitionTime": at}
        status = {"startTime": "2026-01-01T00:00:00Z", "conditions": [condition]}
        metadata = {"name": "job", "namespace": "ns", "uid": "u"}
        return Snapshot(job_of({"metadata": metadata, "spec": {}, "status": status}))

    def related(self, _snapshot):
        return ()

    def snapshot(self, _ref):
        return self._snapshot("Running")

    def watch(self, ref, *, stop=None):
        yield self._snapshot("Running")
        self.go.wait(60)
        yield self._snapshot("Succeeded")


def test_a_job_is_shown_to_its_end_with_a_summary(capsys, tmp_path):
    assert follow(Jobs(), REF) == 0
    shown = capsys.readouterr().out.splitlines()
    assert "k8sjob   | Running" in shown
    assert "job Succeeded after 0:09" in shown
    assert shown[-1].split() == ["logs", "k8sjob", "logs", "ns/job"]
    model = tmp_path / "replicas" / "master-0" / "work" / "model.pt"
    model.parent.mkdir(parents=True)
    (tmp_path / "launch.json").touch()
    os.utime(tmp_path / "launch.json", (0, 0))
    model.touch()
    follow(Jobs(), REF, files=JobFolder(tmp_path))
    *_, files, written, logs = capsys.readouterr().out.splitlines()
    assert files.split() == ["files", str(tmp_path)]
    assert written.split() == ["written", str(model)]
    assert logs.split() == ["logs", "k8sjob", "logs", "job"]


def test_a_function_gets_the_events_and_nothing_is_printed(capsys):
    events = []
    assert follow(Jobs(), REF, output=events.append) == 0
    assert [event.data["state"] for event in events] == ["Running", "Succeeded"]
    assert capsys.readouterr().out == ""


def interrupting(jobs, then=lambda: None):
    """A view that interrupts its own process at the first event."""
    seen = []

    def view(event):
        seen.append(event)
        if len(seen) == 1:
            os.kill(os.getpid(), signal.SIGINT)
        then()

    return view, seen


def test_who_leaves_leaves_the_job_alone():
    jobs = Jobs(ends=False)
    view, seen = interrupting(jobs)
    assert follow(jobs, REF, output=view) == 130
    assert [event.data["state"] for event in seen] == ["Running"]
    jobs.go.set()


def test_what_is_done_about_an_interrupt_is_shown_and_the_job_is_followed_further():
    jobs = Jobs(ends=False)
    view, seen = interrupting(jobs)

    def stop(times):
        jobs.go.set()
        return f"stopping, {times}"

    assert follow(jobs, REF, output=view, interrupted=stop) == 130
    shown = [event.data.get("state") or event.data["message"] for event in seen]
    assert shown == ["Running", "stopping, 1", "Succeeded"]


def test_everything_comes_in_order_and_then_the_error_of_the_source():
    def source():
        yield from range(5000)
        raise KeyError("gone")

    found = []
    with pytest.raises(KeyError, match="gone"):
        found.extend(batches(source()))
    assert [item for batch in found for item in batch] == list(range(5000))
    assert len(found) < 100


@pytest.mark.parametrize(
    ("number", "by_default", "counted"),
    [
        (signal.SIGTERM, signal.SIG_DFL, (1, 143)),
        (signal.SIGHUP, signal.SIG_DFL, (1, 129)),
        (signal.SIGHUP, signal.SIG_IGN, (0, 0)),  # as nohup sets it
    ],
)
def test_a_termination_has_its_own_exit_code(number, by_default, counted):
    before = signal.signal(number, by_default)
    try:
        with Interrupts() as interrupts:
            signal.raise_signal(number)
        assert signal.getsignal(number) is by_default
    finally:
        signal.signal(number, before)
    assert (interrupts.count, interrupts.exit_code) == counted

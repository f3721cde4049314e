"""One function follows a job for every command; what an interrupt does is the caller's."""

import os
import signal
import threading

import pytest

from k8sjob.backends.api import JobRef, Snapshot
from k8sjob.errors import JobNotFound
from k8sjob.view.follow import follow

REF = JobRef("job", "ns", "u")


class Jobs:
    """A back end with one job that runs until it is let go."""

    name = "fake"

    def __init__(self, *, ends=True):
        self.go = threading.Event()
        self.there = True
        if ends:
            self.go.set()

    def _snapshot(self, state):
        at = "2026-01-01T00:00:09Z"
        condition = {"type": state, "status": "True", "lastTransitionTime": at}
        status = {"startTime": "2026-01-01T00:00:00Z", "conditions": [condition]}
        metadata = {"name": "job", "namespace": "ns", "uid": "u"}
        return Snapshot({"metadata": metadata, "spec": {}, "status": status})

    def watch(self, ref, *, stop=None):
        if not self.there:
            raise JobNotFound("gone")
        yield self._snapshot("Running")
        self.go.wait(20)
        yield self._snapshot("Succeeded")


def test_a_job_is_shown_to_its_end_with_a_summary(capsys):
    assert follow(Jobs(), REF) == 0
    shown = capsys.readouterr().out.splitlines()
    assert "k8sjob   | Running" in shown
    assert "job Succeeded after 0:09" in shown
    assert shown[-1].split() == ["logs", "k8sjob", "logs", "ns/job"]


def test_on_this_machine_the_files_are_named_too(capsys, tmp_path):
    follow(Jobs(), REF, files=tmp_path)
    *_, files, logs = capsys.readouterr().out.splitlines()
    assert files.split() == ["files", str(tmp_path)]
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


def test_what_is_done_about_an_interrupt_is_told_and_the_job_followed_on():
    jobs = Jobs(ends=False)
    view, seen = interrupting(jobs)

    def stop(times):
        jobs.go.set()
        return f"stopping, {times}"

    assert follow(jobs, REF, output=view, interrupted=stop) == 130
    told = [event.data.get("state") or event.data["message"] for event in seen]
    assert told == ["Running", "stopping, 1", "Succeeded"]


def test_a_job_that_is_not_there():
    jobs = Jobs()
    jobs.there = False
    with pytest.raises(JobNotFound):
        follow(jobs, REF)

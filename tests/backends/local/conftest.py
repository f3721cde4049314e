"""Jobs of plain Python scripts: no torch, so that each runs in a second."""

import os
import textwrap
from pathlib import Path

import pytest
from waiting import until

from k8sjob.backends.local import LocalBackend
from k8sjob.jobs.plan import plan_job
from k8sjob.observe.status import job_status
from k8sjob.spec import JobSpec


@pytest.fixture
def state(tmp_path):
    return tmp_path / "state"


@pytest.fixture
def backend(state):
    """A back end whose jobs are all gone afterwards."""
    made = LocalBackend(state)
    yield made
    for snapshot in made.jobs():
        made.stop(job_status(snapshot).ref, now=True)
    made.close()


@pytest.fixture
def make_plan(tmp_path):
    """A plan for a job whose replicas run a script; fields of the spec by name."""

    def make(script, name="job", workers=1, **fields):
        folder = tmp_path / f"context-{name}"
        folder.mkdir(exist_ok=True)
        (folder / "main.py").write_text(textwrap.dedent(script))
        fields.setdefault("policy", {"max_restarts": 0, "termination_grace": 2})
        fields.setdefault("run", {"command": ["python", "main.py"]})
        spec = JobSpec(name=name, image="example/image:1", replicas={"workers": workers}, **fields)
        return plan_job(spec, folder)

    return make


class Waiter:
    """Waits for what a job comes to, with a deadline that fails the test."""

    def __init__(self, backend):
        self.backend = backend

    until = staticmethod(until)

    def end(self, ref):
        """The status of the job when it has ended."""

        def ended():
            status = job_status(self.backend.snapshot(ref))
            return status if status.state.finished else None

        return self.until(ended)

    def text(self, ref, text, *replicas):
        """Until each of these replicas, or the Master, has written a line with this text."""
        for name in replicas or ("master-0",):
            self.until(lambda name=name: any(text in line for line in self.lines(ref, name)))

    def lines(self, ref, replica="master-0"):
        return [line.text for line in self.backend.logs(ref, replica)]


@pytest.fixture
def wait(backend):
    return Waiter(backend)


@pytest.fixture
def finished(backend, wait):
    """Run a plan to its end; the job, whose supervisor has ended, too."""

    def run(made):
        ref = backend.create(made)
        wait.end(ref)
        backend.finish(ref)
        return ref

    return run


@pytest.fixture
def alive():
    """Whether a pid belongs to a process that runs (a zombie does not)."""

    def look(pid):
        try:
            return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
        except OSError:
            try:
                os.kill(pid, 0)
            except OSError:
                return False
            return not Path("/proc/self").exists()

    return look

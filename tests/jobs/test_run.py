"""run(): one call from a job.yaml to a finished job."""

import os
import re
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
from collections import defaultdict
from pathlib import Path

import pytest

from k8sjob.backends.local import LocalBackend
from k8sjob.contract import EventKind
from k8sjob.errors import SpecError
from k8sjob.jobs.plan import plan_run
from k8sjob.observe.status import JobState, job_status
from k8sjob.python_api import run
from k8sjob.spec import JobSpec

EPOCHS = 8
EXAMPLE = Path(__file__).resolve().parents[2] / "manifests/digits-ddp"


@pytest.fixture
def backend(tmp_path):
    made = LocalBackend(tmp_path / "state")
    yield made
    made.close()


@pytest.fixture
def folder(tmp_path):
    made = tmp_path / "job"
    made.mkdir()
    return made


def spec_of(folder, script, **fields):
    (folder / "main.py").write_text(textwrap.dedent(script))
    fields.setdefault("policy", {"max_restarts": 0, "termination_grace": 5})
    command = {"command": ["python", "main.py"]}
    return JobSpec(name="job", image="example/image:1", run=command, **fields)


def test_run_returns_the_status_and_shows_all_lines_before_the_end(backend, folder):
    script = "for i in range(500): print('line', i)"
    events = []
    spec = spec_of(folder, script, replicas={"workers": 1})
    status = run(spec, folder=folder, backend=backend, view=events.append)
    assert status.state is JobState.SUCCEEDED
    for replica in ("master-0", "worker-0"):
        lines = [e.data["text"] for e in events if e.kind == "log" and e.replica == replica]
        assert lines == [f"line {i}" for i in range(500)]
    states = [e.data["state"] for e in events if e.kind == EventKind.JOB]
    assert states[-1] == "Succeeded"
    assert events[-1].kind == EventKind.JOB


def test_run_takes_the_path_of_a_job_or_of_its_folder(backend, folder):
    spec = spec_of(folder, "print(open('beside').read())")
    (folder / "beside").write_text("text")
    (folder / "job.yaml").write_text(spec.to_yaml())
    for path in (folder, str(folder / "job.yaml")):
        events = []
        run(path, backend=backend, view=events.append)
        assert "text" in [e.data.get("text") for e in events]
    with pytest.raises(SpecError, match="no such file"):
        run(folder / "other.yaml", backend=backend)


def test_a_job_for_openshift_has_the_home_of_its_user_here(folder):
    fields = {"image": "team/x:1", "run": {"command": ["true"], "env": {"A": "1"}}}
    plan = plan_run(JobSpec(name="tiny", security="openshift", **fields), folder)
    env = plan.job.replicas[0].pod["containers"][0]["env"]
    assert [variable["name"] for variable in env] == ["A", "K8SJOB_CONFIG"]


def test_a_view_that_fails_stops_the_job(backend, folder):
    def broken(event):
        if event.kind == EventKind.LOG:
            raise OSError("no screen")

    spec = spec_of(folder, "import time; print('here', flush=True); time.sleep(99)")
    with pytest.raises(OSError, match="no screen"):
        run(spec, folder=folder, backend=backend, view=broken)
    (snapshot,) = backend.jobs()
    assert job_status(snapshot).state is JobState.STOPPED


INTERRUPTED = """
import sys
from pathlib import Path
from k8sjob import run
from k8sjob.backends.local import LocalBackend
try:
    backend = LocalBackend(Path(sys.argv[2]))
    run(sys.argv[1], backend=backend, view=lambda event: print(event.data, flush=True))
except KeyboardInterrupt:
    print("interrupted")
"""


@pytest.mark.parametrize(("times", "code"), [(1, 143), (2, 137)])
def test_ctrl_c_stops_the_job_and_a_second_one_kills_it(backend, folder, tmp_path, times, code):
    script = """
    import signal, sys, time
    def stop(*_):
        print("stopping", flush=True)
        if sys.argv[1:] == ["stubborn"]: time.sleep(99)
        sys.exit(143)
    signal.signal(signal.SIGTERM, stop)
    print("here", flush=True); time.sleep(99)
    """
    spec = spec_of(folder, script, policy={"termination_grace": 90})
    stubborn = ["stubborn"] if times == 2 else []
    spec = spec.with_(run={"command": ["python", "main.py", *stubborn]})
    (folder / "job.yaml").write_text(spec.to_yaml())
    process = subprocess.Popen(
        [sys.executable, "-c", INTERRUPTED, str(folder), str(tmp_path / "state")],
        stdout=subprocess.PIPE,
        text=True,
    )
    for word in ("'here'", "press Ctrl-C again to kill the job")[:times]:
        _read_until(process.stdout, word)
        process.send_signal(signal.SIGINT)
    rest = process.communicate(timeout=60)[0]
    assert process.returncode == 0
    assert rest.rstrip().endswith("interrupted")
    (snapshot,) = backend.jobs()
    status = job_status(snapshot)
    assert status.state is JobState.STOPPED
    assert "Ctrl-C" in status.message
    assert [replica.exit_code for replica in status.replicas] == [code]


def _read_until(stream, word):
    while word not in (line := stream.readline()):
        assert line, f"ended without {word}"


# --- the digits, with a worker that is killed -----------------------------------------------------


@pytest.fixture(scope="module")
def digits(tmp_path_factory):
    """Run the digits example with one Worker; `disturb` is called once, in the third epoch.

    Runs of the same name share a state folder.
    """
    homes = defaultdict(lambda: tmp_path_factory.mktemp("digits"))
    source = tmp_path_factory.mktemp("source") / "digits"
    shutil.copytree(EXAMPLE, source)

    def go(name, disturb=None, *, check=True):
        home = homes[name]
        shutil.copytree(source, home / "job", dirs_exist_ok=True)
        main = home / "job" / "main.py"
        text, replaced = re.subn(r"EPOCHS = \d+", f"EPOCHS = {EPOCHS}", main.read_text())
        assert replaced
        main.write_text(text)
        spec = JobSpec(
            name="digits",
            image="example/image:1",
            # The sum of two gradients is the same in any order. That of three is not, and after a
            # resume DDP sums its first batch in other buckets.
            replicas={"workers": 1},
            run={"script": "main.py", "env": {"OMP_NUM_THREADS": 1}},
            checkpoint={"dir": "/checkpoints"},
            policy={"termination_grace": 10},
        )
        backend = LocalBackend(home / "state")
        events, done = [], threading.Event()

        def view(event):
            events.append(event)
            if disturb and not done.is_set() and event.data.get("epoch", 0) >= 2:
                done.set()
                disturb(home / "state")

        status = run(spec, folder=home / "job", backend=backend, view=view, check=check)
        assert done.is_set() is bool(disturb)
        return status, events

    return go


@pytest.fixture(scope="module")
def undisturbed(digits):
    return digits("undisturbed")


def curve(events):
    """By epoch, from 1: the training loss, and what the test set gave."""
    found = {}
    for event in events:
        if "epoch_loss" in event.data and event.data["step"] == event.data["steps"]:
            found.setdefault(event.data["epoch"] + 1, {})["loss"] = event.data["epoch_loss"]
        if event.kind == EventKind.METRICS:
            found.setdefault(event.data["epoch"], {}).update(event.data)
    return found


def processes(state, replica, *, ranks):
    """The pids of a replica's ranks, or of its agent, by their environment and command line."""
    mark = f"/replicas/{replica}/termination-log".encode()
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            environ, argv = ((entry / name).read_bytes() for name in ("environ", "cmdline"))
            forks = (entry / "comm").read_text() == "k8sjob-fork\n"
        except OSError:
            continue
        if str(state).encode() in environ and mark in environ and not forks:
            is_rank = b"rank_main" in argv
            if is_rank is ranks:
                found.append(int(entry.name))
    return found


@pytest.mark.dist
@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="finds processes in /proc")
@pytest.mark.parametrize("whom", ["rank", "agent"])
def test_a_killed_worker_costs_time_and_nothing_else(digits, undisturbed, whom):
    def kill(state):
        for pid in processes(state, "worker-0", ranks=whom == "rank"):
            os.kill(pid, signal.SIGKILL)

    status, events = digits(whom, kill)
    assert status.state is JobState.SUCCEEDED
    worker = next(replica for replica in status.replicas if replica.name == "worker-0")
    assert worker.restarts == (whom == "agent")  # an agent restarts its ranks in their container
    kinds = [e.kind for e in events]
    assert kinds.count(EventKind.STARTED) == 2
    assert EventKind.RESTARTING in kinds
    assert EventKind.RESUMED in kinds
    expected, seen = curve(undisturbed[1]), curve(events)
    assert list(expected) == list(range(1, EPOCHS + 1))
    assert expected[EPOCHS]["test_accuracy"] >= 0.9
    for epoch, values in expected.items():
        assert seen[epoch] == values


@pytest.mark.dist
def test_a_run_after_a_stop_continues_where_it_was(digits, undisturbed):
    def stop(state):
        backend = LocalBackend(state)
        backend.stop(backend.find("digits"))

    status, before = digits("stopped", stop, check=False)
    assert status.state is JobState.STOPPED
    assert {replica.exit_code for replica in status.replicas} == {143}
    status, after = digits("stopped")
    assert status.state is JobState.SUCCEEDED
    (resumed,) = [event.data for event in after if event.kind == EventKind.RESUMED]
    assert resumed["epoch"] >= 2
    expected, seen = curve(undisturbed[1]), {**curve(before), **curve(after)}
    assert 1 not in curve(after)
    assert seen[EPOCHS] == expected[EPOCHS]

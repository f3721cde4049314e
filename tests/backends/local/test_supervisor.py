"""The supervisor as a process of its own; what it does with jobs is in test_backend.py."""

import json
import subprocess
import sys


def test_a_supervisor_that_cannot_begin_is_named_in_the_state(backend, wait, make_plan):
    ref = backend.create(make_plan("print('ran')", workers=0))
    wait.end(ref)
    backend.finish(ref)
    folder = backend.folder(ref)
    state = json.loads(folder.state.read_text())
    state["job"].pop("status")
    folder.state.write_text(json.dumps(state))
    folder.launch.write_text("{}")
    command = [sys.executable, "-m", "k8sjob.backends.local.supervisor", str(folder.path)]
    with folder.log.open("wb") as log:
        assert subprocess.run(command, stderr=log, check=False).returncode == 1
    status = wait.end(ref)
    assert status.reason == "PyTorchJobSupervisorGone"
    assert "KeyError: 'max_restarts'" in status.message


def test_an_operator_that_ends_the_supervisor_stops_the_job(backend, wait, make_plan):
    ref = backend.create(make_plan("import time; print('here', flush=True); time.sleep(99)"))
    wait.text(ref, "here")
    subprocess.run(["kill", str(backend.folder(ref).supervisor().pid)], check=True)
    status = wait.end(ref)
    assert status.reason == "PyTorchJobStopped"
    assert "the supervisor of the job was terminated" in status.message


def test_a_supervisor_that_fails_ends_its_replicas_and_shows_how(backend, wait, make_plan):
    ref = backend.create(make_plan("import time; print('here', flush=True); time.sleep(99)"))
    wait.text(ref, "here")
    backend.folder(ref).ask("suspend")  # without the value that it needs
    status = wait.end(ref)
    assert status.message == "the supervisor of the job failed: 'value'"
    # 137, or 143 where a busy machine let the signal before SIGKILL end them.
    assert [replica.phase for replica in status.replicas] == ["Stopped", "Stopped"]

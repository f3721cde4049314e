"""Local jobs, for real: processes, signals, files."""

import json
import os
import signal
import stat
import subprocess
import sys
import textwrap
import threading
import time

import pytest

from k8sjob.backends.api import JobRef
from k8sjob.backends.local import LocalBackend
from k8sjob.contract import PATHS_ENV, SOURCE_ENV
from k8sjob.errors import BackendError, JobExists, JobNotFound
from k8sjob.observe.diagnose import diagnose
from k8sjob.observe.status import JobState, job_status

TELL_ENV = """
import json, os, sys
print(json.dumps({**os.environ, "python": sys.executable, "folder": os.getcwd()}), flush=True)
import warnings; warnings.warn("look")
"""
FOR_EVER = "import time; print('here', flush=True); time.sleep(100)"
ENDLESS = {
    "short lines": "while True: os.write(1, b'y\\n' * 30000)",
    "no line": "while True: os.write(1, b'x' * 60000)",
    "its own path": "while True: os.write(1, (os.getcwd() + '/').encode() * 600 + b'\\n')",
    "many processes": "[os.fork() for _ in range(4)]\nwhile True: os.write(1, b'y\\n' * 30000)",
}

WORKER_FAILS = """
import os, sys, time
print(os.getpid(), flush=True)
if os.environ["RANK"] == "1": sys.exit(1)
"""


def pods(backend, ref):
    return {p["metadata"]["name"]: p for p in backend.snapshot(ref).pods}


def test_a_job_runs_to_its_end_with_the_environment_of_the_operator(
    backend, wait, make_plan, state, monkeypatch
):
    for name in ("LOCAL_RANK", "TORCHELASTIC_RUN_ID", "PET_RDZV_ID", "K8SJOB_ERROR_FILE"):
        monkeypatch.setenv(name, "7")
    monkeypatch.setenv("MINE", "kept")
    ref = backend.create(make_plan(TELL_ENV, workers=2))
    assert wait.end(ref).state is JobState.SUCCEEDED
    backend.finish(ref)
    status = job_status(backend.snapshot(ref))
    assert status.exit_code == 0
    assert [r.name for r in status.replicas] == ["master-0", "worker-0", "worker-1"]
    assert {r.exit_code for r in status.replicas} == {0}
    seen = [json.loads(wait.lines(ref, r.name)[0]) for r in status.replicas]
    for env, replica in zip(seen, status.replicas, strict=True):
        place = f"{env[SOURCE_ENV]}/main.py:4"  # and not that of the copy
        assert f"{place}: UserWarning: look" in wait.lines(ref, replica.name)
    assert [env["RANK"] for env in seen] == ["0", "1", "2"]
    assert {env["WORLD_SIZE"] for env in seen} == {"3"}
    assert {env["MASTER_ADDR"] for env in seen} == {"127.0.0.1"}
    ports = {env["MASTER_PORT"] for env in seen} | {env["PET_MASTER_PORT"] for env in seen}
    assert len(ports) == 1
    assert ports != {"23456"}
    assert {os.path.realpath(env["python"]) for env in seen} == {os.path.realpath(sys.executable)}
    assert len({env["folder"] for env in seen}) == 3
    (secret,) = {env["K8SJOB_SECRET"] for env in seen}
    assert len(secret) == 64
    # The environment of another group is not inherited.
    assert seen[0]["MINE"] == "kept"
    assert "7" not in [v for k, v in seen[0].items() if k.startswith(("LOCAL_", "TORCHE", "PET_R"))]
    assert seen[0].get("K8SJOB_ERROR_FILE") != "7"
    assert stat.S_IMODE(state.stat().st_mode) == 0o700
    assert stat.S_IMODE((state / "jobs").stat().st_mode) == 0o700


def test_the_port_is_kept_for_rank_0(backend, wait, make_plan):
    script = """
    import os, socket
    port = int(os.environ["MASTER_PORT"])
    taken = socket.socket()
    try:
        taken.bind(("127.0.0.1", port))
    except OSError:
        print("reserved", flush=True)
    listener = socket.create_server(("127.0.0.1", port))  # sets SO_REUSEADDR
    socket.create_connection(("127.0.0.1", port))
    print("listens", flush=True)
    """
    ref = backend.create(make_plan(textwrap.dedent(script), workers=0))
    assert wait.end(ref).state is JobState.SUCCEEDED
    assert wait.lines(ref) == ["reserved", "listens"]


def test_far_too_many_processes_are_refused_by_default(backend, make_plan, state):
    made = make_plan("pass", workers=5000, volumes=[{"name": "x", "mount": "/x", "secret": "s"}])
    with pytest.raises(BackendError, match=r"5001 processes .* `k8sjob run --oversubscribe`"):
        backend.create(made)
    with pytest.raises(BackendError, match="exists only in the cluster"):  # the next thing wrong
        LocalBackend(state, oversubscribe=True).create(made)


def test_a_name_is_taken_until_its_job_has_ended(backend, wait, make_plan):
    ref = backend.create(make_plan(FOR_EVER))
    with pytest.raises(JobExists, match=r"local/job of .*context-job has not ended"):
        backend.create(make_plan(FOR_EVER))
    backend.stop(ref, now=True)
    wait.end(ref)
    with pytest.raises(BackendError, match="has ended and cannot be resumed"):
        backend.suspend(ref, value=False)
    again = backend.create(make_plan("pass"))
    assert again.uid != ref.uid
    wait.end(again)
    assert backend.find("job") == again  # the newest
    assert len(backend.jobs()) == 2


def test_a_supervisor_that_does_not_answer_is_killed_in_the_end(backend, wait, make_plan, alive):
    ref = backend.create(
        make_plan("import os, time; print(os.getpid(), flush=True); time.sleep(99)")
    )
    wait.text(ref, "")
    rank, keeper = int(wait.lines(ref)[0]), backend.folder(ref).supervisor()
    os.kill(keeper.pid, signal.SIGSTOP)
    backend.stop(ref, now=True)
    backend.finish(ref)
    assert job_status(backend.snapshot(ref)).reason == "PyTorchJobSupervisorGone"
    wait.until(lambda: not alive(rank))


def test_a_failed_replica_is_started_again_in_its_pod(backend, wait, make_plan):
    script = """
    import pathlib, sys
    mark = pathlib.Path("was-here")
    if not mark.exists():
        mark.touch(); print("first"); sys.exit(3)
    print("second")
    """
    plan = make_plan(
        textwrap.dedent(script), workers=0, policy={"max_restarts": 1, "termination_grace": 2}
    )
    ref = backend.create(plan)
    assert wait.end(ref).state is JobState.SUCCEEDED
    (pod,) = backend.snapshot(ref).pods
    container = pod["status"]["containerStatuses"][0]
    assert container["restartCount"] == 1
    assert container["lastState"]["terminated"]["exitCode"] == 3
    assert container["state"]["terminated"]["exitCode"] == 0
    first = next(backend.logs(ref, "master-0"))
    assert (first.attempt, first.text) == (0, "first")
    assert wait.lines(ref)[-1] == "second"
    previous = [line.text for line in backend.logs(ref, "master-0", previous=True)]
    assert previous[0] == "first"
    assert "second" not in previous


@pytest.mark.dist  # the agent asks for torch; the script does not import it
@pytest.mark.parametrize(
    ("policy", "detail"),
    [(None, "is failing because"), ("OnFailure", "ended with exit code 1")],
)
def test_an_error_of_the_script_ends_the_job_at_once(backend, wait, make_plan, policy, detail):
    made = make_plan(
        "print(nothing)",
        run={"script": "main.py"},
        policy={"restart_policy": policy, "max_restarts": 3, "termination_grace": 2},
    )
    ref = backend.create(made)
    status = wait.end(ref)
    assert status.state == JobState.FAILED
    assert detail in status.message
    assert {replica.restarts for replica in status.replicas} == {0}


def test_restart_policy_never_fails_the_job_and_leaves_the_others_under_clean_pod_policy_none(
    backend, wait, make_plan, alive
):
    script = WORKER_FAILS + "else: time.sleep(99)"
    policy = {"restart_policy": "Never", "clean_pod_policy": "None", "termination_grace": 2}
    ref = backend.create(make_plan(script, policy=policy))
    assert wait.end(ref).state is JobState.FAILED
    wait.text(ref, "")
    pid = int(wait.lines(ref)[0])
    time.sleep(0.5)
    assert alive(pid)
    assert pods(backend, ref)["job-master-0"]["status"]["phase"] == "Running"
    backend.finish(ref)
    assert not alive(pid)


def test_what_ignores_sigterm_is_killed_at_the_end_of_its_grace(backend, wait, make_plan):
    script = """
    import signal, time
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    print("here", flush=True); time.sleep(100)
    """
    plan = make_plan(textwrap.dedent(script), workers=0)
    ref = backend.create(plan)
    wait.text(ref, "here")
    backend.stop(ref)
    status = wait.end(ref)
    assert (status.state, status.exit_code) == (JobState.STOPPED, 103)
    assert (status.reason, status.counts) == ("PyTorchJobStopped", {"Stopped": 1})


def test_delete_stops_the_replicas_and_leaves_nothing(backend, wait, make_plan, state, alive):
    script = "import os, time; print(os.getpid(), flush=True); time.sleep(100)"
    ref = backend.create(make_plan(script, checkpoint={"dir": "/checkpoints"}))
    wait.text(ref, "")
    pid = int(wait.lines(ref)[0])
    LocalBackend(state).delete(ref)  # from another terminal
    assert not alive(pid)
    with pytest.raises(JobNotFound):
        backend.snapshot(ref)
    with pytest.raises(JobNotFound):
        backend.find("job")
    assert not list((state / "jobs").iterdir())


def test_large_copies_go_when_the_job_has_ended_and_outputs_stay(backend, finished, make_plan):
    script = """
    with open("changed", "r+b") as file:
        file.write(b"y")
    open("made", "wb").truncate(17 << 20)
    """
    made = make_plan(textwrap.dedent(script), workers=1)
    for name in ("large", "changed"):
        with (made.folder / name).open("wb") as file:
            file.truncate(17 << 20)  # more than a job may keep
    folder = backend.folder(finished(made))
    works = [folder.replica(replica) / "work" for replica in ("master-0", "worker-0")]
    for work in works:
        assert sorted(path.name for path in work.iterdir()) == ["changed", "made", "main.py"]
    assert (made.folder / "large").exists()


def test_what_a_container_leaves_behind_is_killed_with_it(backend, wait, make_plan, alive):
    script = """
    import os, subprocess, sys
    code = "import os, time; os.setsid(); print(os.getpid(), flush=True); time.sleep(100)"
    child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    print(child.stdout.readline(), flush=True)
    os._exit(0)
    """
    ref = backend.create(make_plan(textwrap.dedent(script), workers=0))
    assert wait.end(ref).state is JobState.SUCCEEDED
    assert not alive(int(wait.lines(ref)[0]))


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux knows who descends from whom")
def test_a_daemon_without_a_trace_of_its_replica_is_killed_with_it(backend, wait, make_plan, alive):
    script = """
    import subprocess, time
    daemon = "setsid sleep 100 >&- 2>&- & echo $!"
    print(subprocess.check_output(["sh", "-c", daemon], env={}, text=True), end="", flush=True)
    time.sleep(100)
    """
    ref = backend.create(make_plan(textwrap.dedent(script), workers=0))
    wait.text(ref, "")
    pid = int(wait.lines(ref)[0])
    assert alive(pid)
    backend.stop(ref, now=True)
    assert wait.end(ref).state is JobState.STOPPED
    assert not alive(pid)


PARENT = """
import sys, time
from pathlib import Path
from k8sjob.backends.local import LocalBackend
from k8sjob.jobs.plan import plan_job
from k8sjob.spec import JobSpec
spec = JobSpec(name="job", image="i:1", replicas={"workers": 1},
               run={"command": ["python", "main.py"]})
ref = LocalBackend(Path(sys.argv[1])).create(plan_job(spec, sys.argv[2]))
print(ref.uid, flush=True)
time.sleep(100)
"""
STUBBORN = """
import os, signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print(os.getpid(), flush=True); time.sleep(100)
"""


@pytest.fixture
def parent(state, tmp_path, make_plan):
    """A process that runs a job of stubborn replicas, as `k8sjob run` does."""
    folder = make_plan(STUBBORN).folder
    process = subprocess.Popen(
        [sys.executable, "-c", PARENT, str(state), str(folder)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout.readline().strip()
    yield process
    process.kill()
    process.wait()
    process.stdout.close()


def test_when_the_parent_is_killed_nothing_outlives_it(backend, wait, parent, alive):
    ref = backend.find("job")
    for replica in ("master-0", "worker-0"):
        wait.text(ref, "", replica)
    pids = [int(wait.lines(ref, replica)[0]) for replica in ("master-0", "worker-0")]
    parent.kill()
    wait.until(lambda: not any(map(alive, pids)))
    status = wait.end(ref)
    assert status.state is JobState.STOPPED
    assert "the process that ran the job is gone" in status.message


def test_when_the_supervisor_is_killed_the_state_says_so_and_nothing_outlives_it(
    backend, wait, parent, alive, state
):
    ref = backend.find("job")
    for replica in ("master-0", "worker-0"):
        wait.text(ref, "", replica)
    pids = [int(wait.lines(ref, replica)[0]) for replica in ("master-0", "worker-0")]
    keeper = backend.folder(ref).supervisor()
    os.kill(keeper.pid, signal.SIGKILL)
    wait.until(lambda: not any(map(alive, pids)))
    status = job_status(LocalBackend(state).snapshot(ref))
    assert (status.state, status.reason) == (JobState.FAILED, "PyTorchJobSupervisorGone")
    assert [r.reason for r in status.replicas] == ["ContainerStatusUnknown"] * 2
    log = backend.folder(ref).replica("worker-0") / "logs" / "0.log"
    os.utime(log, (1e10, 1e10))  # as if it had gone on writing after the last change of state
    status = job_status(backend.snapshot(ref))
    assert status.finished.timestamp() == 1e10
    backend.delete(ref)
    assert not backend.jobs()


def test_secrets_come_from_variables_of_their_names_and_are_written_nowhere(
    backend, wait, make_plan, monkeypatch, state
):
    reference = {"valueFrom": {"secretKeyRef": {"name": "wandb", "key": "token"}}}
    container = {"name": "pytorch", "env": [{"name": "WANDB_API_KEY", **reference}]}
    template = {"spec": {"containers": [container]}}
    overlay = {"spec": {"pytorchReplicaSpecs": {"Master": {"template": template}}}}
    script = "import os; print(len(os.environ['WANDB_API_KEY']))"
    plan = make_plan(script, workers=0, overlay=overlay)
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    with pytest.raises(BackendError, match="export WANDB_API_KEY="):
        backend.create(plan)
    monkeypatch.setenv("WANDB_API_KEY", "hunter2-is-secret")
    ref = backend.create(plan)
    assert wait.end(ref).state is JobState.SUCCEEDED
    assert wait.lines(ref) == ["17"]
    files = [path for path in state.rglob("*") if path.is_file()]
    assert files
    assert not [path for path in files if b"hunter2" in path.read_bytes()]


def test_volumes_checkpoints_and_paths_are_mapped(backend, wait, make_plan, tmp_path):
    data = tmp_path / "context-job" / "data"
    script = """
    import json, os, pathlib, sys
    here = json.loads(os.environ["K8SJOB_PATHS"])
    checkpoints = os.environ["K8SJOB_CHECKPOINT_DIR"]
    print(json.dumps([sys.argv[1:], os.environ["WHERE"], checkpoints, here]))
    pathlib.Path(here["/claim"], "kept").touch()
    """
    plan = make_plan(
        textwrap.dedent(script),
        workers=0,
        run={
            "command": ["python", "main.py", "/data/x", "--in=/data", "/database", "/app/main.py"],
            "env": {"WHERE": "/scratch/a", "PRICE": "$(HOME) $$"},
        },
        checkpoint={"dir": "/data/checkpoints"},
        volumes=[
            {"name": "data", "mount": "/data", "pvc": "data", "local": "data"},
            {"name": "claim", "mount": "/claim", "pvc": "my-claim"},
            {"name": "scratch", "mount": "/scratch", "empty_dir": {}},
        ],
    )
    with pytest.raises(BackendError, match=r"volumes\[0\].local: .*data does not exist"):
        backend.create(plan)
    data.mkdir()
    ref = backend.create(plan)
    assert wait.end(ref).state is JobState.SUCCEEDED
    arguments, where, checkpoints, here = json.loads(wait.lines(ref)[0])
    assert arguments[:3] == [f"{data}/x", f"--in={data}", "/database"]
    assert arguments[3] == here["/app"] + "/main.py"
    assert where == here["/scratch"] + "/a"
    assert checkpoints == f"{data}/checkpoints"
    detail = [e["message"] for e in backend.snapshot(ref).events if e["reason"] == "PathMapped"]
    assert f"/data/x is {data}/x on this machine" in detail
    kept = backend.folder(ref).path.parents[1] / "claims" / "my-claim" / "kept"
    backend.delete(ref)
    assert kept.exists()  # as a claim outlives the job


def test_checkpoints_in_a_folder_of_the_users_own_are_resumed_and_never_emptied(
    backend, wait, make_plan, state, tmp_path
):
    own = tmp_path / "own"
    own.mkdir()
    volume = {"name": "own", "mount": "/checkpoints", "pvc": "claim", "local": str(own)}
    plan = make_plan("pass", workers=0, checkpoint={"dir": "/checkpoints"}, volumes=[volume])
    for detail in (False, True):
        ref = backend.create(plan)
        wait.end(ref)
        reasons = [event["reason"] for event in backend.snapshot(ref).events]
        assert ("Resumes" in reasons) is detail
        (own / "saved").touch()
    with pytest.raises(BackendError, match="your own folder, which is not empty"):
        LocalBackend(state, fresh=True).create(plan)
    (kept := state / "checkpoints/job/10000000-old").mkdir(parents=True)
    (kept / "saved").touch()
    with pytest.raises(BackendError, match="your own folder, which every run uses; omit --resume"):
        LocalBackend(state, resume="10000000").create(plan)


def test_a_job_without_checkpoints_cannot_resume_any(make_plan, state):
    with pytest.raises(BackendError, match="the job has no `checkpoint`"):
        LocalBackend(state, resume="10000000").create(make_plan("pass", workers=0))


def test_a_state_that_cannot_be_written_is_tried_again(backend, wait, make_plan):
    ref = backend.create(make_plan(FOR_EVER.replace("100", "2"), workers=0))
    wait.text(ref, "here")
    state = backend.folder(ref).state
    state.unlink()
    (state / "in the way").mkdir(parents=True)  # no file can take its place
    assert not job_status(backend.snapshot(ref)).state.finished
    time.sleep(4)  # the job ends meanwhile
    assert not job_status(backend.snapshot(ref)).state.finished
    (state / "in the way").rmdir()
    state.rmdir()
    assert wait.end(ref).state is JobState.SUCCEEDED
    (event,) = (e for e in backend.snapshot(ref).events if e["reason"] == "StateNotWritten")
    assert f"cannot write {state}" in event["message"]


@pytest.mark.parametrize("output", ENDLESS.values(), ids=ENDLESS)
def test_a_supervisor_answers_whatever_its_job_writes(backend, wait, make_plan, output):
    ref = backend.create(make_plan(f"import os\n{output}", workers=1))
    logs = backend.folder(ref).replica("worker-0") / "logs"
    wait.until((logs / "0.1.log").exists)  # 10 MiB are written
    began = time.monotonic()
    backend.suspend(ref, value=True)
    wait.until(lambda: not backend.snapshot(ref).pods)
    backend.suspend(ref, value=False)
    wait.until((logs / "1.log").exists)
    backend.delete(ref)
    assert not backend.folder(ref).path.exists()
    assert time.monotonic() - began < 20  # a process that is stopped ends within a second


def test_a_damaged_state_hides_no_other_job(backend, finished, make_plan):
    other, ref = (finished(make_plan("pass", name=name, workers=0)) for name in ("a", "b"))
    folder = backend.folder(ref)
    strangers = backend.folder(other).state.read_bytes()
    for damage in (b"", b"[]", b"\0" * 500, b'{"job": 3}', strangers, None):
        folder.state.unlink() if damage is None else folder.state.write_bytes(damage)
        seen = {status.ref.name: status for status in map(job_status, backend.jobs())}
        assert seen["a"].state is JobState.SUCCEEDED
        assert seen["b"].state is JobState.FAILED
        assert "state.json" in seen["b"].message
        assert f"`k8sjob delete local/b@{folder.run}`" in seen["b"].message
        found = diagnose(backend.snapshot(seen["b"].ref), {})
        assert [one.message for one in found] == [seen["b"].message]
    again = finished(make_plan("pass", name="b", workers=0))
    backend.delete(seen["b"].ref)
    backend.delete(again)
    assert [JobRef.of(snapshot.job) for snapshot in backend.jobs()] == [other]


def test_a_job_without_its_launch_file_is_seen_and_can_be_deleted(backend, finished, make_plan):
    ref = finished(make_plan("pass", workers=0))
    backend.folder(ref).launch.unlink()
    assert backend.find("job") == ref
    backend.delete(ref)
    assert backend.jobs() == []


def test_watch_ends_on_stop_and_when_the_job_is_gone(backend, wait, make_plan):
    ref = backend.create(make_plan(FOR_EVER, workers=0))
    stop = threading.Event()
    snapshots = backend.watch(ref, stop=stop)
    next(snapshots)
    stop.set()
    assert list(snapshots) == []
    later = backend.watch(ref)
    next(later)
    backend.delete(ref)
    assert all(snapshot.job.raw["metadata"]["uid"] == ref.uid for snapshot in later)


def test_expired_jobs_are_removed_when_jobs_are_listed(backend, wait, make_plan):
    policy = {"ttl_after_finished": 1, "termination_grace": 2}
    ref = backend.create(make_plan("pass", workers=0, policy=policy))
    wait.end(ref)
    assert len(backend.jobs()) == 1
    backend.finish(ref)
    wait.until(lambda: not backend.jobs())
    with pytest.raises(JobNotFound):
        backend.snapshot(ref)


def test_a_suspended_job_of_kueue_starts_here(backend, wait, make_plan):
    ref = backend.create(make_plan("print('ran')", workers=0, kueue_queue="queue"))
    assert wait.end(ref).state is JobState.SUCCEEDED
    assert PATHS_ENV not in os.environ


def test_of_several_that_want_a_name_at_once_one_gets_it(backend, make_plan, state):
    plan = make_plan(FOR_EVER, workers=0)
    others = [LocalBackend(state) for _ in range(4)]
    outcomes = []

    def create(one):
        try:
            outcomes.append(one.create(plan).name)
        except JobExists as error:
            outcomes.append(error)

    threads = [threading.Thread(target=create, args=(one,)) for one in others]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert outcomes.count("job") == 1
    assert len(backend.jobs()) == 1
    for one in others:
        one.close()
    assert job_status(backend.jobs()[0]).state is JobState.STOPPED

"""Which run a name means, and whose checkpoints a new run resumes."""

import errno
import os
import shutil
import socket
import time
from datetime import UTC, datetime
from typing import NamedTuple

import pytest

from k8sjob.backends.local import LocalBackend, runs
from k8sjob.backends.local.logfiles import attempts
from k8sjob.backends.local.runs import (
    LatestState,
    find_run,
    read_state,
    remove_checkpoints,
    resumed_checkpoints,
)
from k8sjob.backends.local.state_folder import Store, read_json, write_json
from k8sjob.errors import BackendError, JobNotFound
from k8sjob.jobs.plan import plan_job
from k8sjob.spec import JobSpec
from k8sjob.targets.jobs import has_ended
from k8sjob.targets.lifecycle import fail, set_condition

NEW = "99999999-new"


class Resumption(NamedTuple):
    checkpoints: str
    notice: str


def resumption(store, plan, own, **options):
    source = str(plan.folder.resolve())
    return Resumption(*resumed_checkpoints(store, plan.spec.name, source, own, **options))


@pytest.fixture
def store(tmp_path):
    return Store(tmp_path / "state")


@pytest.fixture
def project(tmp_path):
    """A plan for the job `job` in a folder of that name."""

    def make(name, code="pass", **run):
        folder = tmp_path / name
        folder.mkdir(exist_ok=True)
        (folder / "main.py").write_text(code)
        spec = JobSpec(
            name="job",
            image="example/image:1",
            run=run or {"script": "main.py"},
            checkpoint={"dir": "/checkpoints"},
        )
        return plan_job(spec, folder)

    return make


@pytest.fixture
def ran(store):
    """Leave a run that has ended, with a checkpoint."""
    numbers = iter(range(10, 99))

    def make(plan, *, ended="Failed", saved=True):
        number = next(numbers)
        uid = f"{number}000000-old"
        now = datetime.now(UTC)
        status = fail({}, "PyTorchJobStopped", "", now) if ended == "Failed" else {}
        if ended == "Succeeded":
            set_condition(status, "Succeeded", "", "", value=True, now=now)
        meta = {"name": "job", "namespace": "local", "uid": uid}
        launch = {"checkpoints": uid, "replicas": {}, "max_restarts": 0}
        launch["source"] = str(plan.folder.resolve())
        with store.draft() as draft:
            write_json(draft.launch, launch)
            job = {"metadata": meta, "spec": {"pytorchReplicaSpecs": {}}, "status": status}
            write_json(draft.state, {"job": job, "pods": [], "events": []})
            shutil.copytree(plan.folder, draft.replica("master-0") / "work")
            folder = store.publish(draft, "job", uid)
        os.utime(folder.launch, ns=(number, number))
        if saved:
            kept = store.checkpoints("job", uid)
            kept.mkdir(parents=True, exist_ok=True)
            (kept / "step-00000001.pt").touch()
        return uid

    return make


def test_a_run_of_the_same_folder_is_resumed_whatever_its_code(store, project, ran):
    uid = ran(project("mine", code="broken("))
    assert resumption(store, project("mine", code="mended"), NEW).checkpoints == uid
    ran(project("mine"), ended="Succeeded")
    assert resumption(store, project("mine"), NEW).checkpoints == NEW


def test_a_strangers_run_in_between_does_not_hide_the_own_one(store, project, ran):
    uid = ran(project("mine"))
    ran(project("theirs"))
    assert resumption(store, project("mine"), NEW).checkpoints == uid
    assert not resumption(store, project("mine"), NEW).notice


@pytest.mark.parametrize("left", [{"ended": "Succeeded"}, {"saved": False}])
def test_a_stranger_that_left_nothing_to_resume_is_not_mentioned(store, project, ran, left):
    ran(project("theirs"), **left)
    assert resumption(store, project("mine"), NEW) == resumption(store, project("other"), NEW)
    assert not resumption(store, project("mine"), NEW).notice


def test_a_folder_by_another_path_is_the_same_folder(store, project, ran, tmp_path):
    uid = ran(project("mine"))
    (tmp_path / "link").symlink_to(tmp_path / "mine")
    assert (
        resumption(store, plan_job(project("mine").spec, tmp_path / "link"), NEW).checkpoints == uid
    )


def test_a_run_with_a_damaged_state_is_resumed(store, project, ran):
    uid = ran(project("mine"))
    store.folder("job", uid).state.write_bytes(b"")
    assert resumption(store, project("mine"), NEW).checkpoints == uid


@pytest.mark.parametrize("run", ["10000000", "job@10000000", "local/job@10000000"])
def test_the_user_may_name_the_run_to_resume(store, project, ran, run):
    uid = ran(project("theirs"), ended="Succeeded")
    assert resumption(store, project("mine"), NEW, run=run).checkpoints == uid


def test_the_checkpoints_of_a_deleted_run_may_be_resumed(store, project, ran):
    uid = ran(project("mine"))
    store.folder("job", uid).remove()
    assert resumption(store, project("mine"), NEW).checkpoints == NEW
    assert resumption(store, project("mine"), NEW, run=uid[:8]).checkpoints == uid


@pytest.mark.parametrize("run", ["12345678", "", "job@", "..", "other@10000000"])
def test_a_run_to_resume_that_is_not_there(store, project, ran, run):
    ran(project("mine"), saved=False)
    with pytest.raises(JobNotFound, match="no checkpoints of a run"):
        resumption(store, project("mine"), NEW, run=run or "@")


def test_checkpoints_stay_as_long_as_a_run_uses_them(store, project, ran):
    one, two = ran(project("mine")), ran(project("mine"))
    store.folder("job", two).remove()
    damaged = store.folder("job", ran(project("mine"), saved=False))
    for identity in (one, two):
        remove_checkpoints(store, "job", identity)
    kept = store.checkpoints("job", "")
    assert {path.name for path in kept.iterdir()} == {one}
    damaged.launch.write_text("")
    store.folder("job", one).remove()
    remove_checkpoints(store, "job", one)
    assert (kept / one).exists()
    damaged.remove()
    remove_checkpoints(store, "job", "")
    remove_checkpoints(store, "job", one)
    assert not list(kept.iterdir())


def test_a_supervisor_elsewhere_counts_until_it_gives_no_sign(store, project, ran, monkeypatch):
    """The machine's name may have changed, or a container's disk be used in the next one."""
    folder = store.folder("job", ran(project("mine")))
    folder.record_supervisor(os.getpid())
    monkeypatch.setattr(socket, "gethostname", lambda: "renamed")
    assert folder.supervisor()
    os.utime(folder.path / "keeper.json", (0, time.time() - 601))
    assert not folder.supervisor()
    folder.show_alive()
    assert folder.supervisor()


@pytest.mark.parametrize("number", [errno.ESTALE, errno.EIO])
def test_while_a_file_server_is_away_a_job_is_neither_gone_nor_failed(
    store, project, ran, monkeypatch, number
):
    """So its supervisor goes on, and who waits for it does not end it."""
    folder = store.folder("job", ran(project("mine"), ended=""))
    folder.record_supervisor(os.getpid())
    folder.ask("delete")

    def failing(function):
        def fail(path, *args, **kwargs):
            if str(path).startswith(str(store.root)):
                raise OSError(number, os.strerror(number), str(path))
            return function(path, *args, **kwargs)

        return fail

    with monkeypatch.context() as away:
        for name in ("open", "stat", "lstat", "scandir", "listdir"):
            away.setattr(os, name, failing(getattr(os, name)))
        assert not folder.is_gone
        assert folder.asked() == {}
        assert attempts(folder.replica("master-0") / "logs") == []
        assert read_state(folder).job.raw["status"] == {}
    assert folder.asked() == {"delete": {}}
    folder.remove()
    assert folder.is_gone


# --- names ----------------------------------------------------------------------------------------


def test_a_name_is_the_newest_run_and_each_run_has_a_name(store, project, ran):
    older, newer = ran(project("mine")), ran(project("mine"))
    assert find_run(store, "job").run == newer[:8]
    assert find_run(store, f"job@{older[:8]}").run == older[:8]
    assert find_run(store, f"job@{older}").run == older[:8]
    for unknown in ("jo", "job@", "job@77777777"):
        with pytest.raises(JobNotFound, match=f"no job {unknown!r} on this machine"):
            find_run(store, unknown)


def test_a_name_of_two_folders_means_the_one_where_the_user_is(store, project, ran, monkeypatch):
    mine, theirs = ran(project("mine")), ran(project("theirs"))
    monkeypatch.chdir(project("mine").folder)
    assert find_run(store, "job").run == mine[:8]
    monkeypatch.chdir("/")
    with pytest.raises(BackendError, match="'job' is ambiguous") as error:
        find_run(store, "job")
    for run, folder in ((mine, "mine"), (theirs, "theirs")):
        assert f"local/job@{run[:8]} of {project(folder).folder}" in str(error.value)
    (gone := project("gone").folder / "inner").mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    with pytest.raises(BackendError, match="'job' is ambiguous"):
        find_run(store, "job")


def test_the_latest_state_of_a_job_that_is_gone_stays_gone(store, project, ran):
    ran(project("mine"))
    folder = find_run(store, "job")
    latest = LatestState(folder)
    assert latest.snapshot() is latest.snapshot()
    folder.remove()
    for _ in range(2):
        with pytest.raises(JobNotFound):
            latest.snapshot()
        assert latest.is_silent("master-0")


def test_jobs_that_have_not_changed_are_not_read_again(store, project, ran, monkeypatch):
    ran(project("mine"))
    ran(project("theirs"), ended="Running")  # without a supervisor: it is lost
    backend = LocalBackend(store.root)
    monkeypatch.setattr(runs, "LOOK_SECONDS", 0)
    lost, ended = backend.jobs()
    assert backend.jobs()[1] is ended
    folder, lost_folder = (store.folder("job", snapshot.job.uid) for snapshot in (ended, lost))
    state = read_json(folder.state)
    state["job"]["metadata"]["labels"] = {"team": "red"}
    write_json(folder.state, state)
    assert backend.jobs()[1].job.labels == {"team": "red"}
    lost_folder.record_supervisor(os.getpid())  # of another machine, whose disk was away
    assert [has_ended(snapshot.job) for snapshot in backend.jobs()] == [False, True]
    folder.remove()
    assert len(backend.jobs()) == 1

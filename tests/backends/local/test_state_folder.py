import errno
import fcntl
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

import k8sjob.backends.local.state_folder
from k8sjob.backends.local import LocalBackend
from k8sjob.backends.local.state_folder import Identity, Store, read_json, write_json
from k8sjob.backends.record import Records
from k8sjob.environment import cache_folder, kubeconfig, state_folder
from k8sjob.errors import BackendError


@pytest.fixture
def store(tmp_path):
    return Store(tmp_path / "state")


def make(store, name, uid):
    with store.draft() as draft:
        write_json(draft.launch, {"checkpoints": uid})
        return store.publish(draft, name, uid)


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"K8SJOB_STATE": "/a/b", "XDG_STATE_HOME": "/x"}, "/a/b"),
        ({"XDG_STATE_HOME": "/x"}, "/x/k8sjob"),
        ({"HOME": "/home/me"}, "/home/me/.local/state/k8sjob"),
        ({"HOME": "/home/me", "K8SJOB_STATE": "~/jobs"}, "/home/me/jobs"),
    ],
)
def test_where_it_is(monkeypatch, variables, expected):
    for name in ("K8SJOB_STATE", "XDG_STATE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert str(state_folder()) == expected


def test_a_user_without_a_home(monkeypatch, tmp_path):
    def no_account(_uid):
        raise KeyError

    for name in ("HOME", "XDG_STATE_HOME", "XDG_CACHE_HOME", "K8SJOB_STATE", "KUBECONFIG"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("pwd.getpwuid", no_account)
    assert state_folder() == Path("/.local/state/k8sjob")
    assert cache_folder() == Path("/.cache/k8sjob")
    assert kubeconfig() == "/.kube/config"


@pytest.mark.parametrize("mode", [0o755, 0o2770])
def test_a_folder_that_was_there_keeps_its_mode_and_what_is_in_it_is_for_its_user(tmp_path, mode):
    (tmp_path / "state").mkdir()
    (tmp_path / "state").chmod(mode)
    Store(tmp_path / "state").make()
    assert stat.S_IMODE((tmp_path / "state").stat().st_mode) == mode
    for name in ("jobs", "checkpoints", "claims"):
        assert stat.S_IMODE((tmp_path / "state" / name).stat().st_mode) & 0o777 == 0o700
    Store(tmp_path / "own/state").make()
    assert stat.S_IMODE((tmp_path / "own/state").stat().st_mode) == 0o700


@pytest.mark.parametrize("name", ["jobs", "checkpoints", "claims", "records"])
def test_what_somebody_else_made_in_it_is_not_used(tmp_path, monkeypatch, name):
    """Where others may write into the folder, they could change what runs."""
    (tmp_path / name).mkdir()
    really = os.stat

    def stat_as(path, **options):
        state = really(path, **options)
        theirs = str(path) == str(tmp_path / name)
        owner = (state.st_uid + 1,) if theirs else (state.st_uid,)
        return os.stat_result((*state[:4], *owner, *state[5:]))

    monkeypatch.setattr(os, "stat", stat_as)
    for use in (Store, LocalBackend):
        with pytest.raises(BackendError, match=f"state folder {tmp_path / name} belongs to user"):
            use(tmp_path)


def test_reading_makes_nothing(tmp_path, monkeypatch):
    monkeypatch.setenv("K8SJOB_STATE", str(tmp_path / "state"))
    assert LocalBackend().jobs() == []
    assert Records().find("any") is None
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_made_is_one_clear_error(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(BackendError, match="K8SJOB_STATE to another folder"):
        Store(tmp_path / "file" / "state")


def test_jobs_are_found_by_their_whole_name_newest_first(store):
    for number, name in enumerate(["a", "a-b", "a", "b"]):
        folder = make(store, name, f"{number}0000000-x")
        os.utime(folder.launch, ns=(number, number))
    assert [f.path.name for f in store.folders()] == [
        "b-30000000",
        "a-20000000",
        "a-b-10000000",
        "a-00000000",
    ]
    assert [f.path.name for f in store.folders("a")] == ["a-20000000", "a-00000000"]


def test_what_a_killed_process_had_begun_to_remove_goes_at_the_next_start(store):
    make(store, "job", "0123456789")
    gone = store.root / "jobs/.gone-killed"
    (gone / "replicas").mkdir(parents=True)
    make(store, "job", "1123456789")
    assert not gone.exists()


def test_a_draft_is_out_of_sight_and_leaves_nothing(store):
    def fail():
        with store.draft() as draft:
            assert store.folders() == []
            assert stat.S_IMODE(draft.path.stat().st_mode) == 0o700  # for this user alone
            raise BackendError(str(draft.path))

    with pytest.raises(BackendError):
        fail()
    assert {path.name for path in store.root.iterdir()} == {"jobs", "checkpoints", "claims"}
    assert list((store.root / "jobs").iterdir()) == []


def test_a_file_that_cannot_be_written_leaves_the_old_one(tmp_path, full_disk):
    file = tmp_path / "state.json"
    write_json(file, {"n": 1})
    message = r"cannot write .*state\.json: File too large"
    with full_disk(1000), pytest.raises(BackendError, match=message):
        write_json(file, {"n": "x" * 2000})
    assert read_json(file) == {"n": 1}
    assert [path.name for path in tmp_path.iterdir()] == ["state.json"]


def test_requests_are_taken_once_and_the_newest_counts(store):
    folder = make(store, "a", "1")
    folder.ask("suspend", value=True)
    folder.ask("suspend", value=False)
    folder.ask("delete")
    assert folder.asked() == {"delete": {}, "suspend": {"value": False}}
    assert folder.asked() == {}


def test_a_request_takes_the_space_that_was_kept_for_the_end(store, monkeypatch):
    folder = make(store, "a", "1")

    def full(path, body):
        if (folder.path / "ballast").exists():
            raise BackendError(f"cannot write {path}") from OSError(errno.ENOSPC, "full")
        write_json(path, body)

    monkeypatch.setattr(k8sjob.backends.local.state_folder, "write_json", full)
    folder.ask("delete")
    assert folder.asked() == {"delete": {}}


def test_the_lock_is_for_one_at_a_time(store):
    with store.locked(), (store.root / "lock").open() as file, pytest.raises(BlockingIOError):
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_a_draft_that_does_not_fit_on_the_disk_is_not_left_there(store, full_disk):
    with (
        full_disk(100_000),  # less than the ballast
        pytest.raises(BackendError, match="cannot write"),
        store.draft(),
    ):
        pytest.fail("there is no room for a job")
    assert list((store.root / "jobs").iterdir()) == []


# --- processes ------------------------------------------------------------------------------------


@pytest.fixture
def sleeper():
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    yield process
    process.kill()
    process.wait()


def test_a_process_that_agrees_in_all_is_killed(sleeper):
    it = Identity.of(sleeper.pid)
    assert it.kill()
    sleeper.wait(60)
    assert not it.alive
    assert not it.kill()


@pytest.mark.parametrize("change", [{"started": "1"}, {"boot": "another"}])
def test_another_process_of_the_same_number_is_not(sleeper, change):
    other = Identity.of(sleeper.pid)._replace(**change)
    assert not other.alive
    assert not other.kill()
    assert sleeper.poll() is None


def test_of_another_machine_nothing_is_known_and_nothing_signaled(sleeper):
    other = Identity.of(sleeper.pid)._replace(host="elsewhere")
    assert other.alive
    assert not other.kill()
    assert sleeper.poll() is None


def test_a_zombie_is_not_alive(sleeper):
    it = Identity.of(sleeper.pid)
    sleeper.kill()
    os.waitid(os.P_PID, sleeper.pid, os.WEXITED | os.WNOWAIT)  # dead, and not reaped
    assert not it.alive


def test_no_process_no_identity():
    with pytest.raises(ProcessLookupError):
        Identity.of(2**22 + 1)

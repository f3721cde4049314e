"""What a killed process has left is removed by the next one, and nothing else is."""

import ast
import fcntl
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import k8sjob
from k8sjob import temporary
from k8sjob.files import whole_file
from k8sjob.temporary import temporary_folder

HOLD = """\
import sys
from pathlib import Path
from k8sjob.files import whole_file
from k8sjob.temporary import temporary_folder
place = Path(sys.argv[1])
with temporary_folder("test", sys.argv[1]) as folder, whole_file(place / "result") as out:
    (folder / "copies").mkdir()
    (folder / "copies" / "data").write_bytes(b"x" * 99)
    out.write(b"half")
    out.flush()
    print(flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def hold(tmp_path):
    """Starts processes that make a folder and a draft, and keep them while they run."""
    started = []

    def start():
        child = subprocess.Popen(
            [sys.executable, "-c", HOLD, tmp_path], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        started.append(child)
        child.stdout.readline()
        return child

    yield start
    for child in started:
        child.kill()
        child.communicate()


def names(folder):
    return {path.name for path in folder.iterdir()}


def start_next(folder):
    with temporary_folder("next", str(folder)) as new, whole_file(folder / "next") as out:
        assert new.stat().st_mode & 0o777 == 0o700
        out.write(b"next")
    (folder / "next").unlink()


def test_what_a_killed_process_left_is_removed_by_the_next(hold, tmp_path):
    child = hold()
    held = names(tmp_path)
    assert len(held) == 2  # a folder, a draft
    start_next(tmp_path)
    assert names(tmp_path) == held, "it still runs"
    child.kill()
    child.wait()
    other = hold()  # the next one of its kind
    assert len(names(tmp_path)) == 2
    assert not held & names(tmp_path)
    other.communicate()
    assert names(tmp_path) == {"result"}


def test_a_process_that_is_stopped_has_not_gone(hold, tmp_path):
    child = hold()
    held = names(tmp_path)
    os.kill(child.pid, signal.SIGSTOP)
    for name in held:
        os.utime(tmp_path / name, (0, 0))  # age says nothing
    start_next(tmp_path)
    os.kill(child.pid, signal.SIGCONT)
    assert names(tmp_path) == held


def test_nothing_of_others_is_removed(hold, tmp_path, monkeypatch):
    child = hold()
    child.kill()
    child.wait()
    leftovers = names(tmp_path)
    for name in ("k8sjob-mine", ".k8sjob-mine", "k8sjob-prove-12345678-abc"):
        (tmp_path / name).mkdir()
        (tmp_path / name / ".lock").touch()
    host = temporary._HOST
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / ".lock").touch()
    (tmp_path / f"k8sjob-a-{host}-link").symlink_to(tmp_path / "elsewhere")
    for name in ("none", "other", "fifo"):
        (tmp_path / f"k8sjob-a-{host}-{name}").mkdir()
    (tmp_path / f"k8sjob-a-{host}-other" / ".lock").symlink_to(tmp_path / "elsewhere" / ".lock")
    os.mkfifo(tmp_path / f"k8sjob-a-{host}-fifo" / ".lock")
    os.mkfifo(tmp_path / f".k8sjob-{host}-fifo")
    before = names(tmp_path)
    monkeypatch.setattr(os, "getuid", lambda: 4_000_000)
    start_next(tmp_path)
    assert names(tmp_path) == before, "they are another user's"
    monkeypatch.undo()
    monkeypatch.setattr(temporary, "_HOST", "0" * 8)
    start_next(tmp_path)
    assert names(tmp_path) == before, "they are another machine's"
    monkeypatch.undo()
    start_next(tmp_path)
    assert before - names(tmp_path) == leftovers
    assert (tmp_path / "elsewhere" / ".lock").exists()


def test_a_file_that_is_swept_before_it_is_locked_is_made_again(tmp_path, monkeypatch):
    swept, lock = [], fcntl.flock

    def slow(file, how):
        if not swept:
            swept.extend(tmp_path.iterdir())
            swept[0].unlink()
        lock(file, how)

    monkeypatch.setattr(fcntl, "flock", slow)
    with whole_file(tmp_path / "result") as out:
        out.write(b"whole")
    assert len(swept) == 1
    assert (tmp_path / "result").read_bytes() == b"whole"
    assert names(tmp_path) == {"result"}


def test_a_folder_is_not_swept_before_it_is_locked(tmp_path, monkeypatch):
    lock = fcntl.flock

    def slow(file, how):
        monkeypatch.undo()
        start_next(tmp_path)
        lock(file, how)

    monkeypatch.setattr(fcntl, "flock", slow)
    with temporary_folder("first", str(tmp_path)) as folder:
        assert folder.is_dir()
    assert names(tmp_path) == set()


def test_without_locks_nothing_is_taken_for_abandoned(tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(fcntl, "flock", refuse)
    with temporary_folder("first", str(tmp_path)) as folder:
        start_next(tmp_path)
        assert folder.is_dir()
    assert names(tmp_path) == set()


def test_all_temporary_files_are_made_here():
    root = Path(k8sjob.__file__).parent
    makers = {"TemporaryDirectory", "NamedTemporaryFile", "mkdtemp", "mkstemp"}
    users = {
        str(path.relative_to(root))
        for path in root.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute | ast.Name)
        and (node.attr if isinstance(node, ast.Attribute) else node.id) in makers
    }
    # In a folder of this module; with a lock of its own.
    others = {"image/registry/oci_layout.py"}
    assert users == {"temporary.py", *others}

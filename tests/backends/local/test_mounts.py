"""Mounts at the paths that a container has: real ones, where the kernel makes them."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from k8sjob.backends.local import mounts as module
from k8sjob.backends.local.mounts import refusal
from k8sjob.targets.api import JobState

NOBODY = 65534
SYSTEM = "/usr/bin/python3"
AS_ROOT = pytest.mark.skipif(
    os.getuid() != 0 or not Path(SYSTEM).exists(), reason="only root can be somebody else"
)
NULL = Path("/dev/null").stat().st_rdev


@pytest.fixture
def folder():
    """A folder that everybody may reach and write."""
    with tempfile.TemporaryDirectory(dir="/tmp") as path:
        folder = Path(path, "volume")
        folder.mkdir()
        for each in (Path(path), folder):
            each.chmod(0o777)
        (folder / "last.pt").write_text("epoch 4")
        yield folder


@pytest.fixture
def mounts(folder):
    """One below each kind of folder: the root, one of the system, a writable one."""
    every = dict.fromkeys(["/k8sjob-a", "/k8sjob-b/c/d", f"{folder.parent}/e"], str(folder))
    if os.getuid():  # root makes the last folder in /usr itself
        every["/usr/k8sjob-f"] = str(folder)
    if why := refusal(every):
        pytest.skip(f"this machine makes no mounts: {why}")
    return every


CODE = """
import os, sys, pathlib
for path in sys.argv[1:]:
    file = pathlib.Path(path, "last.pt")
    print(file.read_text(), os.getuid(), os.stat("/dev/null").st_rdev, os.getcwd())
    pathlib.Path(path, "new").write_text("x")
try:
    open("/k8sjob-x", "w")
except OSError as error:
    print(type(error).__name__, os.listdir("/proc/self/fd") != [])
"""


@pytest.mark.parametrize("uid", [os.getuid(), pytest.param(NOBODY, marks=AS_ROOT)])
def test_a_folder_is_at_its_path_for_one_process(mounts, folder, uid):
    user = {} if uid == os.getuid() else {"user": uid, "group": uid, "extra_groups": []}
    program = shutil.copy(module.__file__, folder.parent)
    python = SYSTEM if user else sys.executable  # which may be in the home of root
    argv = [python, "-I", "-S", program, json.dumps(mounts), python, "-c", CODE, *mounts]
    user |= {"capture_output": True, "text": True, "cwd": folder.parent}
    answer = subprocess.run(argv, check=False, **user)
    if uid and "unshare" in answer.stderr:
        pytest.skip(answer.stderr)
    line = f"epoch 4 {uid} {NULL} {folder.parent}"
    assert answer.stdout.splitlines() == [*[line] * len(mounts), "OSError True"], answer.stderr
    assert (folder / "new").stat().st_uid == uid
    assert not [path for path in Path("/").iterdir() if path.name.startswith("k8sjob-")]


def test_a_script_opens_the_path_that_it_has_in_the_cluster(
    mounts, folder, make_plan, backend, wait
):
    script = 'print(open("/k8sjob-a/last.pt").read()); open("/k8sjob-a/job", "w").write("x")'
    volumes = [{"name": "keep", "mount": "/k8sjob-a", "pvc": "claim", "local": str(folder)}]
    ref = backend.create(make_plan(script, workers=0, volumes=volumes))
    status = wait.end(ref)
    assert status.state is JobState.SUCCEEDED, status.replicas
    assert wait.lines(ref) == ["epoch 4"]
    assert (folder / "job").exists()
    assert "PathNotMapped" not in {e["reason"] for e in backend.snapshot(ref).events}


@pytest.mark.parametrize("mount", ["/dev/keep", "/etc"])
def test_a_path_that_is_not_mounted_is_named(folder, make_plan, finished, backend, mount):
    """One of the kernel's, or one that would hide what this machine has there."""
    volumes = [{"name": "keep", "mount": mount, "pvc": "claim", "local": str(folder)}]
    ref = finished(make_plan(f'print("{mount}")', workers=0, volumes=volumes))
    messages = {e["reason"]: e["message"] for e in backend.snapshot(ref).events}
    assert f"{mount}, which is {folder}" in messages["PathNotMapped"]


@pytest.mark.parametrize("mount", ["file/below", "link"])
@pytest.mark.usefixtures("mounts")
def test_a_mount_point_that_cannot_be_made_ends_no_job(folder, make_plan, backend, wait, mount):
    (folder.parent / "file").touch()
    (folder.parent / "link").symlink_to("nowhere")
    local = {"name": "keep", "mount": "/k8sjob-a", "pvc": "claim", "local": str(folder)}
    scratch = {"name": "scratch", "mount": f"{folder.parent}/{mount}", "empty_dir": {}}
    ref = backend.create(make_plan("", workers=0, volumes=[local, scratch]))
    assert wait.end(ref).state is JobState.SUCCEEDED

"""What the replicas of a job write into its folders: found, and copied back."""

import pytest

from k8sjob.backends.local.outputs import copy_written, listed, written_files

WRITES = """\
import os, pathlib
for name in ("model.pt", "runs/events.1", "__pycache__/x.pyc"):
    pathlib.Path(name).parent.mkdir(exist_ok=True)
    pathlib.Path(name).write_text("new")
with open("notes.txt", "a") as notes:
    notes.write("more")
os.symlink("model.pt", "last.pt")
os.mkfifo("pipe")
pathlib.Path("cache/cache.bin").write_text("new")
"""


def names(folder, paths):
    return {str(path.relative_to(folder.path)) for path in paths}


@pytest.mark.parametrize("workers", [0, 1])
def test_new_and_changed_files_are_found_and_copied(
    workers, make_plan, finished, backend, tmp_path
):
    volumes = [{"name": "scratch", "mount": "/app/cache", "empty_dir": {}}]
    plan = make_plan(WRITES, workers=workers, volumes=volumes)
    for name in ("notes.txt", "data.csv"):
        (plan.folder / name).write_text("the user's ")
    folder = backend.folder(finished(plan))
    written = {"model.pt", "last.pt", "runs/events.1", "notes.txt"}
    expected = {f"replicas/master-0/work/{name}" for name in written}
    expected.add("replicas/master-0/volumes/scratch/cache.bin")
    if workers:
        expected |= {name.replace("master", "worker") for name in expected}
    assert names(folder, written_files(folder)) == expected

    target = tmp_path / "results"
    first = target / "master-0" if workers else target
    first.mkdir(parents=True)
    (first / "model.pt").write_text("of an earlier run")
    (first / "runs").write_text("a file where a folder would be")
    existing = [first / "model.pt", first / "runs/events.1"]
    assert copy_written(folder, target) == (len(expected) - 2, existing)
    assert (first / "model.pt").read_text() == "of an earlier run"
    assert (first / "notes.txt").read_text() == "the user's more"
    assert str((first / "last.pt").readlink()) == "model.pt"
    assert (first / "volumes/scratch/cache.bin").exists()
    assert (target / "worker-0/model.pt").exists() == bool(workers)
    (folder.path / "volumes/shared/replicas").mkdir(parents=True)
    (folder.path / "volumes/shared/replicas/x").touch()
    assert copy_written(folder, tmp_path / "all") == (len(expected) + 1, [])
    assert (tmp_path / "all/job/volumes/shared/replicas/x").exists()


def test_a_long_list_is_cut(tmp_path):
    lines = listed([tmp_path / f"{number}\x1b[31m.pt" for number in range(30)]).splitlines()
    assert lines[-1] == "... and 20 more"
    assert len(lines) == 11
    assert "\x1b" not in lines[0]

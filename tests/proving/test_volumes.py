"""No run of `prove` or `fit` writes into a folder of the user, whatever a volume leads to."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from k8sjob.backends.local.mounts import refusal
from k8sjob.backends.local.prepare import Places, prepare
from k8sjob.backends.local.state_folder import Store
from k8sjob.errors import BackendError
from k8sjob.forking import volumes
from k8sjob.jobs.plan import plan_run
from k8sjob.spec import JobSpec

CLAIM = {"name": "c", "mount": "/c", "pvc": "c"}


def contents(*folders):
    """All files below folders, and where links lead."""
    return {
        path: str(path.readlink()) if path.is_symlink() else path.is_file() and path.read_bytes()
        for folder in folders
        for path in [folder, *folder.rglob("*")]
    }


def plan_of(folder, **volume):
    (folder / "main.py").touch()
    return plan_run(
        JobSpec(name="j", image="n:1", run={"script": "main.py"}, volumes=[CLAIM | volume]), folder
    )


def seen(plan, root):
    return Path(Places(plan, root, root / "checkpoints", Store()).of("worker-0")["/c"])


@pytest.fixture
def root(tmp_path):
    """The folder of a run."""
    (tmp_path / "run").mkdir()
    return tmp_path / "run"


@pytest.fixture
def mine(tmp_path):
    """A folder with what people have in theirs, and another one that its links lead to."""
    folder, outside = tmp_path / "mine", tmp_path / "outside"
    (folder / "runs/1").mkdir(parents=True)
    (outside / "deep").mkdir(parents=True)
    for path in (folder / "a.pt", folder / "runs/1/b.pt", outside / "deep/d.pt", outside / "e.pt"):
        path.write_text(path.name)
    (folder / "fixed.pt").write_text("fixed")
    (folder / "fixed.pt").chmod(0o444)
    (folder / "latest").symlink_to("runs/1")
    (folder / "best.pt").symlink_to((folder / "runs/1/b.pt").absolute())
    (folder / "data").symlink_to(outside)
    (folder / "pretrained.pt").symlink_to(outside / "e.pt")
    (folder / "next.pt").symlink_to(outside / "not-yet.pt")
    (outside / "back").symlink_to(folder / "runs")
    os.mkfifo(folder / "pipe")
    return folder, outside


def scribble(folder):
    """Write to each file under a folder, through links too, and make new ones."""
    for parent, _, files in [*os.walk(folder, followlinks=True)]:
        for name in [*files, "next.pt", "new.pt"]:
            Path(parent, name).write_text("new")


def test_a_script_that_writes_through_a_volume_changes_no_folder_of_the_user(mine, tmp_path, root):
    plan = volumes.private(plan_of(tmp_path, local="mine"), root)
    copy = seen(plan, root)
    names = ("latest/b.pt", "best.pt", "data/deep/d.pt", "pretrained.pt", "fixed.pt")
    texts = [(copy / name).read_text() for name in names]
    assert texts == ["b.pt", "b.pt", "d.pt", "e.pt", "fixed"]
    before = contents(*mine)
    scribble(copy)
    assert contents(*mine) == before


@pytest.mark.parametrize("volume", [{"local": "mine/a.pt"}, {"local": "mine", "sub_path": "runs"}])
def test_a_file_or_a_part_of_a_volume_is_copied_alone(volume, mine, tmp_path, root):
    plan = volumes.private(plan_of(tmp_path, **volume), root)
    copy = seen(plan, root)
    assert copy.is_relative_to(root)
    source = mine[0] / ("runs" if "sub_path" in volume else "a.pt")
    assert [*contents(copy).values()] == [*contents(source).values()]


def test_links_of_the_code_lead_to_copies(mine, tmp_path, root):
    context = tmp_path / "code"
    context.mkdir()
    for name, target in {"saves": mine[0], "e.pt": mine[1] / "e.pt", "n.pt": mine[1] / "n"}.items():
        (context / name).symlink_to(target)
    plan = volumes.private(plan_of(context, local=str(mine[0])), root)
    prepare(Places(plan, root, root / "checkpoints", Store()), root)
    volumes.detach(root)
    work, before = root / "replicas/master-0/work", contents(*mine)
    assert (work / "saves/data/deep/d.pt").read_text() == "d.pt"
    scribble(work)
    (work / "n.pt").write_text("new")
    assert contents(*mine) == before


@pytest.mark.parametrize("volume", [[], [CLAIM], [CLAIM | {"local": "mine"}]])
def test_the_path_of_checkpoints_leads_to_an_empty_folder(volume, mine, tmp_path, root):
    (tmp_path / "main.py").touch()
    script = {"script": "main.py", "args": ["--out=/c/x"]}
    spec = JobSpec(name="j", image="n:1", run=script, volumes=volume, checkpoint={"dir": "/c"})
    plan = volumes.private(plan_run(spec, tmp_path), root)
    launch = prepare(Places(plan, root, root / "checkpoints", Store()), root).launches["master-0"]
    assert launch.env["K8SJOB_CHECKPOINT_DIR"] == str(root / "checkpoints")
    assert f"--out={root}/checkpoints/x" in launch.argv
    assert not [*(root / "checkpoints").iterdir()]


def test_a_folder_that_only_others_can_read_is_left_out(mine, tmp_path, monkeypatch, root):
    """As lost+found at the root of a disk; tests may run as root, who can read all."""
    monkeypatch.setattr(volumes.os, "access", lambda path, _mode: Path(path).name != "runs")
    plan = volumes.private(plan_of(tmp_path, local="mine"), root)
    assert not (seen(plan, root) / "runs").exists()


def test_the_folder_of_a_claim_that_jobs_on_this_machine_share(tmp_path, monkeypatch, root):
    monkeypatch.setenv("K8SJOB_STATE", str(tmp_path / "state"))
    empty = volumes.private(plan_of(tmp_path), root)
    assert seen(empty, root).is_dir()
    claim = Store().claim("c")
    assert not claim.exists()
    claim.mkdir(parents=True)
    (claim / "last.pt").write_text("4")
    other = tmp_path / "other"
    other.mkdir()
    plan = volumes.private(plan_of(tmp_path), other)
    assert seen(plan, other).is_relative_to(other)
    assert (seen(plan, other) / "last.pt").read_text() == "4"


@pytest.mark.parametrize(
    ("limit", "link"), [("MAX_BYTES", None), ("MAX_FILES", None), ("MAX_FILES", ".")]
)
def test_a_large_folder_is_refused_by_its_name(limit, link, mine, monkeypatch, root):
    monkeypatch.setattr(volumes, limit, 200 if link else 5)
    if link:  # a folder without an end
        (mine[0] / "loop").symlink_to(link)
        (mine[0] / "runs/loop").symlink_to("..")
    with pytest.raises(BackendError, match=f"volume 'c': {mine[0]} has more than"):
        volumes.private(plan_of(root.parent, local="mine"), root)


PROGRAMS = Path(__file__).with_name("programs")


@pytest.mark.dist
@pytest.mark.parametrize(
    ("command", "mount"), [("prove", "/ckpt"), ("prove", "ckpt"), ("fit", "ckpt")]
)
def test_a_checkpoint_on_a_volume_of_the_user(command, mount, tmp_path):
    """The script has the path of the mount, where this machine may have the user's own folder."""
    mount = str(tmp_path / mount)
    if why := refusal({"/ckpt": str(tmp_path)}):
        pytest.skip(f"this machine makes no mounts: {why}")
    for name in ("common.py", "foreign.py"):
        shutil.copy(PROGRAMS / name, tmp_path)
    code = f"import sys, foreign\nsys.argv[1:] = [{mount!r}]\nforeign.on_a_volume()\n"
    (tmp_path / "main.py").write_text(code)
    (tmp_path / "ckpt").mkdir()
    state = {"model": torch.nn.Linear(6, 2).state_dict(), "epoch": 1}
    torch.save(state, tmp_path / "ckpt/last.pt")
    (tmp_path / "job.yaml").write_text(
        "name: j\nimage: n:1\nreplicas: {workers: 1}\nrun: {script: main.py}\n"
        f"volumes: [{{name: ckpt, mount: {mount}, pvc: ckpt, local: ./ckpt}}]\n"
    )
    before = contents(tmp_path / "ckpt")
    words = [sys.executable, "-m", "k8sjob", command, "-o", "json"]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert contents(tmp_path / "ckpt") == before
    if command == "prove":
        proof = json.loads(done.stdout)
        assert (proof["equal"], proof["layout"]) == (True, "2 nodes x 1 process")
        assert not any("restart" in part for part in proof["not_compared"])

"""Weights out of checkpoints of both forms, as a user has them on a laptop."""

import sys

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from k8sjob.runtime.base.env import dist_env
from k8sjob.runtime.base.event_lines import Reporter
from k8sjob.runtime.checkpoint.export import export
from k8sjob.runtime.checkpoint.store import Checkpoints
from k8sjob.runtime.checkpoint.writer import Checkpointer
from k8sjob.runtime.comm.process_group import Group


def tied():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(4, 3), nn.Linear(3, 4))
    model[1].weight = model[0].weight
    return model


@pytest.fixture(params=["full", "sharded"])
def folder(request, tmp_path):
    """The checkpoints of steps 1 and 2."""
    return save(tmp_path, request.param)


def save(tmp_path, form):
    """The folder with the checkpoints of steps 1 and 2, in that form."""
    folder, model = tmp_path / "saved", tied()
    group = Group(dist_env({}), "gloo", torch.device("cpu"))
    reporter = Reporter(active=False, events=False)
    saves = Checkpointer(Checkpoints(folder), group, reporter, form=form)
    for step in (1, 2):
        with torch.no_grad():
            model[1].bias.fill_(step)
        parts = {"model": model.state_dict(), "optimizer": {"state": {}, "param_groups": []}}
        saves.save("run", step, {"epoch": step}, whole=lambda: parts, parts=lambda: parts)  # noqa: B023 - called at once
        saves.settle()
    return folder


def newest(folder):
    return max(folder.iterdir())


def fits(weights, step):
    model = tied()
    model.load_state_dict(weights)
    assert model[1].bias.tolist() == [step] * 4
    assert torch.equal(model[0].weight, tied()[0].weight)


def test_the_newest_checkpoint_of_a_job_on_this_machine(k8sjob, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "job.yaml").write_text(
        "name: tiny\nimage: x/y:1\nrun: {command: [python, main.py]}\n"
        "checkpoint: {dir: /checkpoints}\n"
    )
    (tmp_path / "main.py").write_text(
        "import os, shutil, sys\n"
        "target = os.environ['K8SJOB_CHECKPOINT_DIR']\n"
        "if 'NONE' not in os.environ:\n"
        f"    shutil.copytree({str(save(tmp_path, 'full'))!r}, target, dirs_exist_ok=True)\n"
    )
    monkeypatch.setenv("NONE", "1")
    assert k8sjob("run").code == 0
    assert "set checkpoint.dir in its job.yaml, or name an earlier" in k8sjob("export", "tiny").err
    monkeypatch.delenv("NONE")
    assert k8sjob("run").code == 0
    target = tmp_path / "out.pt"
    done = k8sjob("export", "local/tiny", "-o", target)
    assert done == (0, f"{target}\n", f"3 tensors, {target.stat().st_size:,} bytes, of step 2\n")
    fits(torch.load(target, weights_only=True), 2)
    for unknown in ("other", "blue/other", "saved/step-9.pt"):
        done = k8sjob("export", unknown)
        assert done.code == 1
        assert f"{unknown}: no such checkpoint, and no such job on this machine" in done.err


def test_an_existing_file_is_an_error_of_the_command(k8sjob, tmp_path):
    target = tmp_path / "out.pt"
    target.touch()
    done = k8sjob("export", save(tmp_path, "full"), "-o", target)
    hint = "specify another file with -o, or replace it with --force"
    assert done == (1, "", f"error: {target} exists; {hint}\n")


def take(source, target, *, everything=False, force=False):
    """(what was done, warnings)"""
    warnings = []
    done = export(source, target, everything=everything, force=force, warn=warnings.append)
    return done, warnings


def test_everything(folder, tmp_path):
    take(folder, tmp_path / "out.pt", everything=True)
    found = torch.load(tmp_path / "out.pt", weights_only=True)
    assert found["epoch"] == 2
    fits(found["model"], 2)
    with pytest.raises(ValueError, match="safetensors holds tensors by name and nothing else"):
        take(folder, tmp_path / "out.safetensors", everything=True)


def test_a_damaged_one_is_passed_over_or_refused(folder, tmp_path):
    path = newest(folder)
    file = path / "__0_0.distcp" if path.is_dir() else path
    file.write_bytes(file.read_bytes()[:-5])
    done, [warning] = take(folder, tmp_path / "out.pt")
    assert done["step"] == 1
    assert f"{path} is skipped: it is incomplete or damaged" in warning
    with pytest.raises(ValueError, match=r"it is incomplete or damaged: .*use another checkpoint"):
        take(path, tmp_path / "other.pt")
    assert not (tmp_path / "other.pt").exists()


def test_the_form_follows_from_the_suffix(folder, tmp_path):
    target = tmp_path / "out.safetensors"
    target.write_text("older")
    done, _ = take(newest(folder), target, force=True)
    assert done["step"] == 2
    fits(load_file(target), 2)
    with pytest.raises(ValueError, match=r"suffix decides the format; end it with \.pt or \.safet"):
        take(folder, tmp_path / "out.zip")
    assert not (tmp_path / "out.zip").exists()


@pytest.mark.parametrize(
    ("source", "detail"),
    [
        ("nowhere", "does not exist; specify a checkpoint"),
        (".", "has no complete checkpoint; specify the folder"),
        ("list.pt", "it holds a list, not a dict: another program's file; use another"),
        ("epoch.pt", "holds epoch, step and no model's weights by name; export everything with"),
    ],
)
def test_what_is_no_checkpoint_is_one_error(tmp_path, source, detail):
    torch.save([1], tmp_path / "list.pt")
    torch.save({"epoch": 1, "step": 2}, tmp_path / "epoch.pt")
    with pytest.raises(ValueError, match=detail):
        take(tmp_path / source, tmp_path / "out.pt")
    with pytest.raises(ValueError, match="there is no folder"):
        take(tmp_path / "epoch.pt", tmp_path / "none" / "out.pt")


@pytest.mark.parametrize("suffix", ["pt", "safetensors"])
def test_a_file_that_cannot_be_written_is_named(tmp_path, folder, suffix):
    target = tmp_path / f"there.{suffix}"
    target.mkdir()
    with pytest.raises(OSError, match=r"there\.\w+ cannot be written: Is a directory"):
        take(folder, target, force=True)
    assert {path.name for path in tmp_path.iterdir()} == {"saved", target.name}


def test_without_torch_it_says_what_to_install(k8sjob, folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    done = k8sjob("export", folder)
    assert done.code == 1
    assert done.err.startswith("error: torch is not installed for ")
    assert f"{sys.executable} -m pip install torch" in done.err

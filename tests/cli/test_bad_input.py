"""Whatever is in a file, the answer is a line and an exit code."""

import contextlib
import io
import zipfile

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from k8sjob.cli import main

PIECES = [
    "name: x\n", "image: a/b:1\n", "run: {script: main.py}\n", "kind: PyTorchJob\n", "spec:\n",
    "apiVersion: kubeflow.org/v1\n", "  pytorchReplicaSpecs:\n", "    Master: {replicas: 1}\n",
    "import torch\n", "&a [*a]\n", "---\n", "- 1\n", "? {a: b}\n", "<<: 3\n", "!!python/x y\n",
    "\t", "\0", "\x1b]0;t\x07", "\ud7ff", "overlay: {spec: null}\n", "replicas: []\n", "{" * 70,
]  # fmt: skip
TEXTS = st.lists(st.sampled_from(PIECES) | st.text(max_size=20), max_size=8).map("".join)


def stream(data=b""):
    return io.TextIOWrapper(io.BytesIO(data), encoding="utf-8", write_through=True)


def written(out):
    return out.buffer.getvalue().decode()


@pytest.mark.parametrize("command", ["validate", "render", "adopt", "lint"])
@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.binary(max_size=100) | TEXTS.map(lambda text: text.encode()))
@example(data=b"")
@example(data=b"\xff\xfe")
@example(data=b"[" * 100_000)
@example(data=b"kind: PyTorchJob\nspec: 7\n")
@example(data=b"name: x\nimage: {}\nrun: []\nreplicas: 'x'\n")
def test_no_file_is_a_bug(command, data, monkeypatch):
    monkeypatch.setattr("sys.stdin", stream(data))
    out, err = stream(), stream()
    with (
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
        pytest.raises(SystemExit) as end,
    ):
        main([command, "-"])
    detail = written(err)
    assert end.value.code in (0, 1), detail
    assert "bug in k8sjob" not in detail
    assert "Traceback" not in detail
    assert "\x1b" not in detail
    if end.value.code == 1:
        assert detail.startswith("error: ") or written(out)


@pytest.mark.parametrize("command", ["validate", "render", "adopt"])
def test_a_file_without_an_end_is_too_large(command, k8sjob):
    done = k8sjob(command, "/dev/zero")
    assert done.code == 1
    assert "/dev/zero: longer than the 1048576 bytes" in done.err


READ = ["why", "status", "logs", "usage", "report", "archive"]


@pytest.mark.parametrize("command", [*READ, "watch", "rerun", "ui --local"])
def test_a_record_that_was_cut_is_one_error(command, records, k8sjob):
    name, *options = command.split()
    whole = records[0].read_bytes()
    records[0].write_bytes(whole[: len(whole) // 2])
    done = k8sjob(name, records[0], *options)
    assert (done.code, done.out) == (1, "")
    assert done.err.startswith(f"error: {records[0]} cannot be read as a record of a job: ")
    assert done.err.endswith("`k8sjob archive NAME`\n")
    assert done.err.count("\n") == 1


@pytest.mark.parametrize("command", READ)
def test_damaged_output_in_a_record_does_not_pass_for_none(
    command, records, k8sjob, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    name, *options = command.split()
    with zipfile.ZipFile(records[0]) as archive:
        members = {one: archive.read(one) for one in archive.namelist()}
    with zipfile.ZipFile(records[0], "w") as archive:
        for member, content in members.items():
            archive.writestr(member, content[:-9] if member.startswith("logs/m") else content)
    options += ["-o", "other.k8sjob"] if name == "archive" else []
    done = k8sjob(name, records[0], *options)
    assert done.code == 1
    assert f"{records[0]} cannot be read as a record of a job: logs/master-0: " in done.err
    assert "Traceback" not in done.err
    assert {path.suffix for path in tmp_path.iterdir()} <= {".k8sjob"}


def test_hints_for_a_script_in_the_place_of_a_job(k8sjob, tmp_path):
    """Arguments without `--`, a notebook, a shell's script, and a record."""
    done = k8sjob("run", tmp_path / "train.py", "--workers", "1", "--lr", "0.1")
    assert done.code == 2
    assert f"k8sjob run {tmp_path}/train.py --workers 1 -- --lr 0.1" in done.err
    again = k8sjob("run", tmp_path / "a.py", "--output=json", "--out", "b", "--", "c")
    assert f"k8sjob run {tmp_path}/a.py --output=json -- --out b c\n" in again.err
    for options in (["a.py", "-qx"], ["--freshh", "a.py"], ["job.yaml", "--freshh"]):
        done = k8sjob("run", *options)
        assert (done.code, " -- " in done.err) == (2, False)
    assert "did you mean" in done.err.lower()
    hints = {"a.ipynb": "k8sjob init --from", "a.sh": "[sh, a.sh]", "a.k8sjob": "why read"}
    for name, hint in hints.items():
        (tmp_path / name).write_bytes(b"PK\3\4\xff\xff")
        assert hint in k8sjob("validate", tmp_path / name).err


def test_limits_of_a_manifest_are_fields_of_resources(k8sjob, job_file):
    done = k8sjob("validate", job_file("resources: {limits: {nvidia.com/gpu: 1}}"))
    assert ": resources.limits: no such field; write the limits themselves" in done.err

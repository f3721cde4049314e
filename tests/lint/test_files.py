"""`lint(path)`: any file, and a job.yaml with all that belongs to it."""

import io
import sys
from types import SimpleNamespace

import pytest

from k8sjob.errors import SpecError
from k8sjob.lint import lint

JOB = "name: digits\nimage: {repository: r/x, base: 'python:3.12'}\nrun: {script: main.py}\n"


def ids(path):
    return [finding.id for finding in lint(path)]


@pytest.fixture
def job(tmp_path):
    """A job.yaml with a good script beside it."""
    (tmp_path / "job.yaml").write_text(JOB)
    (tmp_path / "main.py").write_text("print('hello')\n")
    return tmp_path / "job.yaml"


def test_a_job_is_checked_with_its_script(job):
    assert ids(job) == []
    assert ids(job.parent) == []
    (job.parent / "main.py").write_text(
        "import torch\ntorch.distributed.init_process_group('mpi')\n"
    )
    found = lint(job)
    assert {f.source for f in found} == {str(job.parent / "main.py")}
    # the agent destroys the group of a script that does not
    assert [f.id for f in found] == ["backend-not-built-in"]


def test_the_script_is_looked_for_where_the_image_has_it(job):
    (job.parent / "main.py").unlink()
    assert ids(job) == ["script-missing"]
    job.write_text(JOB.replace("script: main.py", "module: pkg.train"))
    assert ids(job) == ["script-missing"]
    (job.parent / "pkg/train").mkdir(parents=True)
    (job.parent / "pkg/train/__main__.py").write_text("def f(:\n")
    assert ids(job) == ["script-syntax"]
    job.write_text(JOB.replace("base: 'python:3.12'", "pull_secrets: [a]"))
    assert ids(job) == []


def test_a_command_is_followed_to_its_script(job):
    script = "import os\nprint(os.environ['LOCAL_RANK'])\n"
    (job.parent / "main.py").write_text(script)
    for command, expected in (
        ("[python, /app/main.py]", ["local-rank-without-launcher"]),
        ("[torchrun, main.py]", []),
        ("[./start.sh, main.py]", []),
        ("[python, elsewhere.py]", []),
    ):
        job.write_text(JOB.replace("script: main.py", f"command: {command}"))
        assert ids(job) == expected, command


def test_a_job_that_is_not_valid(job):
    job.write_text(JOB + "replica: {workers: 2}\n")
    (finding,) = lint(job)
    assert (finding.id, finding.line) == ("invalid-document", 4)
    assert "did you mean 'replicas'" in finding.message


def test_findings_in_the_manifest_are_told_at_the_field_of_the_job(job):
    job.write_text(
        JOB
        + "replicas: {workers: 1}\nresources:\n  gpus: 1\n  shm: 0\n"
        + "policy:\n  clean_pod_policy: None\n"
    )
    found = {finding.id: finding.line for finding in lint(job)}
    assert found == {"no-shared-memory": 7, "gpus-kept-after-success": 9}
    job.write_text(job.read_text().replace("shm: 0", "shm: 0  # k8sjob: ignore[no-shared-memory]"))
    assert ids(job) == ["gpus-kept-after-success"]


def test_findings_that_come_from_the_overlay_are_told_there(job):
    overlay = "overlay:\n  spec:\n    runPolicy:\n      backoffLimit: 1\n"
    counted = "replicas: {workers: 3}\npolicy: {restart_policy: OnFailure}\n"
    job.write_text(JOB + counted + overlay)
    (finding,) = lint(job)
    assert (finding.id, finding.line) == ("backoff-limit-too-small", 9)


def test_what_a_file_is_shows_in_its_name_or_its_text(tmp_path, monkeypatch, pytorchjob):
    from k8sjob.document import dump

    bad = pytorchjob(nprocPerNode="two")
    for name, text, expected in (
        ("a.yaml", dump(bad), ["nproc-value"]),
        ("a.json", dump(bad), ["nproc-value"]),
        ("a.py", "def f(:\n", ["script-syntax"]),
        (
            "train",
            "import torch\ntorch.distributed.new_group(backend='mpi')\n",
            ["backend-not-built-in"],
        ),
        ("b.yaml", "[]\n", ["invalid-document"]),
        ("c.yaml", "", ["invalid-document"]),
    ):
        (tmp_path / name).write_text(text)
        assert ids(tmp_path / name) == expected, name
        monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(text.encode())))
        if "." not in name or name == "a.yaml":
            assert ids("-") == expected


def test_what_cannot_be_read_is_an_error(tmp_path):
    with pytest.raises(SpecError, match=r"none\.yaml: cannot be read: No such file"):
        lint(tmp_path / "none.yaml")
    (tmp_path / "latin.py").write_bytes(b"# caf\xe9\n")
    with pytest.raises(SpecError, match="byte 0xe9 is not UTF-8"):
        lint(tmp_path / "latin.py")


def test_a_file_without_an_end_is_refused():
    with pytest.raises(SpecError, match="longer than 1048576 bytes"):
        lint("/dev/zero")

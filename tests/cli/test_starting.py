import json

import pytest

from k8sjob.spec import load, schema

FILES = {"job.yaml", "main.py", "requirements.txt", ".job.schema.json"}


def test_init_writes_a_job_that_is_valid(k8sjob, tmp_path):
    folder = tmp_path / "my-first-job"
    done = k8sjob("init", folder)
    assert done.code == 0
    assert done.out == ""
    assert f"k8sjob run {folder}/job.yaml" in done.err
    assert {path.name for path in folder.iterdir()} == FILES
    assert load(folder).name == "my-first-job"
    first = (folder / "job.yaml").read_text().splitlines()[0]
    assert first == "# yaml-language-server: $schema=.job.schema.json"
    assert json.loads((folder / ".job.schema.json").read_text()) == schema()
    assert json.loads(k8sjob("schema").out) == schema()
    compile((folder / "main.py").read_text(), "main.py", "exec")


def test_a_folder_that_exists_gives_its_name_and_keeps_its_files(k8sjob, tmp_path, monkeypatch):
    folder = tmp_path / "here"
    folder.mkdir()
    (folder / "notes.txt").write_text("mine")
    monkeypatch.chdir(folder)
    assert k8sjob("init", ".").code == 0
    assert load(folder).name == "here"
    assert (folder / "notes.txt").read_text() == "mine"


def test_what_init_writes_is_clean(k8sjob, tmp_path):
    """But for what only its user knows: the volume of a cluster, named in a comment of the file."""
    k8sjob("init", tmp_path / "x")
    (warning,) = k8sjob("lint", tmp_path / "x").out.splitlines()
    assert "warning[checkpoint-not-shared]" in warning
    job = tmp_path / "x/job.yaml"
    text = job.read_text().replace("# volumes:", "volumes:").replace("#   - {name", "  - {name")
    job.write_text(text)
    assert k8sjob("lint", tmp_path / "x", "--strict") == (0, "", "nothing found\n")


@pytest.mark.parametrize("there", ["job.yaml", "job.yml", ".job.schema.json"])
def test_nothing_is_overwritten(there, k8sjob, tmp_path):
    (tmp_path / there).write_text("mine")
    done = k8sjob("init", tmp_path, "--name", "x")
    assert done.code == 1
    assert f"{tmp_path / there}: already exists" in done.err
    assert [path.name for path in tmp_path.iterdir()] == [there]
    assert (tmp_path / there).read_text() == "mine"


@pytest.mark.parametrize("name", ["init", "render"])
def test_a_full_disk_leaves_no_half_of_a_job(name, job_file, k8sjob, tmp_path, full_disk):
    folder = tmp_path / "x"
    command, size = {
        "init": (["init", folder], 5000),
        "render": (["render", job_file(), "--dir", folder], 500),
    }[name]
    with full_disk(size):
        done = k8sjob(*command)
    assert (done.code, done.out) == (1, "")
    assert f"cannot be written to {folder}: File too large; nothing was written" in done.err
    assert list(folder.iterdir()) == []
    assert k8sjob(*command).code == 0


@pytest.mark.parametrize(
    ("folder", "suggestion"),
    [
        ("My_Job", "for example 'my-job'"),
        ("9lives", "for example 'lives'"),
        ("a\nb", "for example"),
    ],
)
def test_a_folder_whose_name_is_no_jobs_name(folder, suggestion, k8sjob, tmp_path):
    done = k8sjob("init", tmp_path / folder)
    assert done.code == 1
    assert done.err.count("\n") == 1
    assert suggestion in done.err
    assert "give the job a name with --name" in done.err
    assert not (tmp_path / folder).exists()
    assert k8sjob("init", tmp_path / folder, "--name", "fine").code == 0
    assert load(tmp_path / folder).name == "fine"


@pytest.mark.parametrize("name", ["on", "null", "e10"])
def test_names_that_yaml_reads_as_something_else(name, k8sjob, tmp_path):
    assert k8sjob("init", tmp_path / name).code == 0
    assert load(tmp_path / name).name == name
